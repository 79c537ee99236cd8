"""A plan with its numbers from a cut: closed-form step time in real seconds, memory of every stage."""

from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.cost_models.counts import edge_bytes
from mmplan.planner.configuration import Configuration
from mmplan.planner.plan import Certificate, Plan, StagePlan, Status, scenario_hash
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import finish_s, lag_s, machine_of
from mmplan.planner.schedules.in_flight import in_flight


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The three terms of the closed form: (m - 1) * busiest stage, the critical path, the longest finish."""

    repeat_s: float
    critical_path_s: float
    finish_s: float

    @property
    def objective_s(self) -> float:
        return self.repeat_s + self.critical_path_s + self.finish_s


def cut_stages(
    prices: Prices, configuration: Configuration, stages: Sequence[Sequence[str]]
) -> tuple[tuple[StagePlan, ...], StepTime]:
    """Numbers of every stage and of the step.

    Args:
        stages: layer ids of each stage; stages numbered along the edges.
    """
    layers = prices.layers(configuration.tp, configuration.microbatch_size)
    machine = machine_of(prices.scenario)
    work_s = [sum(layers[x].forward_s + layers[x].backward_s for x in ids) for ids in stages]
    tails_s, depths = _tails_and_depths(prices, configuration, stages, work_s)
    built: list[StagePlan] = []
    for ids, depth in zip(stages, depths, strict=True):
        alive = in_flight(configuration.schedule, configuration.microbatches, depth)
        memory_bytes = machine.reserved_bytes + sum(layers[x].state_bytes + alive * layers[x].kept_bytes for x in ids)
        built.append(
            StagePlan(
                layers=tuple(ids),
                forward_s=sum(layers[x].forward_s for x in ids),
                backward_s=sum(layers[x].backward_s for x in ids),
                finish_s=finish_s(prices, configuration, sum(prices.trainable[x] for x in ids)),
                in_flight=alive,
                memory_bytes=memory_bytes,
                capacity_bytes=machine.capacity_bytes,
            )
        )
    time = StepTime(
        repeat_s=(configuration.microbatches - 1) * max(work_s),
        critical_path_s=max(tails_s),
        finish_s=max(stage.finish_s for stage in built),
    )
    return tuple(built), time


def _tails_and_depths(
    prices: Prices, configuration: Configuration, stages: Sequence[Sequence[str]], work_s: Sequence[float]
) -> tuple[list[float], list[int]]:
    """Per stage: seconds from its start to the end of the last stage for one microbatch, and stages on that way."""
    stage_of = {layer: index for index, ids in enumerate(stages) for layer in ids}
    loads, precision = prices.loads(configuration.microbatch_size), prices.scenario.precision
    tails_s, depths = list(work_s), [1] * len(stages)
    cut = [edge for edge in prices.graph.edges() if stage_of[edge.producer] != stage_of[edge.consumer]]
    for edge in sorted(cut, key=lambda edge: -stage_of[edge.producer]):
        source, target = stage_of[edge.producer], stage_of[edge.consumer]
        if source > target:
            raise ValueError(f"edge {edge.name} leads from stage {source} back to stage {target}")
        way_s = lag_s(prices, configuration, edge_bytes(edge, loads, precision), edge.carries_grad)
        tails_s[source] = max(tails_s[source], work_s[source] + way_s + tails_s[target])
        depths[source] = max(depths[source], 1 + depths[target])
    return tails_s, depths


def plan_from_cut(
    prices: Prices,
    configuration: Configuration,
    stages: Sequence[Sequence[str]],
    *,
    bound_s: float,
    status: Status,
    wall_s: float,
) -> Plan:
    """The plan of a cut, certified with what the caller has proved. `bound_s` above the objective counts as equal."""
    built, time = cut_stages(prices, configuration, stages)
    bound_s = min(bound_s, time.objective_s)
    return Plan(
        scenario=prices.scenario,
        scenario_hash=scenario_hash(prices.scenario),
        dp=configuration.dp,
        tp=configuration.tp,
        microbatch_size=configuration.microbatch_size,
        microbatches=configuration.microbatches,
        schedule=configuration.schedule,
        stages=built,
        certificate=Certificate(
            objective_s=time.objective_s,
            bound_s=bound_s,
            gap=(time.objective_s - bound_s) / time.objective_s if time.objective_s > 0 else 0.0,
            status=status,
            wall_s=wall_s,
        ),
    )
