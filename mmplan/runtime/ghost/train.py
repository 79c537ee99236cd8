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
from mmplan.planner.plan import Plan
from mmplan.planner.program import RankProgram
from mmplan.planner.stage_graph import StageGraph, build_stage_graph
from mmplan.runtime.ghost.attention_again import recompute_attention
from mmplan.runtime.ghost.expert_trials import require_equal_calls
from mmplan.runtime.ghost.holdings import copies_of, held_bytes, places_of, state_of, tie_sums
from mmplan.runtime.ghost.job import Job, taken
from mmplan.runtime.ghost.job_memory import require_memory
from mmplan.runtime.ghost.laying import Laid, cast_batch, lay, own_buffers, own_calls, share, sums_of
from mmplan.runtime.ghost.model import Crossing, GhostModel, saved_buffers
from mmplan.runtime.ghost.pretrained import Pretrained
from mmplan.runtime.ghost.recording import Batch, Recording
from mmplan.runtime.ghost.scaled import UnitParts, crossing, parts_of
from mmplan.runtime.ghost.split_experts import set_up_experts
from mmplan.runtime.ghost.split_linears import set_up
from mmplan.runtime.ghost.stage import Example, GhostStage
from mmplan.runtime.ghost.traffic import payload, payload_bytes, recorded_graph
from mmplan.runtime.ghost.turns import Turns
from mmplan.runtime.ghost.units import find_units
from mmplan.runtime.ghost.weightless import initial_value, lost_values
from mmplan.runtime.groups import GroupOf
from mmplan.runtime.held import Buffer
from mmplan.runtime.loss_scaling import run_scales
from mmplan.runtime.numerics.modality_parts import SHARED
from mmplan.runtime.numerics.part_scales import PartScales
from mmplan.runtime.places import Place, listed_places, place_of, program_of_shard
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
    graph, at = build_graph(plan.scenario), place_of(plan, rank)
    own = plan.stages_of(at.row)
    stream = iter(job.batches(plan.microbatch_size))
    first = taken(job, stream, max(FIRST_BATCHES, plan.dp * plan.microbatches))
    whole = lay(plan, job, graph, first)
    laid, recordings = share(plan, graph, whole, at, own, groups.tensor, device, first, note)
    require_memory(plan, graph, laid.held, own, note)
    for text in own_buffers(plan, laid):
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
        examples = _examples(plan, job, stream, at.replica, laid)
        for example in examples:
            notice(example.recording)
            if laid.rows is not None:
                laid.rows.look(own_calls(laid, own, example.recording))
        require_equal_calls([example.recording for example in examples], laid.experts, groups.tensor, device)
        actual = recorded_graph(graph, list(seen.values()), laid.owners)
        cut = build_stage_graph([stage.layers for stage in plan.stages], actual)
        program = _program(plan, actual, cut, examples, laid, rank)
        for stage in stages.values():
            stage.load(examples, cut.cuts, [part.layers for part in plan.stages])
        return program, stages

    return Prepared(step=prepare, stages=tuple(stages.values()), model=laid.model, scales=scales)


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
    batches, rest = divmod(samples, plan.microbatch_size)
    if rest:
        raise InputError(f"{samples:,} samples are no whole batches of {plan.microbatch_size}", file=job.file)
    if batches and job.starts:
        return iter(job.batches(plan.microbatch_size, start=batches))
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
    indices = plan.stages_of(at.row)
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
            model.change(name, partial(set_up, splits=splits, ranks=groups.tensor))
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
            places=places_of(laid.held, plan, index, at.shard % plan.tp),
            buffers=[
                Buffer(name=name, tensor=tensor, writes=at.replica == at.shard == 0 and _owner(laid, name) == index)
                for name, tensor in kept.items()
            ],
            store=stores[index],
            sums=sums_of(plan, laid, index, own, recomputed),
            rows=laid.rows,
            images=laid.images,
            ranks=groups.tensor,
            turns=Turns(state, laid.held.slots[index] if laid.held.slots else None),
            count_kept=device.type == "cpu",
            parts={laid.model.get_parameter(name): part for name, part in parts.parameters.items()},
            scales=scales,
        )
    join(plan, laid.held.ties, stages, partial(copies_of, laid.held, plan), groups.more)
    return stages


def _postpone(laid: Laid, own: Set[str], units: Mapping[str, nn.Module], model: GhostModel, store: WeightStore) -> None:
    """Weight gradients of a stage's units, but for those of experts that ranks share out."""
    for name in own:
        apart = laid.experts[name].experts.members if name in laid.experts else ()
        if not laid.held.tied & {id(p) for p in units[name].parameters()}:  # another stage may have their state
            model.change(name, partial(postpone_linears, store=store, apart=frozenset(apart)))


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
        return value if cut is None else cut.own(value, at.shard % plan.tp)

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


def _examples(plan: Plan, job: Job, stream: Iterator[Batch], replica: int, laid: Laid) -> list[Example]:
    """One replica's microbatches of the next step; those of the others are counted only."""
    batches = list(islice(stream, plan.dp * plan.microbatches))
    if len(batches) < plan.dp * plan.microbatches:
        raise InputError(
            f"`batches` ended: a step takes {plan.dp} replicas x {plan.microbatches} microbatches = "
            f"{plan.dp * plan.microbatches} batches, {len(batches)} were left",
            file=job.file,
        )
    weights = [job.weight(batch) for batch in batches]
    if not sum(weights) > 0:
        raise InputError("no batch of a step has a label that counts", file=job.file)
    own = slice(replica * plan.microbatches, (replica + 1) * plan.microbatches)
    own_batches = [cast_batch(batch, laid.floats) for batch in batches[own]]
    return [
        Example(batch=batch, recording=laid.recorder.record(batch), share=weight / sum(weights))
        for batch, weight in zip(own_batches, weights[own], strict=True)
    ]


def _program(
    plan: Plan, graph: ComputationGraph, cut: StageGraph, examples: Sequence[Example], laid: Laid, rank: int
) -> RankProgram:
    """This rank's program. Sizes of other replicas do not enter it; they are set to this one's."""
    readers = [frozenset(stage.layers) for stage in plan.stages]
    sizes = [
        [
            payload_bytes(e.recording, payload(e.recording, laid.owners, c.edge.producer, readers[c.target]), plan.cp)
            for c in cut.cuts
        ]
        for e in examples
    ]
    shared = held_bytes(laid.held, plan)
    pipeline = replace(
        plan_pipeline(plan, graph),
        reduce_bytes=tuple(one.reduce for one in shared),
        shared_bytes=() if plan.sharding == "none" else shared,
        ties=tie_sums(laid.held, plan),
    )
    shape = (plan.dp, plan.microbatches, len(cut.cuts))
    lowered = place(pipeline, np.broadcast_to(np.array(sizes, dtype=np.int64).reshape(shape[1:]), shape).copy())
    listed = rank_program(lowered.columns, listed_places(plan)[rank])
    return program_of_shard(plan, listed, place_of(plan, rank).shard)
