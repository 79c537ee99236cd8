"""From a plan to the program that is simulated and executed: computes, sends and receives of every rank.

All rank lists are sub-sequences of one global order: computes sorted by their end in a dry run with the plan's own
stage times, every transfer directly behind the compute that produces its tensor. Hence no program can deadlock, even
when a send waits for its receive, and all transfers between two ranks stand in the same order on both. A receive comes
before the first compute that ends later than its producer, so that its buffer is posted before the tensor arrives.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.cost_models.counts import edge_bytes, trainable_parameters
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.load import Loads
from mmplan.errors import CheckError
from mmplan.planner.families import build_schedule
from mmplan.planner.plan import Plan
from mmplan.planner.program import Action, Program, RankProgram
from mmplan.planner.schedule import Compute, Schedule
from mmplan.planner.stage_graph import StageGraph, build_stage_graph
from mmplan.scenario.scenario import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Cut tensor `cut` of the stage graph, forward or as gradient, from `source` to `target` stage."""

    source: int
    target: int
    tensor: str
    cut: int


def lower(plan: Plan, graph: ComputationGraph, loads: Sequence[Sequence[Loads]]) -> Program:
    """The program of every rank with tp index 0.

    Args:
        loads: [replica][microbatch]. One replica stands for all when they do the same; else all `plan.dp` are given.

    Raises:
        CheckError: the cut is not acyclic or leaves a layer out.
        ValueError: `loads` has another shape than the plan.
    """
    if len(loads) not in (1, plan.dp) or any(len(row) != plan.microbatches for row in loads):
        shape = f"{len(loads)} x {sorted({len(row) for row in loads})}"
        raise ValueError(f"loads are {shape}, the plan has {plan.dp} replicas x {plan.microbatches} microbatches")
    stages = build_stage_graph([stage.layers for stage in plan.stages], graph)
    schedule = build_schedule(plan.schedule, plan.pp, plan.microbatches, stages.depths, stages.has_backward)
    order = dry_run(plan, schedule, stages)
    gradient_bytes = [stage_gradient_bytes(plan, graph, stage) for stage in range(plan.pp)]
    ranks = []
    for replica, row in enumerate(loads):
        tensor_bytes = [[edge_bytes(cut.edge, load, plan.scenario.precision) for cut in stages.cuts] for load in row]
        actions = _place(plan, replica, order, stages, tensor_bytes)
        for stage in range(plan.pp):
            if plan.dp > 1 and gradient_bytes[stage] > 0:
                actions[stage].append(Action("REDUCE", stage, bytes=gradient_bytes[stage]))
            actions[stage].append(Action("STEP", stage))
            rank = plan.rank(stage, replica)
            ranks.append(RankProgram(rank=rank, stage=stage, replica=replica, actions=tuple(actions[stage])))
    by_rank = tuple(sorted(ranks, key=lambda program: program.rank))
    return Program(ranks=by_rank, microbatches=plan.microbatches, replicas=len(loads))


def stage_gradient_bytes(plan: Plan, graph: ComputationGraph, stage: int) -> int:
    """Gradient buffer of one rank of the stage."""
    parameters = sum(trainable_parameters(graph.layer(layer)) for layer in plan.stages[stage].layers)
    return parameters * DTYPE_BYTES[plan.scenario.optimizer.gradient_dtype] // plan.tp


def dry_run(plan: Plan, schedule: Schedule, stages: StageGraph) -> tuple[Compute, ...]:
    """All computes of one replica by their end when transfers take no time, in an order that respects every need.

    Raises:
        CheckError: the schedule makes stages wait for each other.
    """
    needs_activation: list[list[int]] = [[] for _ in schedule]
    needs_gradient: list[list[int]] = [[] for _ in schedule]
    for cut in stages.cuts:
        needs_activation[cut.target].append(cut.source)
        if cut.carries_grad:
            needs_gradient[cut.source].append(cut.target)
    seconds = {"F": [stage.forward_s for stage in plan.stages], "B": [stage.backward_s for stage in plan.stages]}
    needs = {"F": needs_activation, "B": needs_gradient}
    end_s: dict[Compute, float] = {}
    clock_s, position = [0.0] * len(schedule), [0] * len(schedule)
    done: list[Compute] = []
    moved = True
    while moved:
        moved = False
        for stage in range(len(schedule)):
            while position[stage] < len(schedule[stage]):
                compute = schedule[stage][position[stage]]
                inputs = [Compute(other, compute.kind, compute.microbatch) for other in needs[compute.kind][stage]]
                if any(item not in end_s for item in inputs):
                    break
                start_s = max([clock_s[stage], *(end_s[item] for item in inputs)])
                clock_s[stage] = end_s[compute] = start_s + seconds[compute.kind][stage]
                done.append(compute)
                position[stage] += 1
                moved = True
    if any(position[stage] < len(order) for stage, order in enumerate(schedule)):
        blocked = [str(order[position[stage]]) for stage, order in enumerate(schedule) if position[stage] < len(order)]
        raise CheckError(f"the schedule never reaches {', '.join(blocked)}")
    # A stable sort keeps needs before their users where durations are zero and ends tie.
    return tuple(sorted(done, key=lambda compute: end_s[compute]))


def _place(
    plan: Plan,
    replica: int,
    order: Sequence[Compute],
    stages: StageGraph,
    tensor_bytes: Sequence[Sequence[int]],
) -> list[list[Action]]:
    """The action list of every stage of one replica; tensors without bytes are left out at both ends."""
    sends: dict[tuple[str, int], list[_Transfer]] = {}
    for index, cut in enumerate(stages.cuts):
        sends.setdefault(("F", cut.source), []).append(_Transfer(cut.source, cut.target, cut.activation, index))
        if cut.carries_grad:
            sends.setdefault(("B", cut.target), []).append(_Transfer(cut.target, cut.source, cut.gradient, index))
    ranks = [plan.rank(stage, replica) for stage in range(plan.pp)]
    actions: list[list[Action]] = [[] for _ in ranks]
    for compute in order:
        actions[compute.stage].append(Action(compute.kind, compute.stage, compute.microbatch))
        for transfer in sends.get((compute.kind, compute.stage), ()):
            size = tensor_bytes[compute.microbatch][transfer.cut]
            if size == 0:
                continue
            source, target, microbatch = transfer.source, transfer.target, compute.microbatch
            actions[source].append(Action("SEND", source, microbatch, ranks[target], transfer.tensor, size))
            actions[target].append(Action("RECV", target, microbatch, ranks[source], transfer.tensor, size))
    return actions
