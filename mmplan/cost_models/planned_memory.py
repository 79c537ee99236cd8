"""Bytes of single layers under a scenario's technique, as plans count them: additive over layers and microbatches.

The rules are those of `mmplan fit` (`memory_activations.py`, `memory_states.py`). Under mmplan's own technique they
give `counts.kept_bytes` and `memory.state_bytes`. What layers need at work beside what they keep is that of the layer
of the model that needs most (`planned_working_bytes`), and in the stage of a loss what its logits need beyond
(`loss_working_bytes`).
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from mmplan.cost_models.compressed_bytes import FORMATS, FP32_BYTES
from mmplan.cost_models.counts import edge_bytes
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout, as_layout, trained_on_rank
from mmplan.cost_models.load import Load, Loads
from mmplan.cost_models.memory_activations import BLOCKS, Setting, kept, kept_recomputed, logits_bytes, working_bytes
from mmplan.cost_models.memory_states import layer_counts, state_parts
from mmplan.scenario.scenario import DTYPE_BYTES, Dtype, Scenario
from mmplan.scenario.technique import Technique, recomputing


def planned_state_bytes(layer: Layer, scenario: Scenario, layout: int | Layout = 1) -> int:
    """Bytes of a layer's weights, gradients and optimizer state on each rank; a tied head counts as a copy."""
    ranks = as_layout(layout)
    technique = replace(scenario.technique, sharding=ranks.sharding)
    technique = replace(technique, fp8="none") if layer.no_fp8 else technique
    counts, replicas = layer_counts(layer, ranks.shard(layer)), ranks.state_replicas(layer)
    parts = state_parts(counts, replicas, scenario.precision_of(layer), scenario.optimizer, technique)
    return sum(part.bytes for part in parts) + unsent_bytes(layer, technique, ranks)


def unsent_bytes(layer: Layer, technique: Technique, layout: Layout) -> int:
    """What messages about compressed gradients have left out so far, in fp32."""
    form = FORMATS.get(technique.compression)
    if form is None or layout.sharding != "none" or layout.replicas == 1:
        return 0
    trained = trained_on_rank(layer, layout) + trained_on_rank(layer, layout, tied=True)
    coded = trained.dense - trained.kept
    return 0 if form.dense(coded) else FP32_BYTES * coded


def planned_kept_bytes(layer: Layer, load: Load, scenario: Scenario, layout: int | Layout = 1) -> int:
    """Bytes that a layer keeps on the device of a microbatch from its forward to its backward, on each rank."""
    if scenario.technique.host_activations and layer.kind in BLOCKS:
        return 0
    return _held_bytes(layer, load, scenario, as_layout(layout))


def offloaded_bytes(layer: Layer, load: Load, scenario: Scenario, layout: Layout) -> int:
    """Bytes of a microbatch that wait in host memory from a layer's forward to its backward; on the device they are
    while the layer is at work, and while they are on their way beside the next one."""
    if not scenario.technique.host_activations or layer.kind not in BLOCKS:
        return 0
    return _held_bytes(layer, load, scenario, layout)


def _held_bytes(layer: Layer, load: Load, scenario: Scenario, ranks: Layout) -> int:
    setting, share = _setting(layer, scenario, ranks), ranks.load(layer, load)
    if layer.kind == "loss":
        return math.ceil(logits_bytes(layer, share, setting, _hidden(scenario))[0]) if layer.has_backward else 0
    if setting.technique.recompute == "full":
        return math.ceil(kept_recomputed(layer, share, setting).total)
    return math.ceil(kept(layer, share, setting).total)


def handed_out_bytes(layer: Layer, loads: Loads, graph: ComputationGraph, layout: Layout, precision: Dtype) -> int:
    """Bytes on each rank of a microbatch's output of a layer that runs several at once, where others read it one by
    one: it waits for them, and its gradient for those of all that ran with it."""
    if layout.microbatches_of(layer.module) == 1:
        return 0
    edges = [graph.edge(layer.id, reader) for reader in graph.successors(layer.id)]
    sizes = (edge_bytes(e, loads, precision) * (1 + e.carries_grad) for e in edges if not layout.sends_together(e))
    return max(sizes, default=0)


def planned_excess_bytes(layer: Layer, mean: Load, peak: Load, scenario: Scenario, layout: Layout) -> int:
    """Bytes that a layer keeps of a microbatch as large as `peak` beyond a mean one: of those in flight one is so."""
    if mean == peak:
        return 0
    more = planned_kept_bytes(layer, peak, scenario, layout) - planned_kept_bytes(layer, mean, scenario, layout)
    return max(0, more)


def planned_working_bytes(layers: Iterable[Layer], loads: Loads, scenario: Scenario, layout: Layout) -> int:
    """Bytes that any stage has at most at work, the loss apart: what one layer needs beside what it keeps, if it is
    recomputed its activations once more; with sharded parameters the layer, the next one, and a gradient (torch FSDP
    docs, `BackwardPrefetch`); with activations in host memory those of the layer, and of another on their way."""
    work = whole = away = 0
    seen: set[tuple[object, ...]] = set()
    every = tuple(layers)
    for layer, kind in zip(every, _kinds(every), strict=True):
        key = (kind, layout.recomputed(layer))
        if key in seen:
            continue
        seen.add(key)
        work = max(work, layer_working_bytes(layer, loads[layer.module], scenario, layout))
        whole = max(whole, gathered_bytes(layer, scenario, layout))
        away = max(away, offloaded_bytes(layer, loads[layer.module], scenario, layout))
    return work + whole + away


@lru_cache(maxsize=8)
def _kinds(layers: tuple[Layer, ...]) -> tuple[int, ...]:
    """A number of each layer, equal where all is equal but their places; once for all layouts of a model, as operators
    take long to compare."""
    first: dict[tuple[object, ...], int] = {}
    return tuple(first.setdefault((x.module, x.kind, x.ops, x.grad_values), len(first)) for x in layers)


def layer_working_bytes(layer: Layer, load: Load, scenario: Scenario, layout: Layout) -> int:
    """Bytes that a layer needs at work beside what it keeps; of a loss see `loss_working_bytes`."""
    if layer.kind == "loss":
        return 0
    plain, share = layout.at("none"), layout.load(layer, load)
    size = math.ceil(working_bytes(layer, share, _setting(layer, scenario, plain)))
    if layout.recomputed(layer) == "full":
        size += _held_bytes(layer, load, scenario, plain) - _held_bytes(layer, load, scenario, layout)
    return size + offloaded_bytes(layer, load, scenario, layout)


def loss_working_bytes(layer: Layer, load: Load, scenario: Scenario, layout: Layout, beside: int) -> int:
    """Bytes that a loss needs at work beyond `beside`, which its stage has for other layers; 0 of any other layer."""
    if layer.kind != "loss" or not layer.has_backward:
        return 0
    share, setting = layout.load(layer, load), _setting(layer, scenario, layout)
    return max(0, math.ceil(logits_bytes(layer, share, setting, _hidden(scenario))[1]) - beside)


def gathered_bytes(layer: Layer, scenario: Scenario, layout: Layout) -> int:
    """Whole weights of a layer and of one like it, and a gradient, where these are otherwise sharded or on the host."""
    counts, replicas = layer_counts(layer, layout.shard(layer)), layout.state_replicas(layer)
    experts = counts.expert + counts.expert_frozen
    elsewhere = (replicas.dense > 1 and counts.total > experts) or (replicas.expert > 1 and experts > 0)
    if layout.sharding != "parameters" or not (elsewhere or scenario.technique.offload == "parameters"):
        return 0
    return (2 * counts.total + counts.trained) * DTYPE_BYTES[scenario.precision_of(layer)]


def _setting(layer: Layer, scenario: Scenario, layout: Layout) -> Setting:
    technique = recomputing(scenario.technique, layout.recomputed(layer))
    return Setting(precision=scenario.precision_of(layer), technique=technique, shard=layout.shard(layer))


def _hidden(scenario: Scenario) -> int:
    modules = scenario.model.modules
    return max((m.transformer.hidden for m in modules if m.kind == "language_model" and m.transformer), default=0)
