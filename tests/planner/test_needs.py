"""What a plan needs is read off the plan, and every need has a row for every framework."""

from dataclasses import replace

import pytest
from random_plans import random_plan

from mmplan.cost_models.build import build_graph
from mmplan.planner.formats.needs import plan_needs
from mmplan.planner.formats.support import cell, need_names, targets
from mmplan.planner.plan import Plan
from mmplan.planner.stage_graph import build_stage_graph
from mmplan.scenario.scenario import Training


def names(plan: Plan) -> set[str]:
    return {need.name for need in plan_needs(plan, build_graph(plan.scenario))}


@pytest.mark.parametrize("seed", range(30))
def test_every_need_has_a_cell_of_every_framework(seed: int) -> None:
    for name in names(random_plan(seed)):
        for target in targets():
            found = cell(target.id, name)
            assert found.status in ("native", "plug-in", "impossible")
            assert found.why
            assert found.source


def test_no_row_of_the_table_is_without_a_framework() -> None:
    for name in need_names():
        assert all(cell(target.id, name).source for target in targets())


@pytest.mark.parametrize("seed", range(30))
def test_needs_follow_from_the_plan(seed: int) -> None:
    plan = random_plan(seed)
    found = names(plan)
    assert ("replicas" in found) == (plan.dp > 1)
    assert ("tensor parallelism" in found) == (plan.tp > 1)
    assert ("pipeline stages" in found) == (plan.pp > 1)
    assert ("expert parallelism" in found) == (plan.ep > 1)
    assert any(name.startswith("context parallelism") for name in found) == (plan.cp > 1)
    assert any(name.startswith("ZeRO-") for name in found) == (plan.sharding != "none")
    assert ("recomputation by stage" in found) == (len({stage.recompute for stage in plan.stages}) > 1)
    frozen = any(module.training.mode == "frozen" for module in plan.scenario.model.modules)
    assert ("frozen modules" in found) == frozen
    chain = not found & {"branches", "stages that feed several"}

    graph = build_stage_graph([stage.layers for stage in plan.stages], build_graph(plan.scenario))
    last = len(plan.stages) - 1
    follows = all(fed == ((s + 1,) if s < last else ()) for s, fed in enumerate(graph.successors))
    assert plan.pp == 1 or chain == follows


def with_technique(plan: Plan, **choices: object) -> Plan:
    scenario = plan.scenario
    return replace(plan, scenario=replace(scenario, technique=replace(scenario.technique, **choices)))  # type: ignore[arg-type]


def test_choices_of_the_scenario_are_needs_too() -> None:
    plan = next(plan for plan in map(random_plan, range(60)) if plan.cp > 1 and plan.tp > 1)
    assert "context parallelism by ring" in names(plan)
    assert "context parallelism by all-to-all" in names(with_technique(plan, context_parallel="all-to-all"))
    assert "sequence parallelism" in names(with_technique(plan, sequence_parallel=True))
    assert "FP8" in names(with_technique(plan, fp8="tensor"))
    assert "microbatches composed by size" in names(replace(plan, composition="balance"))


def test_adapters_and_pools_are_needs() -> None:
    plan = random_plan(1)
    model = plan.scenario.model
    adapted = replace(model.modules[-1], training=Training(mode="lora", rank=8, targets=("q",)))
    scenario = replace(plan.scenario, model=replace(model, modules=(*model.modules[:-1], adapted)))
    assert "adapters" in names(replace(plan, scenario=scenario))
    (pool,) = plan.scenario.cluster.pools
    other = replace(pool, nodes=1, device=replace(pool.device, name="other"))
    cluster = replace(plan.scenario.cluster, pools=(other, pool))
    assert "unlike pools" in names(replace(plan, scenario=replace(plan.scenario, cluster=cluster)))
