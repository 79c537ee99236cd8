"""New prices, what a switch of plans moves, and when it pays."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.memory_states import layer_counts
from mmplan.cost_models.shard import Shard
from mmplan.errors import InputError
from mmplan.planner.check import check_plan
from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import plan_from_cut
from mmplan.planner.naive import equal_stages
from mmplan.planner.new_prices import forward_s, weights_doubt, with_profile
from mmplan.planner.plan import Plan, load_plan, save_plan
from mmplan.planner.priced_groups import priced_groups
from mmplan.planner.repeated import Limits
from mmplan.planner.replan import ModalityAwarePolicy, strategy_of
from mmplan.planner.search import optimize
from mmplan.planner.switch_cost import switch_cost
from mmplan.report.replan import replan_document, replan_tables
from mmplan.scenario.load import load_scenario
from mmplan.scenario.profile import Measured, Profile, save_profile
from mmplan.scenario.scenario import Scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"
MOE = """\
name: small-moe
model:
  modules:
    vision: {kind: vision_encoder, layers: 4, hidden: 64, heads: 4, ffn: 128, patch: 8, image_size: 64}
    llm:
      kind: language_model
      layers: 4
      hidden: 64
      heads: 4
      ffn: 128
      vocabulary: 512
      moe: {experts: 4, topk: 2, expert_ffn: 64}
  edges:
    - [vision, llm]
train: {vision: frozen}
data: {text_tokens: 100, images: 1}
batch: {global: 16}
precision: bf16
cluster: {device: h100-sxm, nodes: 1, devices_per_node: 8}
"""


@pytest.fixture(scope="module")
def tiny() -> Scenario:
    return load_scenario(SCENARIOS / "tiny.yaml")


@pytest.fixture(scope="module")
def best(tiny: Scenario) -> Plan:
    return optimize(tiny, gap=0.0).plan


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    path = tmp_path_factory.mktemp("moe") / "moe.yaml"
    path.write_text(MOE)
    return load_scenario(path)


def plan_of(scenario: Scenario, pp: int, **degrees: Any) -> Plan:
    """Equal layer counts on these degrees."""
    priced = priced_groups(scenario)
    given = {"tp": 1, "dp": 1, "microbatch_size": 1, "microbatches": 1, **degrees}
    one = Configuration(pp=pp, schedule="1f1b", **given)
    stages = equal_stages(priced.groups, pp)
    return plan_from_cut(priced.prices, one, stages, bound_s=0.0, status="given", wall_s=0.0)


def held_cells(plan: Plan, expert: bool, optimizer: bool) -> list[set[tuple[str, Fraction, Fraction]]]:
    """[rank] the pieces that it holds of every layer, cut into 1/96: written out rank by rank."""
    cells: list[set[tuple[str, Fraction, Fraction]]] = [set() for _ in range(64)]
    for index, stage in enumerate(plan.stages):
        for replica in range(plan.dp):
            for cp in range(plan.cp):
                for tp in range(plan.tp):
                    rank = plan.rank(index, replica, cp * plan.tp + tp)
                    inside = (replica * plan.cp + cp) * plan.tp + tp
                    for layer in stage.layers:
                        spread = layer.rpartition(".")[0] in plan.spread
                        if expert and plan.ep > 1:
                            side = plan.ep * plan.etp
                            parts, part = side, inside % side
                            copies, copy = plan.dp * plan.cp * plan.tp // side, inside // side
                        elif spread:
                            parts, part, copies, copy = 1, 0, plan.dp * plan.cp * plan.tp, inside
                        else:
                            parts, part, copies, copy = plan.tp, tp, plan.dp * plan.cp, replica * plan.cp + cp
                        low, high = Fraction(part, parts), Fraction(part + 1, parts)
                        if plan.sharding == "parameters" or (optimizer and plan.sharding != "none"):
                            low, high = low + copy * (high - low) / copies, low + (copy + 1) * (high - low) / copies
                        cells[rank] |= {
                            (layer, Fraction(cell, 96), Fraction(cell + 1, 96))
                            for cell in range(96)
                            if low <= Fraction(cell, 96) and Fraction(cell + 1, 96) <= high
                        }
    return cells


def moved_by_hand(old: Plan, new: Plan) -> float:
    """bf16 weights of 2 bytes; AdamW's moments and master copy of 12."""
    sizes = {layer.id: layer_counts(layer, Shard()) for layer in build_graph(old.scenario).layers()}
    total = 0.0
    for expert in (False, True):
        for optimizer in (False, True):
            pairs = zip(held_cells(old, expert, optimizer), held_cells(new, expert, optimizer), strict=True)
            for before, after in pairs:
                for layer, _, _ in after - before:
                    count = sizes[layer]
                    trained, frozen = (
                        (count.expert, count.expert_frozen) if expert else (count.dense, count.dense_frozen)
                    )
                    total += (12 * trained if optimizer else 2 * (trained + frozen)) / 96
    return total


LAYOUTS: list[dict[str, Any]] = [
    {"pp": 1, "dp": 8},
    {"pp": 2, "dp": 4, "sharding": "optimizer"},
    {"pp": 2, "dp": 2, "tp": 2, "sharding": "parameters"},
    {"pp": 1, "dp": 2, "tp": 4, "spread": ("vision",), "sharding": "gradients"},
    {"pp": 1, "dp": 2, "tp": 2, "cp": 2, "ep": 4},
    {"pp": 2, "dp": 4, "ep": 2, "sharding": "parameters"},
]


@pytest.mark.parametrize("new", range(len(LAYOUTS)))
@pytest.mark.parametrize("old", range(len(LAYOUTS)))
def test_moved_bytes_are_those_counted_rank_by_rank(moe: Scenario, old: int, new: int) -> None:
    here, there = plan_of(moe, **LAYOUTS[old]), plan_of(moe, **LAYOUTS[new])
    cost = switch_cost(here, there)
    assert cost.moved_bytes == pytest.approx(moved_by_hand(here, there), abs=2)
    assert (cost.moved_bytes == 0) == (old in (0, new))  # of whole replicas everybody has everything
    assert cost.busiest_bytes <= cost.moved_bytes


def test_one_layer_that_changes_its_rank_is_moved_once(tiny: Scenario) -> None:
    """fp32 weights and two moments: 12 bytes per parameter, received by one rank, over its link of one node."""
    plan = plan_of(tiny, 2)
    first, second = plan.stages
    layer = second.layers[0]
    shifted = (replace(first, layers=(*first.layers, layer)), replace(second, layers=second.layers[1:]))
    cost = switch_cost(plan, replace(plan, stages=shifted), restart_s=5.0)
    size = 12 * layer_counts(build_graph(tiny).layer(layer), Shard()).total
    assert cost.moved_bytes == cost.busiest_bytes == size
    assert cost.seconds == pytest.approx(5.0 + size / tiny.cluster.pools[0].node_link.reached_bytes_per_s)


def live(folder: Path, entries: str) -> Path:
    path = folder / "live.yaml"
    path.write_text(f"schema: mmplan.modalities/1\nmodalities:\n{entries}")
    return path


def test_a_live_profile_scales_a_modality_to_what_was_measured(best: Plan, tmp_path: Path) -> None:
    scenario = with_profile(best, live(tmp_path, "  vision: {forward: 187.3 ms}\n  llm: {forward: 53.6 ms}\n"))
    here = replace(best, scenario=scenario)
    assert forward_s(here, ("vision", "projector")) == pytest.approx(0.1873)
    assert forward_s(here, ("llm",)) == pytest.approx(0.0536)
    assert forward_s(here, ("audio",)) == forward_s(best, ("audio",))
    again = with_profile(here, live(tmp_path, "  vision: {forward: 187.3 ms}\n"))
    assert again.model.module("vision").time_factor == pytest.approx(scenario.model.module("vision").time_factor)


def test_a_factor_scales_forward_and_backward_of_its_module_alone(tiny: Scenario) -> None:
    modules = tuple(replace(m, time_factor=3.0) if m.name == "audio" else m for m in tiny.model.modules)
    slow = replace(tiny, model=replace(tiny.model, modules=modules))
    prices, slower = (plan_of(one, 1).stages[0] for one in (tiny, slow))
    layers = {layer: priced_groups(tiny).prices.layers(plan_of(tiny, 1).layout(0), 1)[layer] for layer in prices.layers}
    audio_s = sum(price.work_s for layer, price in layers.items() if layer.startswith("audio."))
    more_s = slower.forward_s + slower.backward_s - prices.forward_s - prices.backward_s
    assert more_s == pytest.approx(2 * audio_s)


def test_weights_that_differ_from_the_models_are_told(best: Plan, tmp_path: Path) -> None:
    told = weights_doubt(best, live(tmp_path, "  vision: {forward: 1 ms, parameters: 1240 MB}\n"))
    assert told.startswith("the profile counts other weights, is it of this model? vision: 1.15 GiB there, ")
    assert weights_doubt(best, live(tmp_path, "  vision: {forward: 1 ms}\n")) == ""


def test_a_device_profile_replaces_the_numbers_of_its_device(best: Plan, tmp_path: Path) -> None:
    slow = Measured(value=1e9, p10=1e9, p90=1e9, source="measured", n=3, residual=0.0)
    latency = replace(slow, value=1e-3, p10=1e-3, p90=1e-3)
    profile = Profile(
        base="cpu-core",
        device="a core",
        kind="cpu",
        date="2026-01-01",
        quick=True,
        software={},
        parameters={"fp32_flops_per_s": slow},
        link={"bytes_per_s": slow, "latency_s": latency},
    )
    save_profile(profile, tmp_path / "p.yaml")
    scenario = with_profile(best, tmp_path / "p.yaml")
    assert scenario.cluster.pools[0].device.fp32_flops_per_s == 1e9
    assert scenario.cluster.pools[0].node_link.latency_s == scenario.cluster.network_link.latency_s == 1e-3
    save_profile(replace(profile, base="h100-sxm"), tmp_path / "p.yaml")
    with pytest.raises(InputError, match="measured on 'h100-sxm', the plan is for 'cpu-core'"):
        with_profile(best, tmp_path / "p.yaml")


BAD = {
    "  visoin: {forward: 1 ms}\n": (
        "live.yaml:3: modalities.visoin: the model has no modality or module 'visoin'; did you mean 'vision'?"
    ),
    "  vision: {forwards: 1 ms}\n": "live.yaml:3: modalities.vision.forwards: unknown key; did you mean 'forward'?",
    "  vision: {forward: 187}\n": "modalities.vision.forward: expected a time such as '10 us' with its unit, found 187",
    "  vision: {forward: 0 ms}\n": "modalities.vision.forward: expected a time above 0, found 0",
    "  vision: {parameters: 5 MB}\n": "modalities.vision.forward: this key is missing",
    "  text: {forward: 1 ms}\n  llm: {forward: 1 ms}\n": (
        "live.yaml:4: modalities.llm: 'llm' is profiled here and by 'text'"
    ),
}


@pytest.mark.parametrize("entries", BAD)
def test_what_is_wrong_with_a_live_profile_is_told(best: Plan, tmp_path: Path, entries: str) -> None:
    with pytest.raises(InputError) as caught:
        with_profile(best, live(tmp_path, entries))
    assert str(caught.value).endswith(BAD[entries])


def test_a_file_that_is_no_profile_is_told(best: Plan) -> None:
    with pytest.raises(InputError, match=r"expected one of 'mmplan\.profile/1', 'mmplan\.modalities/1', found nothing"):
        with_profile(best, SCENARIOS / "tiny.yaml")


@pytest.fixture(scope="module")
def slow_vision(best: Plan, tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    """Images take forty times as long as was planned: the cut has to move."""
    factor = 40 * forward_s(best, ("vision", "projector"))
    return with_profile(best, live(tmp_path_factory.mktemp("live"), f"  vision: {{forward: {factor} s}}\n"))


def test_a_drift_that_moves_the_cut_is_worth_a_switch_after_the_break_even(best: Plan, slow_vision: Scenario) -> None:
    result = ModalityAwarePolicy(limits=Limits(gap=0.0), restart_s=10.0).propose(best, slow_vision)
    assert result.advice == "switch"
    assert result.saved_s == pytest.approx(result.old_step_s - result.new_step_s)
    assert result.break_even_steps is not None
    assert (
        (result.break_even_steps - 1) * result.saved_s
        < result.switch.seconds
        <= result.break_even_steps * result.saved_s
    )
    assert result.switch.seconds > 10.0
    assert result.switch.moved_bytes > 0
    assert check_plan(result.plan) == ()
    vision = result.modules[0]
    assert (vision.module, vision.now_s / vision.before_s) == ("vision", pytest.approx(40.0))


def test_both_plans_may_have_a_schedule_that_was_searched_for(tiny: Scenario) -> None:
    """Else a present plan with one would seem to lose by the schedule alone."""
    limits = Limits(gap=0.0, schedule_search_s=1.0)
    present = limits.solve(tiny).plan
    result = ModalityAwarePolicy(limits=limits).propose(present, tiny)
    assert result.plan.schedule == present.schedule
    assert result.saved_s == pytest.approx(0.0, abs=1e-9)
    assert result.advice == "stay"


def test_few_steps_left_are_not_worth_a_restart(best: Plan, slow_vision: Scenario) -> None:
    few = ModalityAwarePolicy(limits=Limits(gap=0.0), restart_s=10.0, steps=2).propose(best, slow_vision)
    assert few.advice == "stay"
    assert few.reason.endswith(f"won back in {few.break_even_steps:,} steps, and 2 are left")
    many = ModalityAwarePolicy(limits=Limits(gap=0.0), restart_s=10.0, steps=10**6).propose(best, slow_vision)
    assert many.advice == "switch"


def test_without_drift_the_plan_stays(best: Plan, tiny: Scenario) -> None:
    result = ModalityAwarePolicy(limits=Limits(gap=0.0)).propose(best, tiny)
    assert result.advice == "stay"
    assert result.break_even_steps is None or result.saved_s <= 1e-9


def test_a_gain_within_the_gap_is_no_reason_to_move(best: Plan, slow_vision: Scenario) -> None:
    result = ModalityAwarePolicy(limits=Limits(gap=0.9)).propose(best, slow_vision)
    assert result.advice == "stay"


def test_a_new_plan_keeps_the_prices_it_was_made_for(best: Plan, slow_vision: Scenario, tmp_path: Path) -> None:
    result = ModalityAwarePolicy().propose(best, slow_vision)
    save_plan(result.plan, tmp_path / "new.plan.json")
    assert load_plan(tmp_path / "new.plan.json").scenario.model.module("vision").time_factor == pytest.approx(40.0)


def test_strategies_are_named_per_module(moe: Scenario) -> None:
    plan = plan_of(moe, **LAYOUTS[3])
    vision, llm = moe.model.modules
    assert strategy_of(plan, vision) == "samples over 4 + ZeRO-2 over 2"
    assert strategy_of(plan, llm) == "TP 4 + ZeRO-2 over 2"
    assert strategy_of(plan_of(moe, **LAYOUTS[4]), llm) == "TP 2 + CP 2 + EP 4 + DP 2"
    assert strategy_of(plan_of(moe, 1), llm) == "one rank"


def test_tables_and_document_hold_the_proposal(best: Plan, slow_vision: Scenario) -> None:
    result = ModalityAwarePolicy().propose(best, slow_vision)
    modules, plans, advice, doubt, _ = replan_tables(result, "old", "is it this model?", Path("new.plan.json"))
    assert not isinstance(modules, str) and modules.row_count == 5
    assert isinstance(advice, str) and advice.startswith(f"[bold]{result.advice}[/bold]: ")
    assert doubt == "is it this model?" and not isinstance(plans, str)
    document = replan_document(result, "")
    assert document["schema"] == "mmplan.replan/1"
    assert document["switch"]["moved_bytes"] == result.switch.moved_bytes
    assert document["plan"]["scenario_hash"] == result.plan.scenario_hash
