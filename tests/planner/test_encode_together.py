"""Encoders that run once for several microbatches of the language model: searched, certified, checked, simulated,
named, and refused where they cannot be."""

import re
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import edge_bytes
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.loads import mean_loads
from mmplan.errors import InfeasibleError, InputError
from mmplan.planner.check import check_plan
from mmplan.planner.check_hangs import check_hangs
from mmplan.planner.configuration import Configuration
from mmplan.planner.configurations import list_configurations
from mmplan.planner.cut_plan import plan_from_cut
from mmplan.planner.formats.deepspeed import export_deepspeed
from mmplan.planner.formats.jax_module import export_jax
from mmplan.planner.formats.needs import plan_needs
from mmplan.planner.formats.torch_pipelining import export_torch_pipelining
from mmplan.planner.lower import lower
from mmplan.planner.pins import broken_rule, has_pins, overruled, parse_pins, pinned
from mmplan.planner.plan import Plan, load_plan, save_plan, scenario_hash
from mmplan.planner.plan_schedule import plan_schedule
from mmplan.planner.pricing import Prices
from mmplan.planner.schedules.reschedule import with_family
from mmplan.planner.search import optimize
from mmplan.planner.simulate import simulate
from mmplan.planner.stage_graph import build_stage_graph
from mmplan.planner.step_loads import mean_step_loads
from mmplan.planner.step_times import step_times
from mmplan.scenario.asked import OwnRanks
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Distribution, Scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"
VISION = ("vision", "projector")
AUDIO = ("audio", "audio_projector")


def loaded(folder: Path, word: str, rest: str = "pp: [2], dp: [2], microbatch: 1, recompute: [none]") -> Scenario:
    """The tiny scenario with this word about encoders: 8 microbatches of 1 on two replicas."""
    head, _, _ = (SCENARIOS / "tiny.yaml").read_text().partition("constraints:")
    path = folder / "job.yaml"
    path.write_text(f"{head}constraints: {{tp: [1], cp: [1], {rest}, encode_together: {word}}}\n")
    return load_scenario(path)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return optimize(loaded(tmp_path_factory.mktemp("job"), "{vision: [4]}"), gap=0.0).plan


def test_the_factors_that_constraints_allow_are_searched_and_those_that_divide_the_microbatches(tmp_path: Path) -> None:
    plain, some = loaded(tmp_path, "{}"), loaded(tmp_path, "{vision: [1, 4, 3], audio: [1, 4]}")
    every = list_configurations(loaded(tmp_path, "any"), 4)
    assert {(base.together, base.batch_factor) for base in list_configurations(plain, 4).bases} == {((), 1)}
    ways = {(one.together, one.batch_factor) for one in list_configurations(some, 4)}
    assert ways == {((), 1), (VISION, 4), (AUDIO, 4), ((*VISION, *AUDIO), 4)}  # 8 / 3 is no whole number
    assert {one.batch_factor for one in every} == {1, 2, 4, 8}
    assert all(one.microbatches % one.batch_factor == 0 for one in every)


def test_a_plan_says_checks_and_keeps_what_runs_together(plan: Plan, tmp_path: Path) -> None:
    assert (plan.together, plan.batch_factor) == (VISION, 4)
    assert check_plan(plan) == () and check_hangs(plan) == () and plan.certificate.gap < 1e-6
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_hashes_of_scenarios_without_it_are_those_of_before() -> None:
    assert scenario_hash(load_scenario(SCENARIOS / "tiny.yaml")) == "430fdec411ef7d47"


def test_the_encoder_runs_once_for_four_microbatches_and_hands_out_what_it_made(plan: Plan) -> None:
    """Seconds of each forward and backward of its rank, by the cost model."""
    scenario, graph, costs = plan.scenario, build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    one, four = (mean_loads(scenario, size) for size in (1, 4))
    layers, layout = [graph.layer(layer) for layer in plan.stages[0].layers], plan.layout(0)
    alone = [layer for layer in layers if layer.module not in VISION]
    each_s = sum(costs.forward_s(layer, one[layer.module], layout) for layer in alone)
    all_s = sum(costs.forward_s(layer, four[layer.module], layout) for layer in layers if layer.module in VISION)
    found = [item for item in simulate(plan, graph, costs).timeline if item.rank == 0 and item.action.kind == "F"]
    assert [item.action.microbatch for item in found] == list(range(8))
    assert [item.end_s - item.start_s for item in found] == pytest.approx(([each_s + all_s] + [each_s] * 3) * 2)
    back = [item for item in simulate(plan, graph, costs).timeline if item.rank == 0 and item.action.kind == "B"]
    lengths = [item.end_s - item.start_s for item in back]
    assert min(lengths[3], lengths[7]) > 1.1 * max(lengths[:3] + lengths[4:7])


def test_a_stage_works_a_group_ahead_of_those_behind_it(plan: Plan) -> None:
    """1F1B would have 2 microbatches in flight on the first of two stages; it has 2 + 4 of its own layers, and of the
    encoder's both groups in which these are."""
    stages = build_stage_graph([stage.layers for stage in plan.stages], build_graph(plan.scenario))
    order = [str(action) for action in plan_schedule(plan, stages)[0]]
    assert order[:8] == ["0F0", "0F1", "0F2", "0F3", "0F4", "0F5", "0B0", "0F6"]
    assert [stage.in_flight for stage in plan.stages] == [6, 1]


def test_the_closed_form_is_near_the_simulation_and_memory_is_not_above_the_plan(plan: Plan) -> None:
    prediction = simulate(plan, build_graph(plan.scenario), AnalyticCostModel(plan.scenario))
    assert prediction.step_time_s == pytest.approx(plan.certificate.objective_s, rel=0.02)
    for rank in prediction.ranks:
        assert rank.peak_memory_bytes <= plan.stages[rank.stage].memory_bytes
    (drawn,) = step_times(
        plan, build_graph(plan.scenario), AnalyticCostModel(plan.scenario), steps=3, compositions=("in order",)
    )
    assert len(drawn.step_s) == 3


def test_tensors_between_stages_of_the_encoder_go_once_for_all(plan: Plan) -> None:
    """A cut inside the encoder: one message forward with the first microbatch, one back with the last."""
    scenario, graph = plan.scenario, build_graph(plan.scenario)
    names = [layer.id for layer in graph.layers()]
    first = [name for name in names if name in ("vision.embed", "vision.0", "vision.1")]
    second = [name for name in names if name not in first and not name.startswith("llm.")]
    stages = (tuple(first), tuple(second), tuple(name for name in names if name.startswith("llm.")))
    configuration = Configuration(
        tp=1, dp=1, pp=3, microbatch_size=2, microbatches=8, schedule="1f1b", together=VISION, batch_factor=4
    )
    prices = Prices(scenario, graph, AnalyticCostModel(scenario))
    cut = plan_from_cut(prices, configuration, stages, bound_s=0.0, status="given", wall_s=0.0)
    assert {finding.rule for finding in check_plan(cut)} <= {"constraints"}  # which want two stages
    assert [stage.in_flight for stage in cut.stages] == [8, 6, 1]
    program = lower(cut, graph, mean_step_loads(cut))
    sends = [action for rank in program.ranks for action in rank.actions if action.kind == "SEND"]
    inner = {
        (action.tensor, action.microbatch, action.bytes) for action in sends if action.tensor.count("vision.") == 2
    }
    one_bytes = edge_bytes(graph.edge("vision.1", "vision.2"), mean_loads(scenario, 2), scenario.precision)
    assert inner == {
        *(("vision.1>vision.2", microbatch, 4 * one_bytes) for microbatch in (0, 4)),
        *(("vision.1<vision.2", microbatch, 4 * one_bytes) for microbatch in (3, 7)),
    }
    outer = {action.microbatch for action in sends if action.tensor.startswith("projector.0>")}
    assert outer == set(range(8))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_factor": 3}, "8 microbatches / batch factor 3 = 2.66667 is no whole number of groups"),
        ({"together": ("projector",)}, "projector runs 4 microbatches at once, and vision, which it reads, each alone"),
        (
            {"together": ("vision", "llm")},
            "llm runs 4 microbatches at once, and is no module in front of a language model",
        ),
        ({"together": (*VISION, "vision")}, "vision and projector and vision would run 4 microbatches at once"),
        ({"together": ()}, "no module would run 4 microbatches at once"),
        ({"together": AUDIO}, "vision has batch factor 1, constraints.encode_together allows 4"),
    ],
)
def test_a_plan_that_cannot_run_so_is_told_why(plan: Plan, changes: dict[str, object], sentence: str) -> None:
    assert sentence in [finding.message for finding in check_plan(replace(plan, **changes))]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("{vison: 2}", "'vison' cannot run for several microbatches at once; did you mean 'vision'?"),
        ("{llm: 2}", "'llm' cannot run for several microbatches at once; modules that can: "),
        ("{vision: 0}", "0"),
        ("all", "expected 'any'"),
        ("{vision: 2, audio: 4}", "all encoders of a plan that run several microbatches at once run equally many"),
        ("{vision: 2, projector: 4}", "'vision' and 'projector' hang together and have one factor: 2 and 4"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(tmp_path: Path, word: str, sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        optimize(loaded(tmp_path, word))
    assert sentence in str(refused.value)


def test_questions_name_factors(plan: Plan) -> None:
    """`encode_together=4` means every encoder; a module's own word the branch that it is in."""
    scenario = plan.scenario
    four, every, alone, rest = (
        parse_pins(f"encode_together={text}", scenario) for text in ("vision:4", "4", "1", "projector:4,audio:1")
    )
    assert [has_pins(plan, pins) for pins in (four, every, alone, rest)] == [True, False, False, True]
    assert pinned(scenario, every).constraints.encode_together == (("vision", (4,)), ("audio", (4,)))
    assert overruled(scenario, alone) == "constraints.encode_together allows vision 4"
    assert overruled(scenario, four) == ""
    three = parse_pins("encode_together=3", scenario)
    assert broken_rule(scenario, three) == "the global batch 16 / vision's batch factor 3 = 5.333 is no whole number"
    for text, sentence in (
        ("visio:2", "unknown 'visio'; did you mean 'vision'?"),
        ("vision:x", "a count of at least 1"),
    ):
        with pytest.raises(InputError, match=sentence):
            parse_pins(f"encode_together={text}", scenario)


def test_a_number_of_microbatches_that_no_factor_divides_is_told_with_its_arithmetic(tmp_path: Path) -> None:
    scenario = loaded(tmp_path, "{vision: 3}")
    with pytest.raises(
        InfeasibleError, match="allows 3 microbatches at once, and none divides their number: 16 / dp=2 / 1 = 8 m"
    ):
        optimize(scenario)
    apart = loaded(tmp_path, "{vision: 2}", "pp: [2], modules: any")
    named = replace(apart, constraints=replace(apart.constraints, modules=(OwnRanks(module="audio"),)))
    with pytest.raises(
        InputError, match=r"modules on ranks of their own \(constraints.modules\) run each microbatch alone"
    ):
        optimize(named)
    other = replace(scenario, constraints=replace(scenario.constraints, schedule=("zb-1p",)))
    with pytest.raises(InputError, match=r"run under 1f1b or gpipe, and constraints\.schedule allows zb-1p"):
        optimize(other)


def test_frameworks_that_run_each_microbatch_alone_are_told_what_that_costs(plan: Plan) -> None:
    for export in (export_torch_pipelining, export_jax, export_deepspeed):
        made = export(plan)
        (loss,) = [one for one in made.losses if "each microbatch alone instead of 4 at once" in one.sentence]
        assert loss.step_s is not None and abs(loss.step_s) < plan.certificate.objective_s
    assert "several microbatches at once" in {need.name for need in plan_needs(plan, build_graph(plan.scenario))}


def test_schedules_of_one_and_one_are_not_for_it(plan: Plan) -> None:
    choice = with_family(plan, "zb-1p", build_graph(plan.scenario), AnalyticCostModel(plan.scenario))
    assert choice.reason == "vision and projector run 4 microbatches at once, and schedules are made for one and one"


def test_a_dealt_encoder_fills_its_ranks_with_the_images_of_several_microbatches(tmp_path: Path) -> None:
    """One image per microbatch on two ranks that take images in turn: alone one of them waits, of four each has two."""
    rest = "pp: [1], dp: [1], microbatch: 1, recompute: [none], spread: [vision, projector]"
    scenario = loaded(tmp_path, "any", rest)
    one = replace(scenario.data, images=Distribution(values=(1.0,), weights=(1.0,)))
    four, alone = (Layout(tp=2, spread=VISION, together=VISION if k > 1 else (), batch_factor=k) for k in (4, 1))
    prices = Prices(replace(scenario, data=one), build_graph(scenario), AnalyticCostModel(scenario))
    block = next(layer for layer in build_graph(scenario).layers() if layer.id == "vision.1")
    at_once, each = (prices.layers(layout, 1)[block.id] for layout in (four, alone))
    assert at_once.together == 4 and each.together == 1
    assert at_once.forward_s < 0.75 * each.forward_s


def test_the_example_of_the_decision_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SCENARIOS.parent)
    page = Path("docs/decisions/015-encoders-run-for-several-microbatches.md").read_text()
    (example,) = re.findall(r"^    from dataclasses.*?(?=^\S)", page, re.MULTILINE | re.DOTALL)
    exec(dedent(example), {})
    assert capsys.readouterr().out == "('vision', 'projector') 2\n"
