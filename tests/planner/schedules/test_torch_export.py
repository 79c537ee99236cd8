"""Plans as CSV of torch's pipelining runtime: what it holds, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.errors import CheckError
from mmplan.planner.naive import naive_result
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.reschedule import refuse_unusable, with_family
from mmplan.planner.schedules.text import parse_schedule_csv, schedule_text
from mmplan.planner.schedules.torch_export import torch_csv
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Training
from mmplan.scenario.schedule_names import ScheduleName

TINY = Path(__file__).parents[3] / "scenarios" / "tiny.yaml"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Four stages in topological order, a chain: each begins in what the one before ends in."""
    return naive_result(load_scenario(TINY)).plan


def under(plan: Plan, name: ScheduleName) -> Plan:
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    return refuse_unusable(with_family(plan, name, graph, costs))


def cut_anew(plan: Plan, parts: Sequence[Sequence[str]]) -> Plan:
    return replace(plan, stages=tuple(replace(plan.stages[0], layers=tuple(part)) for part in parts))


@pytest.mark.parametrize("name", ["zb-1p", "interleaved", "zb-v"])
def test_the_csv_holds_the_orders_of_the_plan(plan: Plan, name: ScheduleName) -> None:
    made = under(plan, name)
    orders = parse_schedule_csv(torch_csv(made, build_graph(made.scenario)))
    assert schedule_text(orders).split("\n") == list(made.orders)


def test_a_schedule_that_follows_from_the_stages_is_written_out(plan: Plan) -> None:
    first, *_ = torch_csv(plan, build_graph(plan.scenario)).split("\n")
    assert first.startswith("0F0,0F1,0F2,0F3,0B0,0F4,0B1")


def test_an_i_without_w_becomes_a_whole_backward(plan: Plan) -> None:
    """Behind trained encoders, a frozen language model has no W; torch counts as many W as I."""
    model = plan.scenario.model
    frozen = tuple(
        replace(module, training=Training(mode="frozen")) if module.name == "llm" else module
        for module in model.modules
    )
    scenario = replace(plan.scenario, model=replace(model, modules=frozen))
    graph = build_graph(scenario)
    ids = [layer.id for layer in graph.layers()]
    half = next(place for place, layer in enumerate(ids) if layer.startswith("llm."))
    made = replace(cut_anew(plan, (ids[:half], ids[half:])), scenario=scenario, schedule="optimized", microbatches=1)
    made = replace(made, orders=("0F0 0I0 0W0", "1F0 1I0"))
    assert torch_csv(made, graph) == "0F0,0I0,0W0\n1F0,1B0\n"


def test_stages_that_are_no_chain_are_refused(plan: Plan) -> None:
    graph = build_graph(plan.scenario)
    ids = [layer.id for layer in graph.layers()]
    parts = [[x for x in ids if x.startswith(name)] for name in ("vision", "audio")]
    parts = [[*parts[0], *(x for x in ids if x.startswith("projector"))], parts[1]]
    rest = [x for x in ids if x not in parts[0] and x not in parts[1]]
    with pytest.raises(CheckError, match="stage 0 feeds 2"):
        torch_csv(cut_anew(plan, (*parts, rest)), graph)


def test_a_stage_without_backward_is_refused_by_name(plan: Plan) -> None:
    model = plan.scenario.model
    kept = tuple(
        replace(m, training=Training(mode="frozen")) if m.kind.endswith("_encoder") else m for m in model.modules
    )
    scenario = replace(plan.scenario, model=replace(model, modules=kept))
    graph = build_graph(scenario)
    ids = [layer.id for layer in graph.layers()]
    encoders = [x for x in ids if x.split(".")[0] in ("vision", "audio")]
    made = replace(cut_anew(plan, (encoders, [x for x in ids if x not in encoders])), scenario=scenario)
    with pytest.raises(CheckError, match=r"stage 0 \(\w+\.embed to \w+\.\w+\) is frozen"):
        torch_csv(made, graph)
