"""Memory of a rank over time: what is always there, and what is alive between two actions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.load import Loads
from mmplan.cost_models.planned_memory import handed_out_bytes, planned_kept_bytes, planned_state_bytes
from mmplan.planner.batch_factors import runs_with
from mmplan.planner.features import plan_features_bytes
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import TimedAction
from mmplan.planner.program import Program, is_ahead
from mmplan.planner.step_loads import StageLoads, StepLoads
from mmplan.planner.working import working_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Memory of each listed rank: always there, and kept from the forward to the last compute of each microbatch.

    `kept_bytes[rank][stage, microbatch]`: what comes with its forward; `freed_bytes`: what goes with its last compute,
    which is the same unless layers run several microbatches at once: these keep from the first to the last of them.
    """

    static_bytes: tuple[int, ...]
    kept_bytes: tuple[Mapping[tuple[int, int], int], ...]
    freed_bytes: tuple[Mapping[tuple[int, int], int], ...]


def footprint(plan: Plan, graph: ComputationGraph, program: Program, loads: StepLoads) -> Footprint:
    """Memory of each listed rank; kept bytes follow the load of each microbatch."""
    scenario, seen = plan.scenario, StageLoads(plan, loads)
    layouts, at_work = [plan.layout(stage) for stage in range(len(plan.stages))], working_bytes(plan, graph)
    static: list[int] = []
    kept: list[dict[tuple[int, int], int]] = []
    freed: list[dict[tuple[int, int], int]] = []
    for rank in program.ranks:
        static.append(scenario.cluster.pool_of(rank.rank).device.reserved_bytes)
        kept.append({})
        freed.append({})
        static[-1] += at_work[plan.row(rank.stage)]
        for stage in plan.stages_of(plan.row(rank.stage)):
            layers, layout = [graph.layer(layer) for layer in plan.stages[stage].layers], layouts[stage]
            static[-1] += sum(planned_state_bytes(layer, scenario, layout) for layer in layers)
            static[-1] += plan_features_bytes(plan, graph, seen.of_stage(stage)[rank.replica])[stage]
            handed = _handed_out(plan, graph, layers, layout, seen.of_stage(stage)[rank.replica])
            known: dict[int, int] = {}
            for microbatch in range(plan.microbatches):
                for kind, sizes in (("F", kept[-1]), ("B", freed[-1])):
                    load = seen.of_compute(stage, rank.replica, kind, microbatch)
                    if id(load) not in known:
                        known[id(load)] = sum(
                            planned_kept_bytes(layer, load[layer.module], scenario, layout)
                            for layer in layers
                            if layer.module in load
                        )
                    sizes[stage, microbatch] = known[id(load)] + handed[microbatch] * runs_with(
                        kind, microbatch, layout.batch_factor
                    )
    return Footprint(static_bytes=tuple(static), kept_bytes=tuple(kept), freed_bytes=tuple(freed))


def _handed_out(
    plan: Plan, graph: ComputationGraph, layers: Sequence[Layer], layout: Layout, row: Sequence[Loads]
) -> list[int]:
    """[microbatch] bytes of outputs that are handed out of those that run with it."""
    factor, of = layout.batch_factor, plan.scenario.precision_of
    if factor == 1:
        return [0] * len(row)
    known: dict[int, int] = {}
    for load in row:
        if id(load) not in known:
            known[id(load)] = sum(handed_out_bytes(layer, load, graph, layout, of(layer)) for layer in layers)
    sizes = [known[id(load)] for load in row]
    return [sum(sizes[m // factor * factor : m // factor * factor + factor]) for m in range(len(row))]


def memory_steps(
    timed: Sequence[TimedAction],
    static_bytes: int,
    kept_bytes: Mapping[tuple[int, int], int],
    freed_bytes: Mapping[tuple[int, int], int],
) -> tuple[tuple[float, int], ...]:
    """(time, bytes from then on) of one rank: a stage's activations of a microbatch live from its forward's start to
    the end of its last compute."""
    alive: dict[tuple[int, int], tuple[float, float]] = {}
    for item in timed:
        if item.action.kind in "FBIW":
            key = (item.action.stage, item.action.microbatch)
            start_s, _ = alive.get(key, (item.start_s, 0.0))
            alive[key] = (start_s, item.end_s)
    changes = [(start_s, kept_bytes[key]) for key, (start_s, _) in alive.items()]
    changes += [(end_s, -freed_bytes[key]) for key, (_, end_s) in alive.items()]
    return _accumulate(changes, static_bytes)


def peak_buffer_bytes(timed: Sequence[TimedAction]) -> int:
    """Received tensors wait from their arrival to the start of the compute that reads them."""
    used_s = {
        (t.action.stage, "F" if t.action.kind == "F" else "B", t.action.microbatch): t.start_s
        for t in timed
        if t.action.kind in "FBI"
    }
    changes: list[tuple[float, int]] = []
    for item in timed:
        if item.action.kind == "RECV":
            user = (item.action.stage, "B" if "<" in item.action.tensor else "F", item.action.microbatch)
            size = item.action.bytes * item.action.copies
            if is_ahead(item.action.tensor):  # that of the last step until it is read, then this one
                changes += [(0.0, size), (used_s[user], -size), (item.end_s, size)]
            elif user in used_s:
                changes += [(item.end_s, size), (used_s[user], -size)]
    return max(held for _, held in _accumulate(changes, 0))


def _accumulate(changes: Sequence[tuple[float, int]], first: int) -> tuple[tuple[float, int], ...]:
    """Running sum over time; changes at one instant count together."""
    held = first
    steps = [(0.0, first)]
    for time_s, change in sorted(changes):
        held += change
        if steps[-1][0] == time_s:
            steps.pop()
        steps.append((time_s, held))
    return tuple(steps)
