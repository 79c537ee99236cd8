"""Plans made by hand for runtime tests: stages given as short layer ids, numbers from the cost model."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.loads import mean_loads
from mmplan.planner.plan import Certificate, Plan, StagePlan, scenario_hash
from mmplan.scenario.layer_ids import expand_ids
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.schedule_names import ScheduleName

SCENARIOS = Path(__file__).parents[2] / "scenarios"

VISION = ("vision.embed", "vision.0-3", "projector.0")
AUDIO = ("audio.embed", "audio.0-1", "audio_projector.0")
FOUR_STAGES = (VISION, AUDIO, ("llm.embed", "llm.0-2"), ("llm.3-5", "llm.head", "llm.loss"))
TWO_STAGES = ((*VISION, *AUDIO, "llm.embed"), ("llm.0-5", "llm.head", "llm.loss"))


def tiny_scenario() -> Scenario:
    return load_scenario(SCENARIOS / "tiny.yaml")


@cache
def _layer_seconds(scenario: Scenario, microbatch_size: int) -> dict[str, tuple[float, float]]:
    """Layer id -> its forward, and its backward."""
    graph, costs, loads = build_graph(scenario), AnalyticCostModel(scenario), mean_loads(scenario, microbatch_size)
    return {
        layer.id: (
            costs.forward_s(layer, loads[layer.module], 1),
            costs.dgrad_s(layer, loads[layer.module], 1) + costs.wgrad_s(layer, loads[layer.module], 1),
        )
        for layer in graph.layers()
    }


def hand_plan(
    scenario: Scenario,
    stages: Sequence[Sequence[str]],
    *,
    dp: int = 1,
    microbatch_size: int = 1,
    schedule: ScheduleName = "1f1b",
) -> Plan:
    layer_seconds = _layer_seconds(scenario, microbatch_size)
    parts = []
    for short in stages:
        layers = expand_ids(short)
        parts.append(
            StagePlan(
                layers=tuple(layers),
                forward_s=sum(layer_seconds[layer][0] for layer in layers),
                backward_s=sum(layer_seconds[layer][1] for layer in layers),
                finish_s=0.0,
                in_flight=1,
                memory_bytes=1,
                capacity_bytes=2**34,
            )
        )
    return Plan(
        scenario=scenario,
        scenario_hash=scenario_hash(scenario),
        dp=dp,
        tp=1,
        microbatch_size=microbatch_size,
        microbatches=scenario.global_batch // (dp * microbatch_size),
        schedule=schedule,
        stages=tuple(parts),
        certificate=Certificate(objective_s=1.0, bound_s=0.0, gap=1.0, status="given", wall_s=0.0),
    )


def changed_module(plan: Plan, name: str, **changes: object) -> Plan:
    """The plan with other numbers in a module's transformer."""
    modules = tuple(
        replace(m, transformer=replace(m.transformer, **changes)) if m.name == name and m.transformer else m
        for m in plan.scenario.model.modules
    )
    return replace(plan, scenario=replace(plan.scenario, model=replace(plan.scenario.model, modules=modules)))


def changed_projector(plan: Plan, name: str, *, pool: int) -> Plan:
    """The plan with a projector that averages every `pool` rows and joins none."""
    modules = tuple(
        replace(m, projector=replace(m.projector, pool=pool, merge=1, dims=(64, *m.projector.dims[1:])))
        if m.name == name and m.projector
        else m
        for m in plan.scenario.model.modules
    )
    return replace(plan, scenario=replace(plan.scenario, model=replace(plan.scenario.model, modules=modules)))


def pooled_sound(plan: Plan, pool: int) -> Plan:
    """The plan with an audio encoder that averages every `pool` tokens behind its last block."""
    modules = tuple(
        replace(m, audio=replace(m.audio, pool=pool)) if m.audio is not None else m for m in plan.scenario.model.modules
    )
    return replace(plan, scenario=replace(plan.scenario, model=replace(plan.scenario.model, modules=modules)))
