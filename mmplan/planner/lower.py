"""From a plan to the program that is simulated and executed: computes, sends and receives of every rank.

All rank lists are sub-sequences of one global order: computes sorted by their end in a dry run with the plan's own
stage times, every transfer directly behind the compute that produces its tensor. Hence no program can deadlock, even
when a send waits for its receive, and all transfers between two ranks stand in the same order on both. A receive comes
before the first compute that ends later than its producer, so that its buffer is posted before the tensor arrives.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mmplan.cost_models.compressed_bytes import FORMATS
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layout import Trained, trained_on_rank
from mmplan.cost_models.ties import trained_apart, trained_together
from mmplan.planner.columns import program_of
from mmplan.planner.dry_run import schedule_columns
from mmplan.planner.mesh import message_bytes
from mmplan.planner.place import Lowered, Pipeline, TiedSum, Transfer, place
from mmplan.planner.place_meshed import place_meshed
from mmplan.planner.plan import Plan, module_of
from mmplan.planner.plan_schedule import plan_schedule
from mmplan.planner.program import AHEAD, Program
from mmplan.planner.schedule import Schedule
from mmplan.planner.shared_bytes import SharedBytes, shared_bytes
from mmplan.planner.stage_graph import StageGraph, build_stage_graph
from mmplan.planner.step_loads import StageLoads, StepLoads
from mmplan.planner.ties import tie_bytes, tied_tables
from mmplan.scenario.scenario import DTYPE_BYTES


def lower(plan: Plan, graph: ComputationGraph, loads: StepLoads) -> Program:
    """The program of every rank with tp and cp index 0.

    Args:
        loads: [part][microbatch], see `step_loads.py`. Those of one unit (a replica) stand for all when they do the
            same; else all `plan.parts` are given.

    Raises:
        CheckError: the cut is not acyclic or leaves a layer out, or the schedule makes ranks wait for each other.
        ValueError: `loads` has another shape than the plan.
    """
    return program_of(lower_columns(plan, graph, loads).columns)


def lower_columns(plan: Plan, graph: ComputationGraph, loads: StepLoads) -> Lowered:
    """The same as columns, with the level of each action; see `lower`."""
    seen = StageLoads(plan, loads)
    stages = build_stage_graph([stage.layers for stage in plan.stages], graph)
    pipeline, sizes = plan_pipeline(plan, graph), _tensor_bytes(plan, graph, stages, seen)
    return place_meshed(pipeline, sizes, seen.units) if pipeline.meshes else place(pipeline, sizes)


def plan_pipeline(plan: Plan, graph: ComputationGraph) -> Pipeline:
    """The plan's schedule and what lowering has to know of its stages.

    Raises:
        CheckError: the cut is not acyclic or leaves a layer out.
    """
    stages = build_stage_graph([stage.layers for stage in plan.stages], graph)
    return pipeline_of(plan, graph, stages, plan_schedule(plan, stages))


def pipeline_of(plan: Plan, graph: ComputationGraph, stages: StageGraph, schedule: Schedule) -> Pipeline:
    """The same with any schedule of these stages."""
    leading = [plan.stages_of(row)[0] for row in range(len(schedule))]
    return Pipeline(
        schedule=schedule_columns(schedule, len(plan.stages), plan.microbatches),
        ranks=tuple(
            tuple(plan.rank(stage, replica) for stage in leading) for replica in range(1 if plan.meshes else plan.dp)
        ),
        meshes=tuple(map(plan.mesh, leading)) if plan.meshes else (),
        transfers=tuple(
            Transfer(
                source=cut.source,
                target=cut.target,
                activation=cut.activation + AHEAD * (plan.is_ahead(cut.source) and not plan.is_ahead(cut.target)),
                gradient=cut.gradient if cut.carries_grad else "",
                together=plan.layout(cut.source).sends_together(cut.edge),
                way=plan.border(cut.activation, cut.source, cut.target).way,
            )
            for cut in stages.cuts
        ),
        seconds=tuple(
            (stage.forward_s, stage.backward_s, stage.backward_s / 2, stage.backward_s / 2) for stage in plan.stages
        ),
        reduce_bytes=tuple(reduced_bytes(plan, graph, stage) for stage in range(len(plan.stages))),
        shared_bytes=_shared_bytes(plan, graph),
        ties=tuple(
            TiedSum(stages=tied.stages, bytes=tie_bytes(plan, graph, tied)) for tied in tied_tables(plan, graph)
        ),
        batch_factor=plan.batch_factor,
        alone_bytes=_shared_bytes(plan, graph, apart=plan.together) if plan.batch_factor > 1 else (),
    )


def stage_gradient_bytes(plan: Plan, graph: ComputationGraph, stage: int) -> int:
    """Gradient buffer of one rank of the stage."""
    trained = stage_trained(plan, graph, stage)
    return trained.total * DTYPE_BYTES[plan.scenario.optimizer.gradient_dtype]


def stage_trained(plan: Plan, graph: ComputationGraph, stage: int) -> Trained:
    """Trained parameters of one rank of the stage."""
    return trained_together([graph.layer(layer) for layer in plan.stages[stage].layers], plan.layout(stage))


def reduced_bytes(plan: Plan, graph: ComputationGraph, stage: int) -> int:
    """Of those gradients of a rank that another one has as well; of compressed ones the messages."""
    trained, layout = stage_trained(plan, graph, stage), plan.layout(stage)
    form, sent_bytes = FORMATS.get(plan.scenario.technique.compression), 0
    if form is not None and layout.replicas > 1 and plan.sharding == "none":
        layers = [graph.layer(layer) for layer in plan.stages[stage].layers]
        coded = (one.dense - one.kept for one in trained_apart(layers, layout))
        sent_bytes = sum(map(form.wire_bytes, coded))
        trained = replace(trained, dense=trained.kept)
    held = (
        (trained.dense, layout.replicas),
        (trained.spread, layout.replicas * layout.tp),
        (trained.experts, layout.expert_replicas),
    )
    shared = sum(count for count, ranks in held if ranks > 1)
    return shared * DTYPE_BYTES[plan.scenario.optimizer.gradient_dtype] + sent_bytes


def _shared_bytes(plan: Plan, graph: ComputationGraph, apart: Sequence[str] = ()) -> tuple[SharedBytes, ...]:
    """Of each stage; of layers of other modules than those `apart`."""
    if plan.sharding == "none":
        return ()
    counts = {
        layer: trained_on_rank(graph.layer(tied.head), plan.layout(tied.stages[1]), tied=True).dense
        for tied in tied_tables(plan, graph)
        for layer in (tied.table, tied.head)
    }
    layers = [[graph.layer(layer) for layer in stage.layers if module_of(layer) not in apart] for stage in plan.stages]
    return tuple(shared_bytes(held, plan.layout(index), plan.scenario, counts) for index, held in enumerate(layers))


def _tensor_bytes(plan: Plan, graph: ComputationGraph, stages: StageGraph, seen: StageLoads) -> NDArray[np.int64]:
    """`[overlap, microbatch, cut]`, of each cut by what replicas of its ends share; loads that are the same object are
    priced once."""
    dps = {mesh.dp for mesh in (plan.base, *plan.meshes)}
    most = max(len(seen.shared(own, other)) for own in dps for other in dps)
    sizes = np.zeros((most, plan.microbatches, len(stages.cuts)), dtype=np.int64)
    for index, cut in enumerate(stages.cuts):
        border, layout = plan.border(cut.activation, cut.source, cut.target), plan.layout(cut.source)
        source, target = border.source, border.target
        known: dict[int, int] = {}
        for overlap, row in enumerate(seen.shared(source.dp, target.dp)):
            for load in row:
                if id(load) not in known:
                    known[id(load)] = (
                        layout.sent_bytes(cut.edge, graph, load, plan.scenario)
                        if source == target
                        else message_bytes(cut.edge, load, plan.scenario.precision_of(cut.edge), *border.seen)
                    )
            sizes[overlap, :, index] = [known[id(load)] for load in row]
    return sizes
