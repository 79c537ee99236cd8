"""Memory of every stage of a job in one given configuration, part by part, without any search.

Stages are the equal ones of `even_stages.py`. Activations count the microbatches that the schedule keeps alive, one of
them at the 99th percentile of the data's tokens, the others at the mean.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load
from mmplan.cost_models.memory_activations import (
    BLOCKS,
    Kept,
    Setting,
    kept,
    kept_recomputed,
    logits_bytes,
    with_hooks,
    working_bytes,
)
from mmplan.cost_models.memory_estimate import MemoryEstimate, MemoryPart, Moment
from mmplan.cost_models.memory_states import ParameterCounts, Replicas, host_parts, layer_counts, state_parts
from mmplan.cost_models.memory_tensors import largest_tensors
from mmplan.cost_models.memory_transients import gathered_part, optimizer_step_part
from mmplan.cost_models.peak_loads import MicrobatchLoads
from mmplan.cost_models.shard import Shard
from mmplan.planner.check_degrees import check_degrees, tensor_widths
from mmplan.planner.degrees import Degrees
from mmplan.planner.even_stages import even_chunks
from mmplan.planner.memory_liveness import in_flight_chunks
from mmplan.scenario.scenario import DTYPE_BYTES, ModelModule, Scenario
from mmplan.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What all stages share."""

    scenario: Scenario
    degrees: Degrees
    settings: Mapping[str, Setting]  # module -> how its layers are run
    mean: Mapping[str, Load]
    peak: Mapping[str, Load]
    hidden: int
    replicas: Replicas
    cache: dict[tuple[object, ...], Kept]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    index: int
    chunks: tuple[tuple[Layer, ...], ...]
    in_flight: tuple[int, ...]

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(layer for chunk in self.chunks for layer in chunk)


def estimate_memory(scenario: Scenario, degrees: Degrees) -> tuple[MemoryEstimate, ...]:
    """One estimate per pipeline stage, for a rank of it.

    Raises:
        InputError: the degrees do not fit the model or the cluster.
        CostModelError: nothing is known about the memory of the scenario's software stack.
    """
    return MemoryEstimator(scenario).estimate(scenario, degrees)


class MemoryEstimator:
    """Estimates many configurations of one model and data; the graph and the loads are kept between calls."""

    def __init__(self, scenario: Scenario) -> None:
        self._graph, self._loads = build_graph(scenario), MicrobatchLoads(scenario.model, scenario.data)

    def estimate(self, scenario: Scenario, degrees: Degrees) -> tuple[MemoryEstimate, ...]:
        """As `estimate_memory`; `scenario` may differ from the first one in technique, cluster and batch."""
        check_degrees(scenario, degrees)
        job = _job(scenario, degrees, self._loads)
        return tuple(_estimate(job, stage) for stage in _stages(job, self._graph))


def module_shard(module: ModelModule, degrees: Degrees) -> Shard:
    """Degrees inside a module's layers. An encoder or projector whose sizes tp does not divide is replicated over the
    tp ranks, and context parallelism splits language models only."""
    if module.kind == "language_model":
        return Shard(tp=degrees.tp, ep=degrees.ep, etp=degrees.etp, cp=degrees.cp)
    divides = all(width % degrees.tp == 0 for width in tensor_widths(module).values())
    return Shard(tp=degrees.tp if divides else 1)


def _job(scenario: Scenario, degrees: Degrees, loads: MicrobatchLoads) -> _Job:
    modules = scenario.model.modules
    settings = {
        module.name: Setting(
            precision=scenario.precision, technique=scenario.technique, shard=module_shard(module, degrees)
        )
        for module in modules
    }
    widths = [m.transformer.hidden for m in modules if m.kind == "language_model" and m.transformer is not None]
    return _Job(
        scenario=scenario,
        degrees=degrees,
        settings=settings,
        mean=loads.mean(degrees.microbatch_size),
        peak=loads.peak(degrees.microbatch_size),
        hidden=max(widths, default=0),
        replicas=Replicas(
            dense=degrees.dp * degrees.cp, expert=degrees.tp * degrees.cp * degrees.dp // (degrees.ep * degrees.etp)
        ),
        cache={},
    )


def _stages(job: _Job, graph: ComputationGraph) -> tuple[_Stage, ...]:
    scenario, degrees = job.scenario, job.degrees
    language = [module.name for module in scenario.model.modules if module.kind == "language_model"]
    pieces = even_chunks(graph, language or [m.name for m in scenario.model.modules], degrees.pp, degrees.vp)
    frozen = {m.name for m in scenario.model.modules if m.training.mode == "frozen"}
    if scenario.technique.frozen_hooks:
        pieces = tuple(
            tuple(with_hooks(layer) if layer.module in frozen else layer for layer in piece) for piece in pieces
        )
    return tuple(
        _Stage(
            index=stage,
            chunks=tuple(pieces[chunk * degrees.pp + stage] for chunk in range(degrees.vp)),
            in_flight=in_flight_chunks(degrees.schedule, degrees.pp, stage, degrees.vp, degrees.microbatches),
        )
        for stage in range(degrees.pp)
    )


def _estimate(job: _Job, stage: _Stage) -> MemoryEstimate:
    scenario = job.scenario
    technique, precision, optimizer = scenario.technique, scenario.precision, scenario.optimizer
    per_layer = [_counts(job, stage, layer) for layer in stage.layers]
    counts = sum(per_layer, ParameterCounts())
    units = [c for c, layer in zip(per_layer, stage.layers, strict=True) if layer.kind in BLOCKS]
    root = sum((c for c, la in zip(per_layer, stage.layers, strict=True) if la.kind not in BLOCKS), ParameterCounts())
    states = state_parts(counts, job.replicas, precision, optimizer, technique)
    gathered = gathered_part(units, root, job.hidden, precision, technique)
    device = min((pool.device for pool in scenario.cluster.pools), key=lambda device: device.memory_bytes)
    context = MemoryPart(
        name="context and NCCL",
        bytes=device.reserved_bytes,
        why=f"{format_bytes(device.reserved_bytes)} of {device.name}: context, communication buffers",
        level="device",
    )
    working = (*_activation_parts(job, stage), *_pipeline_part(job, stage))
    step = (*states, context, *((gathered,) if gathered else ()), *working)
    update_part = optimizer_step_part(counts, job.replicas, precision, optimizer, technique)
    update = (*states, context, *((update_part,) if update_part else ()))
    return MemoryEstimate(
        stage=stage.index,
        moments=(
            Moment(name="training step", parts=_present(step)),
            Moment(name="optimizer update", parts=_present(update)),
        ),
        host_parts=(
            *host_parts(counts, job.replicas, precision, optimizer, technique),
            *_host_activations(job, stage),
        ),
        largest=largest_tensors(stage.layers, job.peak, job.settings),
        limit_bytes=device.memory_bytes,
        headroom=scenario.constraints.memory_headroom,
    )


def _present(parts: Sequence[MemoryPart]) -> tuple[MemoryPart, ...]:
    return tuple(part for part in parts if part.bytes > 0)


def _counts(job: _Job, stage: _Stage, layer: Layer) -> ParameterCounts:
    table_here = any(other.module == layer.module and other.kind == "token_embed" for other in stage.layers)
    plain = job.scenario.technique.stack == "mmplan"  # its runtime keeps a copy of the table for the head
    return layer_counts(layer, job.settings[layer.module].shard, tied_here=table_here and not plain)


def _kept(job: _Job, layer: Layer, load: Load, recomputed: bool) -> Kept:
    key = (layer.module, layer.ops, layer.grad_values, load, recomputed)
    if key not in job.cache:
        setting = job.settings[layer.module]
        job.cache[key] = (kept_recomputed if recomputed else kept)(layer, load, setting)
    return job.cache[key]


def _recomputed(job: _Job, stage: _Stage) -> set[str]:
    """Ids of the layers of a stage that are recomputed as a whole; `recompute_layers` counts those of language
    models, encoders are recomputed in all their blocks."""
    technique = job.scenario.technique
    if technique.recompute != "full":
        return set()
    blocks = [layer for layer in stage.layers if layer.kind in BLOCKS]
    language = [layer.id for layer in blocks if layer.modality in ("text", "speech")]
    return {layer.id for layer in blocks} - set(language) | set(language[: technique.recompute_layers])


def _activation_parts(job: _Job, stage: _Stage) -> tuple[MemoryPart, ...]:
    again, away = _recomputed(job, stage), job.scenario.technique.host_activations
    total, logits = Kept(), (0.0, 0.0)
    for layers, alive in zip(stage.chunks, stage.in_flight, strict=True):
        for layer in layers if alive else ():
            load, peak = job.mean[layer.module], job.peak[layer.module]
            if layer.kind == "loss":
                kept_logits, at_work = logits_bytes(layer, peak, job.settings[layer.module], job.hidden)
                held = alive if job.degrees.schedule == "gpipe" else 1  # else its backward follows at once
                logits = (logits[0] + held * kept_logits, max(logits[1], at_work))
                continue
            recomputed = layer.id in again
            if away and layer.kind in BLOCKS:
                continue
            total += _kept(job, layer, load, recomputed).scaled(alive - 1) + _kept(job, layer, peak, recomputed)
    live, name, why = _working(job, stage, again)
    if logits[1] > live:
        live, name, why = logits[1], "logits at work", "fp32 and 16-bit copies or gradients beside those kept"
    shown = "+".join(str(count) for count in stage.in_flight)
    alive_text = f"{shown} microbatch(es) alive, {len(stage.layers)} layers, {len(again)} of them recomputed"
    parts = (
        ("activations", total.values, alive_text),
        ("attention scores", total.scores, f"pairs x heads kept, {shown} microbatches alive"),
        ("dropout masks", total.masks, f"one byte per element, {shown} microbatches alive"),
        ("logits", logits[0], f"kept for the backward of the loss ({job.scenario.technique.cross_entropy})"),
        ("activations on their way", *_travelling(job, stage, again)),
        (name, live, why),
    )
    return tuple(MemoryPart(name=name, bytes=math.ceil(size), why=why) for name, size, why in parts)


def _travelling(job: _Job, stage: _Stage, again: set[str]) -> tuple[float, str]:
    """Where activations of blocks wait in host memory: those of the block at work, and of another on their way."""
    if not job.scenario.technique.host_activations:
        return 0.0, ""
    blocks = [layer for layer in stage.layers if layer.kind in BLOCKS]
    most = max((_kept(job, layer, job.peak[layer.module], layer.id in again).total for layer in blocks), default=0.0)
    return 2 * most, "what a block keeps, of the one at work and of one that is copied to the host or back"


def _host_activations(job: _Job, stage: _Stage) -> tuple[MemoryPart, ...]:
    """What waits in host memory for the backwards of all microbatches in flight."""
    if not job.scenario.technique.host_activations:
        return ()
    again, total, blocks = _recomputed(job, stage), 0.0, 0
    for layers, alive in zip(stage.chunks, stage.in_flight, strict=True):
        for layer in layers:
            if alive and layer.kind in BLOCKS:
                recomputed, name, blocks = layer.id in again, layer.module, blocks + 1
                total += (alive - 1) * _kept(job, layer, job.mean[name], recomputed).total
                total += _kept(job, layer, job.peak[name], recomputed).total
    shown = "+".join(str(count) for count in stage.in_flight)
    why = f"what {blocks} blocks keep of {shown} microbatch(es)"
    return (MemoryPart(name="activations", bytes=math.ceil(total), why=why, level="device"),)


def _working(job: _Job, stage: _Stage, again: set[str]) -> tuple[float, str, str]:
    """The layer that needs most at work: a recomputed one needs all that it would have kept."""
    best: tuple[float, str, str] = (0.0, "working buffers", "")
    seen: set[tuple[object, ...]] = set()
    for layer in stage.layers:
        key = (layer.module, layer.ops, layer.grad_values, layer.id in again)
        if key in seen or layer.kind == "loss":
            continue
        seen.add(key)
        peak, setting = job.peak[layer.module], job.settings[layer.module]
        size = working_bytes(layer, peak, setting)
        name, why = "working buffers", f"gradients and temporaries of {layer.id}"
        if layer.id in again:
            size += _kept(job, layer, peak, False).total - _kept(job, layer, peak, True).total
            name, why = "recomputed layer", f"activations of {layer.id} once more, with gradients and temporaries"
        best = max(best, (size, name, why))
    return best


def _pipeline_part(job: _Job, stage: _Stage) -> tuple[MemoryPart, ...]:
    """A received activation and a received gradient (Megatron-LM p2p_communication.py keeps one of each)."""
    if job.degrees.pp == 1:
        return ()
    layer = next((layer for layer in reversed(stage.layers) if layer.kind in BLOCKS), None)
    if layer is None:
        return ()
    setting = job.settings[layer.module]
    width = DTYPE_BYTES[job.scenario.precision]
    size = 2 * setting.elements(layer, layer.output, job.peak[layer.module]) * width
    return (MemoryPart(name="pipeline buffers", bytes=math.ceil(size), why="one activation and one gradient received"),)
