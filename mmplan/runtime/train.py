"""The loop of one rank: for each step lower the plan for that step's data, run the program, keep what was measured."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.load import Loads
from mmplan.cost_models.loads import sample_loads
from mmplan.planner.columns import rank_program
from mmplan.planner.composition import plan_step
from mmplan.planner.durations import predicted_durations
from mmplan.planner.lower import lower, lower_columns
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import TimedAction
from mmplan.planner.program import RankProgram
from mmplan.planner.stage_graph import CutTensor, build_stage_graph
from mmplan.planner.step_loads import StageLoads, StepLoads, drawn_step_loads, split_samples
from mmplan.runtime.ahead import Features, ahead_part
from mmplan.runtime.batch import Microbatch, make_microbatch
from mmplan.runtime.batched_stage import BatchedStage
from mmplan.runtime.clock import Clock
from mmplan.runtime.crossing import Crossing, crossing
from mmplan.runtime.dtypes import TORCH_DTYPES
from mmplan.runtime.executor import StepRecord, run_step
from mmplan.runtime.finite import Unsound
from mmplan.runtime.groups import GroupOf
from mmplan.runtime.loss_scaling import run_scales
from mmplan.runtime.measurement import Moved
from mmplan.runtime.model import MultimodalModel
from mmplan.runtime.numerics.part_scales import PartScales
from mmplan.runtime.places import (
    Place,
    idle_program,
    idle_ranks,
    listed_places,
    mesh_of_row,
    one_process_each,
    place_of,
    program_of_shard,
)
from mmplan.runtime.position import Position
from mmplan.runtime.rehearse import SleepStage, collapse_shards
from mmplan.runtime.stage import LayerStage, Stage
from mmplan.runtime.tensor_sums import TensorRanks
from mmplan.runtime.ties import join, plan_ties
from mmplan.runtime.timeline import bare
from mmplan.runtime.update_check import UpdateCheck
from mmplan.runtime.wait_chain import EVERYBODY
from mmplan.runtime.weighted_stage import WeightedStage
from mmplan.scenario.scenario import Sample

_DIGITS = 7  # of seconds: CUDA's events tell half a microsecond


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """One step of one rank; times from the common start of the step. Of ranks that share layers the first has the
    losses; `unsound`: what was no number here; `skipped`: the ranks left the update out; `tensor_bytes` are what it
    gave to their sums; `foreseen`: see `StepMeasurement`. `asked_s`: of each action of the timeline, when the rank was
    ready for it; `started_s`: the common start, in seconds since 1970 by this host."""

    program: RankProgram
    started_s: float
    timeline: tuple[TimedAction, ...]
    asked_s: tuple[float, ...]
    losses: dict[str, float]
    wait_s: float
    activation_bytes: int
    gradient_bytes: int
    reduce_bytes: int
    tensor_bytes: int
    peak_memory_bytes: int
    unsound: Unsound | None = None
    skipped: bool = False
    foreseen: Moved | None = None

    @property
    def moved(self) -> Moved:
        """What it sent and gave."""
        sent_bytes = self.activation_bytes + self.gradient_bytes
        return Moved(sent_bytes=sent_bytes, reduce_bytes=self.reduce_bytes, tensor_bytes=self.tensor_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepData:
    """Samples, their global indices and loads of one step, [part][microbatch] (see `Plan.parts`)."""

    samples: tuple[tuple[tuple[Sample, ...], ...], ...]
    indices: tuple[tuple[tuple[int, ...], ...], ...]
    loads: tuple[tuple[Loads, ...], ...]


def step_data(plan: Plan, step: int) -> StepData:
    """The data of one optimizer step, the same on every rank."""
    drawn = plan_step(plan, step)
    samples, indices = split_samples(plan, drawn.samples), split_samples(plan, drawn.indices)
    loads = tuple(tuple(sample_loads(plan.scenario, microbatch) for microbatch in row) for row in samples)
    return StepData(samples=tuple(map(tuple, samples)), indices=tuple(map(tuple, indices)), loads=loads)


def step_microbatches(
    plan: Plan, data: StepData, place: Place, raw_modules: Collection[str], device: torch.device
) -> list[Microbatch]:
    """The microbatches of a step in the replica of a place.

    Args:
        raw_modules: modules whose raw inputs (pixels, frames, token ids) are made; others stay empty.
    """
    scenario, mesh, seen = plan.scenario, mesh_of_row(plan, place.row), StageLoads(plan, data.loads)
    each = plan.parts // mesh.dp
    parts = {other.dp: seen.of_overlaps(mesh, place.replica, other) for other in (plan.base, *plan.meshes)}
    own = slice(place.replica * each, (place.replica + 1) * each)
    targets: dict[str, int] = {}
    for row in data.loads:
        for loads in row:
            for module, load in loads.items():
                targets[module] = targets.get(module, 0) + round(load.targets)
    return [
        make_microbatch(
            scenario,
            [sample for part in samples for sample in part],
            indices=[index for part in indices for index in part],
            targets_in_batch=targets,
            raw_modules=raw_modules,
            dtype=TORCH_DTYPES[scenario.precision],
            device=device,
            parts={dp: tuple(part[number] for part in loads) for dp, loads in parts.items()},
        )
        for number, (samples, indices) in enumerate(
            zip(zip(*data.samples[own], strict=True), zip(*data.indices[own], strict=True), strict=True)
        )
    ]


def build_stages(
    plan: Plan,
    graph: ComputationGraph,
    row: int,
    device: torch.device,
    ranks: TensorRanks | None = None,
    replicas: dist.ProcessGroup | None = None,
    scales: PartScales | None = None,
) -> dict[int, LayerStage]:
    """The stages of a pipeline rank with their weights, on `device`; `ranks`: who shares their layers; `replicas`: who
    holds the same weights; `scales`: of losses."""
    return {stage: _build_stage(plan, graph, stage, device, ranks, replicas, scales) for stage in plan.stages_of(row)}


def _build_stage(
    plan: Plan,
    graph: ComputationGraph,
    stage: int,
    device: torch.device,
    ranks: TensorRanks | None,
    replicas: dist.ProcessGroup | None,
    scales: PartScales | None,
) -> LayerStage:
    stages = build_stage_graph([part.layers for part in plan.stages], graph)
    layers = [graph.layer(layer) for layer in plan.stages[stage].layers]
    scenario = plan.scenario
    model = MultimodalModel(layers, graph, precision=scenario.precision, seed=scenario.seed, device=device, ranks=ranks)
    at_once = any(layer.module in plan.layout(stage).together for layer in layers)
    return (BatchedStage if at_once else LayerStage)(
        stage=stage,
        layers=layers,
        cuts=stages.cuts,
        graph=graph,
        model=model,
        scenario=scenario,
        layout=plan.layout(stage),
        replicas=replicas,
        count_kept=device.type == "cpu",
        split_backward=any("I" in order for order in plan.orders),
        ranks=ranks,
        scales=scales,
        crossings=_crossings(plan, stage, stages.cuts, ranks),
        ties=plan_ties(plan, graph),
    )


def _crossings(plan: Plan, stage: int, cuts: Sequence[CutTensor], ranks: TensorRanks | None) -> dict[str, Crossing]:
    """What happens to tensors from or to stages of other meshes, by the activation's name."""
    shard, made = 0 if ranks is None or ranks.width is None else ranks.width.index, dict[str, Crossing]()
    for cut in cuts:
        border = plan.border(cut.activation, cut.source, cut.target)
        if stage in (cut.source, cut.target) and (one := crossing(border, shard, is_source=stage == cut.source)):
            made[cut.activation] = one
    return made


def tie_stages(plan: Plan, graph: ComputationGraph, stages: Mapping[int, LayerStage], more: GroupOf) -> None:
    """Let the stages of this rank sum what others hold too. Collective over all ranks."""
    join(plan, plan_ties(plan, graph), stages, lambda stage, tie: stages[stage].copies_of(tie), more)


# step -> this rank's program of that step and its stages by index, loaded
Prepare = Callable[[int], tuple[RankProgram, Mapping[int, Stage]]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """A rank's training: each step, and the stages that hold its state; a rehearsal has none.

    `fill`: where modules run a step ahead, what makes the features of the first step. `model`: the user's
    own, where that is trained. `scales`: of losses, where these are scaled.
    """

    step: Prepare
    fill: Prepare | None = None
    stages: tuple[WeightedStage, ...] = ()
    model: nn.Module | None = None
    scales: PartScales | None = None


def prepare_training(
    plan: Plan,
    rank: int,
    device: torch.device,
    ranks: TensorRanks | None,
    replicas: dist.ProcessGroup | None,
    more: GroupOf,
) -> Prepared:
    """Real computes on synthetic data. Collective over all ranks."""
    graph, scales = build_graph(plan.scenario), run_scales(plan)
    if rank in idle_ranks(plan):
        tie_stages(plan, graph, {}, more)
        return Prepared(step=lambda step: (idle_program(rank), {}), scales=scales)
    place = place_of(plan, rank)
    stages = build_stages(plan, graph, place.row, device, ranks, replicas, scales)
    tie_stages(plan, graph, stages, more)

    def lowered(loads: StepLoads) -> RankProgram:
        listed = rank_program(lower_columns(plan, graph, loads).columns, listed_places(plan)[rank])
        return program_of_shard(plan, listed, place.shard)

    def prepare(step: int) -> tuple[RankProgram, Mapping[int, Stage]]:
        load_stages(plan, stages, place, step, device)
        return lowered(drawn_step_loads(plan, step)), stages

    def fill(step: int) -> tuple[RankProgram, Mapping[int, Stage]]:
        load_stages(plan, stages, place, step, device, ahead=0)
        return ahead_part(plan, lowered(step_data(plan, step).loads)), stages

    first = fill if plan.prefetch else None
    return Prepared(step=prepare, fill=first, stages=tuple(stages.values()), scales=scales)


def load_stages(
    plan: Plan, stages: Mapping[int, LayerStage], place: Place, step: int, device: torch.device, *, ahead: int = 1
) -> None:
    """Hand each stage the microbatches that it runs in a step; `ahead`: by how many steps some are."""
    for index, stage in stages.items():
        data = step_data(plan, step + ahead if plan.is_ahead(index) else step)
        stage.load(step_microbatches(plan, data, place, stage.raw_modules, device))


def prepare_rehearsal(
    plan: Plan, rank: int, scale: float, replicas: dist.ProcessGroup | None, more: GroupOf
) -> Prepared:
    """Sleeps of the predicted durations times `scale`; one process stands for each tensor-parallel group. Collective
    over all of them."""
    graph = build_graph(plan.scenario)
    costs = AnalyticCostModel(plan.scenario)
    started = one_process_each(plan)
    row = place_of(started, rank).row
    trained = [tie for tie in plan_ties(plan, graph) if tie.trained]
    ties = {number: more(tie.ranks(started)) for number, tie in enumerate(trained)}
    stages = {stage: SleepStage(stage, plan.sharding, replicas, ties) for stage in plan.stages_of(row)}

    def played(loads: StepLoads) -> tuple[RankProgram, Mapping[int, Stage]]:
        program = lower(plan, graph, loads)
        durations_s = predicted_durations(plan, graph, costs, program, loads)[rank]
        own = program_of_shard(started, collapse_shards(program).ranks[rank], 0)
        for stage in stages.values():
            stage.load(own, [seconds * scale for seconds in durations_s])
        return own, stages

    def fill(step: int) -> tuple[RankProgram, Mapping[int, Stage]]:
        program, filled = played(step_data(plan, step).loads)
        return ahead_part(plan, program), filled

    return Prepared(step=lambda step: played(drawn_step_loads(plan, step)), fill=fill if plan.prefetch else None)


def run_steps(
    prepare: Prepare,
    *,
    fill: Prepare | None = None,
    steps: range,
    network: dist.ProcessGroup,
    device: torch.device,
    ranks: TensorRanks | None,
    clock: Clock,
    modalities: Mapping[int, str],
    position: Position,
    check: UpdateCheck,
    on_step: Callable[[int, RankStep], None],
) -> None:
    """Run these optimizer steps of this rank; collective. `fill`: what to run before the first. `on_step` takes each;
    `position` is kept up to date."""
    features = Features()
    if fill is not None and steps:
        position.begin(steps.start)
        position.enter("features of the first step")
        program, stages = fill(steps.start)
        clock.start()
        run_step(program, stages, network=network, device=device, clock=clock, position=position, features=features)
        clock.stop()
    for step in steps:
        position.begin(step)
        position.enter("data")
        program, stages = prepare(step)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        before, foreseen = 0 if ranks is None else ranks.total_bytes, _foreseen(stages)
        position.enter("meet", EVERYBODY)
        clock.start()
        started_s = time.time()
        record = run_step(
            program,
            stages,
            network=network,
            device=device,
            clock=clock,
            modalities=modalities,
            position=position,
            check=check,
            features=features,
        )
        check.settle()
        position.enter("tell", EVERYBODY)
        clock.stop()
        losses: dict[str, float] = {}
        for stage in stages.values() if ranks is None or ranks.index == 0 else ():
            losses |= stage.losses()
        tensor_bytes = 0 if ranks is None else ranks.total_bytes - before
        done = _rank_step(program, started_s, record, clock, losses, tensor_bytes, device)
        if foreseen is not None:
            done = replace(done, foreseen=_planned(program, (_foreseen(stages) or 0) - foreseen))
        on_step(step, replace(done, unsound=check.found, skipped=check.skipped))


def _foreseen(stages: Mapping[int, Stage]) -> int | None:
    """By all stages that know it."""
    told = [told for stage in stages.values() if (told := stage.foreseen_bytes()) is not None]
    return sum(told) if told else None


def _planned(program: RankProgram, tensor_bytes: int) -> Moved:
    """By a rank's program."""
    sizes = {"SEND": 0, "RECV": 0, "": 0}
    for action in program.actions:
        sizes[action.kind if action.kind in sizes else ""] += action.bytes
    return Moved(sent_bytes=sizes["SEND"], reduce_bytes=sizes[""], tensor_bytes=tensor_bytes)


def _rank_step(
    program: RankProgram,
    started_s: float,
    record: StepRecord,
    clock: Clock,
    losses: dict[str, float],
    tensor_bytes: int,
    device: torch.device,
) -> RankStep:
    on_cuda = device.type == "cuda"
    times_s = [tuple(round(clock.seconds(mark), _DIGITS) for mark in marks) for _, *marks in record.marks]
    return RankStep(
        program=program,
        started_s=started_s,
        timeline=tuple(
            TimedAction(program.rank, bare(action), start_s, end_s)
            for (action, *_), (_, start_s, end_s) in zip(record.marks, times_s, strict=True)
        ),
        asked_s=tuple(asked_s for asked_s, _, _ in times_s),
        losses=losses,
        wait_s=record.wait_s,
        activation_bytes=record.activation_bytes,
        gradient_bytes=record.gradient_bytes,
        reduce_bytes=record.reduce_bytes,
        tensor_bytes=tensor_bytes,
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if on_cuda else record.peak_memory_bytes,
    )
