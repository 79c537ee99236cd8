"""Patch groups in the search: asked for by constraints, certified, checked, named, and refused where they cannot be."""

from dataclasses import replace
from pathlib import Path

import pytest

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.errors import CheckError, InputError
from mmplan.planner.check import check_plan
from mmplan.planner.configurations import list_configurations
from mmplan.planner.formats.cornstarch import export_cornstarch
from mmplan.planner.formats.jax_module import export_jax
from mmplan.planner.formats.language_chain import without_spread
from mmplan.planner.formats.linearised import Draft
from mmplan.planner.pins import has_pins, overruled, parse_pins, pinned
from mmplan.planner.plan import Plan, load_plan, save_plan
from mmplan.planner.row_handovers import row_handovers
from mmplan.planner.search import optimize
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"
EVERY = ("vision", "projector", "audio", "audio_projector")
RAW = ("vision", "audio")


def loaded(folder: Path, spread: str) -> Scenario:
    """The tiny scenario with tp 2 and this word about spread modules."""
    text = (SCENARIOS / "tiny.yaml").read_text()
    head, _, _ = text.partition("constraints:")
    path = folder / "job.yaml"
    path.write_text(f"{head}constraints: {{tp: [1, 2], pp: [2], cp: [1], recompute: [none], spread: {spread}}}\n")
    return load_scenario(path)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    scenario = loaded(tmp_path_factory.mktemp("job"), "{vision: patches, projector: images}")
    return optimize(replace(scenario, constraints=replace(scenario.constraints, tp=(2,), vp=(1,))), gap=0.0).plan


def test_patches_are_searched_where_constraints_ask(tmp_path: Path) -> None:
    plain, free = loaded(tmp_path, "null"), loaded(tmp_path, "any")
    assert not any(base.patches for base in list_configurations(plain, 4).bases)
    ways = {(base.spread, base.patches) for base in list_configurations(free, 4).bases if base.tp == 2}
    assert ways == {((), ()), (EVERY, ()), (RAW, RAW), (EVERY, (*RAW, "projector", "audio_projector"))}
    assert optimize(free, gap=0.0).plan.certificate.objective_s <= optimize(plain, gap=0.0).plan.certificate.objective_s


def test_a_plan_says_checks_and_keeps_what_is_cut(plan: Plan, tmp_path: Path) -> None:
    assert (plan.spread, plan.patches) == (("vision", "projector"), ("vision",))
    assert check_plan(plan) == () and plan.certificate.gap < 1e-6
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    for name, why in (("projector", "vision, which it reads, is not"), ("llm", "is no module that can be")):
        found = check_plan(replace(plan, patches=(name,)))
        assert any(finding.message == f"{name} is cut along patches, and {why}" for finding in found)


def test_what_rows_over_ranks_take_each_way_is_told(plan: Plan) -> None:
    """The tiny projector joins 4 rows: a sum of its results there, a gather back, as long as to gather its rows and
    the gradient of these. With cp its output takes places among the rows of the text."""
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    columns = replace(plan, tp=1, cp=2, spread=("vision",))
    rows = replace(columns, spread=("vision", "projector"), patches=("vision", "projector"))
    (before,) = row_handovers(columns, graph, costs)
    joined, placed = row_handovers(rows, graph, costs)
    assert (before.tensor, before.way, list(before.seconds)) == ("vision.3>projector", "gathered", ["gathered"])
    assert (joined.tensor, joined.way) == ("vision.3>projector.0", "strided")
    assert (placed.tensor, placed.way) == ("projector.0>llm", "placed")
    assert joined.seconds["strided"] <= before.seconds["gathered"] * 1.01
    assert placed.seconds["placed"] < placed.seconds["gathered"]
    assert row_handovers(replace(plan, patches=()), graph, costs) == ()


def test_questions_name_the_way_of_each_module(plan: Plan) -> None:
    scenario = plan.scenario
    cut, dealt = (
        parse_pins(f"tp=2 spread={text}", scenario) for text in ("vision:patches,projector", "vision,projector")
    )
    assert has_pins(plan, cut) and not has_pins(plan, dealt)
    assert pinned(scenario, cut).constraints.patches == ("vision",)
    assert pinned(scenario, dealt).constraints.patches == ()
    audio = parse_pins("spread=vision,projector,audio:patches", scenario)
    assert "constraints.spread cuts vision along patches" in overruled(scenario, audio)


@pytest.mark.parametrize(
    ("spread", "sentence"),
    [
        ("{llm: patches}", "'llm' cannot be spread; modules that can be: 'vision', 'projector', 'audio'"),
        (
            "{vision: images, projector: patches}",
            "'projector' reads 'vision', whose rows are not cut: write `vision: patches` too",
        ),
        ("{vision: patch}", "expected 'images' or 'patches', found 'patch'"),
        ("{vison: patches}", "'vison' cannot be spread; did you mean 'vision'?"),
        ("all", "expected 'any'"),
    ],
)
def test_bad_words_get_their_sentence(tmp_path: Path, spread: str, sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        loaded(tmp_path, spread)
    assert sentence in str(refused.value)


def test_an_encoder_that_drops_class_tokens_is_refused_by_name() -> None:
    scenario = load_scenario(SCENARIOS / "llava-1.5-7b-sft.yaml")
    rules = replace(scenario.constraints, tp=(2,), spread=("vision",), patches=("vision",))
    with pytest.raises(InputError, match="'vision' cannot be cut along patches: its blocks hold a DropClassToken"):
        optimize(replace(scenario, constraints=rules))


def test_frameworks_without_patch_groups_refuse_or_say_what_they_do_instead(plan: Plan) -> None:
    with pytest.raises(CheckError, match="Cornstarch cannot run spread modules"):
        export_cornstarch(plan)
    told = [loss.sentence for loss in export_jax(plan).losses]
    assert "JAX deals whole images of vision out instead of their patches" in told
    changed = without_spread(Draft(plan=plan), "Megatron-LM")
    assert (changed.plan.spread, changed.plan.patches) == ((), ()) and len(changed.losses) == 1
