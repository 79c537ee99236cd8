"""Training a user's own model under a plan: pieces to stages, each step's program from its own recordings."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.graph import ComputationGraph
from mmplan.errors import InputError
from mmplan.planner.columns import rank_program
from mmplan.planner.lower import plan_pipeline
from mmplan.planner.place import place
from mmplan.planner.place_meshed import place_meshed
from mmplan.planner.plan import Plan
from mmplan.planner.program import RankProgram
from mmplan.planner.stage_graph import build_stage_graph
from mmplan.planner.step_loads import part_size
from mmplan.runtime.ghost.attention_again import recompute_attention
from mmplan.runtime.ghost.expert_trials import require_equal_calls
from mmplan.runtime.ghost.handovers import Handover, Parts, handover
from mmplan.runtime.ghost.holdings import copies_of, held_bytes, places_of, state_of, tie_sums
from mmplan.runtime.ghost.job import Job, taken
from mmplan.runtime.ghost.job_memory import require_memory
from mmplan.runtime.ghost.laying import Laid, cast_batch, lay, own_calls, share
from mmplan.runtime.ghost.model import Crossing, GhostModel, saved_buffers
from mmplan.runtime.ghost.pretrained import Pretrained
from mmplan.runtime.ghost.recording import Batch, Recording
from mmplan.runtime.ghost.run_notes import own_buffers, told_parts
from mmplan.runtime.ghost.scaled import UnitParts, crossing, parts_of
from mmplan.runtime.ghost.split_experts import set_up_experts
from mmplan.runtime.ghost.split_linears import set_up
from mmplan.runtime.ghost.stage import Example, GhostStage
from mmplan.runtime.ghost.sums import sums_of
from mmplan.runtime.ghost.traffic import recorded_graph
from mmplan.runtime.ghost.turns import Turns
from mmplan.runtime.ghost.units import find_units
from mmplan.runtime.ghost.vocabulary import require_columns
from mmplan.runtime.ghost.weightless import initial_value, lost_values
from mmplan.runtime.groups import GroupOf
from mmplan.runtime.held import Buffer
from mmplan.runtime.loss_scaling import run_scales
from mmplan.runtime.numerics.modality_parts import SHARED
from mmplan.runtime.numerics.part_scales import PartScales
from mmplan.runtime.places import (
    Place,
    idle_program,
    idle_ranks,
    listed_places,
    mesh_of_row,
    place_of,
    program_of_shard,
)
from mmplan.runtime.stage import Stage
from mmplan.runtime.tensor_sums import TensorRanks
from mmplan.runtime.ties import join
from mmplan.runtime.train import Prepared
from mmplan.runtime.weight_store import WeightStore, postpone_linears
from mmplan.scenario.document import counted

# Looked at before a run: every module of the model has to be used in some of them.
FIRST_BATCHES = 32
LOST_SHOWN = 5  # names


@dataclass(frozen=True, kw_only=True, slots=True)
class JobGroups:
    """replicas: the ranks that hold the same weights; tensor: those that share layers; None where there is one. more:
    makes others."""

    replicas: dist.ProcessGroup | None
    tensor: TensorRanks | None
    more: GroupOf


def prepare_job(
    plan: Plan,
    job: Job,
    rank: int,
    device: torch.device,
    groups: JobGroups,
    note: Callable[[str], None],
    weights: Path | None = None,
    samples: int = 0,
) -> Prepared:
    """The steps of one rank.

    Args:
        note: is told what stays whole on tensor-parallel ranks.
        weights: a folder of safetensors files; None: weights are drawn (`weightless.py`).
        samples: how many the data has given to steps before; where it has, a checkpoint will give the weights.

    Raises:
        InputError: the model does not fit the plan's layers, or the plan asks of it what is not executed.
    """
    graph = build_graph(plan.scenario)
    stream = iter(job.batches(part_size(plan)))
    first = taken(job, stream, max(FIRST_BATCHES, plan.parts * plan.microbatches))
    whole = lay(plan, job, graph, first)
    if rank in idle_ranks(plan):
        return _idle(plan, whole[0], rank, groups)
    at = place_of(plan, rank)
    own = plan.stages_of(at.row)
    laid, recordings = share(plan, graph, whole, at, own, groups.tensor, device, first, note)
    require_memory(plan, graph, laid.held, own, note)
    own_each = [text for mesh in (plan.base, *plan.meshes) for text in own_buffers(plan, laid, mesh)]
    for text in (*told_parts(plan), *own_each):
        note(text)
    pretrained = Pretrained(weights, laid.model) if weights is not None and samples == 0 else None
    if samples == 0:
        _tell_lost([name for name in lost_values(laid.model) if pretrained is None or pretrained.lacks(name)], note)
    scales = run_scales(plan, [SHARED])
    parts = parts_of(plan, laid.held, laid.owners, recordings)
    stages = _stages(plan, graph, laid, at, device, groups, pretrained, parts, scales, resumed=samples > 0)
    seen: dict[tuple[str, str], Recording] = {}  # edges of layers: what once passed keeps its place
    stream = _behind(chain(first, stream), job, plan, samples)

    def notice(recording: Recording) -> None:
        for layer, call in laid.owners.readers(recording):
            for source in call.reads:
                seen.setdefault((laid.owners.layer_of[source.unit], layer), recording)

    for recording in recordings:
        notice(recording)

    def prepare(step: int) -> tuple[RankProgram, Mapping[int, Stage]]:
        examples = _examples(plan, job, stream, at, laid)
        parts = [[example.recording for example in microbatch] for microbatch in examples]
        for recording in chain.from_iterable(parts):
            notice(recording)
            require_columns(recording)
            if laid.rows is not None:
                laid.rows.look(own_calls(laid, own, recording))
        require_equal_calls(list(chain.from_iterable(parts)), laid.experts, groups.tensor, device)
        actual = recorded_graph(graph, list(seen.values()), laid.owners)
        cuts = build_stage_graph([stage.layers for stage in plan.stages], actual).cuts
        ends = {
            (stage, index): handover(plan, laid.owners, cut, stage, at, laid.rows, device)
            for index, cut in enumerate(cuts)
            for stage in own
            if stage in (cut.source, cut.target)
        }
        program = _program(plan, actual, {index: end for (_, index), end in ends.items()}, len(cuts), parts, laid, rank)
        for index, stage in stages.items():
            stage.load(examples, [end for (of, _), end in ends.items() if of == index])
        return program, stages

    return Prepared(step=prepare, stages=tuple(stages.values()), model=laid.model, scales=scales)


def _idle(plan: Plan, laid: Laid, rank: int, groups: JobGroups) -> Prepared:
    """Of a rank between meshes. Collective like `_stages`."""
    join(plan, laid.held.ties, {}, partial(copies_of, laid.held, plan), groups.more)
    scales = run_scales(plan, [SHARED])
    return Prepared(step=lambda step: (idle_program(rank), {}), model=laid.model, scales=scales)


def _tell_lost(names: Sequence[str], note: Callable[[str], None]) -> None:
    """Parameters that do not begin as the model's code has them."""
    if names:
        shown = ", ".join(names[:LOST_SHOWN]) + (f" and {len(names) - LOST_SHOWN} more" if names[LOST_SHOWN:] else "")
        note(
            f"{counted(len(names), 'parameter')} of the model {'begins' if len(names) == 1 else 'begin'} with mmplan's "
            "own random values, not the model's, whose code computes them from tensors too large to keep: "
            f"{shown}; `--weights` gives them others"
        )


def _behind(stream: Iterator[Batch], job: Job, plan: Plan, samples: int) -> Iterator[Batch]:
    """What the data gives behind so many samples. Where the job cannot start there, batches before are drawn and left:
    what its own generators have drawn is so drawn again."""
    size = part_size(plan)
    batches, rest = divmod(samples, size)
    if rest:
        raise InputError(f"{samples:,} samples are no whole batches of {size}", file=job.file)
    if batches and job.starts:
        return iter(job.batches(size, start=batches))
    skipped = sum(1 for _ in islice(stream, batches))
    if skipped < batches:
        raise InputError(f"`batches` ended after {skipped:,}, and {batches:,} were trained on before", file=job.file)
    return stream


def _stages(
    plan: Plan,
    graph: ComputationGraph,
    laid: Laid,
    at: Place,
    device: torch.device,
    groups: JobGroups,
    pretrained: Pretrained | None,
    parts: UnitParts,
    scales: PartScales | None,
    *,
    resumed: bool,
) -> dict[int, GhostStage]:
    """Args: resumed: a checkpoint will give all weights."""
    indices, tp = plan.stages_of(at.row), mesh_of_row(plan, at.row).tp
    units, scaled = find_units(laid.model), None if scales is None else crossing(scales, parts)
    model = _filled(plan, laid, at, device, pretrained, units, scaled, resumed=resumed)
    kept = saved_buffers(laid.model)
    for name, tensor in kept.items():
        value = None if pretrained is None else pretrained.buffer(name)
        if value is not None:
            tensor.copy_(value)
    here = {index: frozenset(laid.held.pieces[index]) & laid.owners.used & units.keys() for index in indices}
    stores = {index: WeightStore() for index in indices}
    if any("I" in order for order in plan.orders):  # before what ranks share, which then is around it
        for index in indices:
            _postpone(laid, here[index], units, model, stores[index])
    if groups.tensor is not None:
        for name, splits in laid.splits.items():
            if laid.sequence is not None and name in laid.recorder.cut:
                model.change(name, partial(laid.sequence.set_up, name=name))
            else:
                model.change(name, partial(set_up, splits=splits, ranks=groups.tensor))
        if laid.vocabulary is not None:
            for name in laid.vocabulary.units:
                model.change(name, partial(laid.vocabulary.set_up, name=name))
        for name, split in laid.experts.items():
            model.change(name, partial(set_up_experts, split=split, ranks=groups.tensor))
    stages = {}
    for index, own in here.items():
        state = state_of(laid.held, plan, index, groups.replicas)
        layout = plan.layout(index)
        levels = {name: layout.recomputed(graph.layer(laid.owners.layer_of[name])) for name in own}
        recomputed = frozenset(name for name, level in levels.items() if level == "full")
        for name in (name for name, level in levels.items() if level == "selective"):
            model.change(name, recompute_attention)
        stages[index] = GhostStage(
            stage=index,
            layers=plan.stages[index].layers,
            own=own,
            recomputed=recomputed,
            owners=laid.owners,
            model=model,
            state=state,
            places=places_of(laid.held, plan, index, at.shard % tp),
            buffers=[
                Buffer(name=name, tensor=tensor, writes=at.replica == at.shard == 0 and _owner(laid, name) == index)
                for name, tensor in kept.items()
            ],
            store=stores[index],
            sums=sums_of(plan, laid, index, own, recomputed),
            rows=laid.rows,
            images=laid.images,
            vocabulary=laid.vocabulary,
            ranks=groups.tensor,
            turns=Turns(state, laid.held.slots[index]),
            count_kept=device.type == "cpu",
            parts={laid.model.get_parameter(name): part for name, part in parts.parameters.items()},
            scales=scales,
        )
    join(plan, laid.held.ties, stages, partial(copies_of, laid.held, plan), groups.more)
    return stages


def _postpone(laid: Laid, own: Set[str], units: Mapping[str, nn.Module], model: GhostModel, store: WeightStore) -> None:
    """Weight gradients of a stage's units, but for those that ranks sum or share out."""
    for name in own:
        apart = frozenset(laid.experts[name].experts.members if name in laid.experts else ())
        if laid.sequence is not None and name in laid.recorder.cut:
            apart |= laid.sequence.shared(name)
        if not laid.held.tied & {id(p) for p in units[name].parameters()}:  # another stage may have their state
            model.change(name, partial(postpone_linears, store=store, apart=apart))


def _filled(
    plan: Plan,
    laid: Laid,
    at: Place,
    device: torch.device,
    pretrained: Pretrained | None,
    units: Mapping[str, nn.Module],
    scaled: Crossing | None,
    *,
    resumed: bool,
) -> GhostModel:
    """This rank's pieces with their first values, or with room for those of a checkpoint."""
    seed = plan.scenario.seed

    def first_value(name: str, like: Tensor) -> Tensor:
        if resumed:
            return torch.empty(like.shape, dtype=like.dtype)
        return initial_value(name, like, seed, like.dtype)

    def own_value(name: str, like: Tensor) -> Tensor:
        if pretrained is None or pretrained.lacks(name):  # where there are weights, adapters begin as the model does
            value = first_value(name, like)
        else:
            value = pretrained.value(name, like)
        cut, experts = laid.held.cuts.get(name), laid.held.experts
        if experts is not None and name in experts.here:
            return experts.own(name, value)
        return value if cut is None else cut.own(value, at.shard % mesh_of_row(plan, at.row).tp)

    return GhostModel(
        laid.model,
        units,
        pieces=[piece for index in plan.stages_of(at.row) for piece in laid.held.pieces[index]],
        dealt=() if laid.images is None else laid.images.modules,
        changed=laid.recorder.changed,
        away=frozenset() if laid.held.experts is None else laid.held.experts.away,
        trained=laid.held.trained,
        weights=own_value,
        device=device,
        scaled=scaled,
    )


def _owner(laid: Laid, buffer: str) -> int:
    """The stage that computes with a buffer; the first where that is glue between units, which all ranks run."""
    for stage, pieces in enumerate(laid.held.pieces):
        if any(buffer.startswith(f"{piece}.") for piece in pieces):
            return stage
    return 0


def _examples(plan: Plan, job: Job, stream: Iterator[Batch], at: Place, laid: Laid) -> list[list[Example]]:
    """One replica's part of the next step, by microbatch; batches of others are counted only."""
    count, parts = plan.microbatches, "replicas" if plan.parts == plan.dp else "parts"
    batches = list(islice(stream, plan.parts * count))
    if len(batches) < plan.parts * count:
        raise InputError(
            f"`batches` ended: a step takes {plan.parts} {parts} x {count} microbatches = {plan.parts * count} "
            f"batches, {len(batches)} were left",
            file=job.file,
        )
    weights = [job.weight(batch) for batch in batches]
    if not sum(weights) > 0:
        raise InputError("no batch of a step has a label that counts", file=job.file)
    each = plan.parts // mesh_of_row(plan, at.row).dp

    def example(index: int) -> Example:
        batch = cast_batch(batches[index], laid.floats)
        return Example(batch=batch, recording=laid.recorder.record(batch), share=weights[index] / sum(weights))

    own = range(at.replica * each, (at.replica + 1) * each)
    return [[example(part * count + microbatch) for part in own] for microbatch in range(count)]


def _program(
    plan: Plan,
    graph: ComputationGraph,
    ends: Mapping[int, Handover],
    cuts: int,
    parts: Sequence[Parts],
    laid: Laid,
    rank: int,
) -> RankProgram:
    """This rank's program.

    Args:
        ends: of the tensors that the rank's stages hand over or get, by their place among all `cuts`. What others send
            each other does not enter its program.
        parts: of each microbatch.
    """
    shared, planned = held_bytes(laid.held, plan), plan_pipeline(plan, graph)
    pipeline = replace(
        planned,
        # Stages that the plan lets reduce do so where nothing is left to sum, too: actions are those of the plan.
        reduce_bytes=tuple(max(one.reduce, size) for one, size in zip(shared, planned.reduce_bytes, strict=True)),
        shared_bytes=shared,
        ties=tie_sums(laid.held, plan),
    )
    sizes = np.zeros((sum(mesh.dp for mesh in (plan.base, *plan.meshes)), plan.microbatches, cuts), dtype=np.int64)
    for index, end in ends.items():
        messages = np.array([end.message_bytes(microbatch) for microbatch in parts], dtype=np.int64)
        sizes[end.first : end.first + len(end.overlaps), :, index] = messages.T
    lowered = place_meshed(pipeline, sizes, plan.units) if plan.meshes else place(pipeline, sizes)
    listed = rank_program(lowered.columns, listed_places(plan)[rank])
    return program_of_shard(plan, listed, place_of(plan, rank).shard)
