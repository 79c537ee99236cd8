"""FLOPs of a training step per modality, and the utilisation they stand for: what "MFU" means here.

model FLOPs: matrix products that the training asks for: forward, input gradients where something upstream is trained,
weight gradients of what is trained; attention over all query-key pairs, causal or not (as PaLM, arXiv 2204.02311,
appendix B, and NVIDIA's and MosaicML's tables count); nothing padded, nothing recomputed.
padding FLOPs: the same products on what only fills up: clips padded to a fixed length, heads, vocabulary and experts'
rows padded to the degree.
hardware FLOPs: what devices execute: model and padding, recomputation, and only half of causal attention where the
kernel skips the masked half. MFU and HFU divide the two by step time x devices x dense peak of the precision; where
modules differ in precision, the FLOPs of each by its own peak.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mmplan.cost_models.counts import op_dgrad_flops, op_wgrad_flops, product_flops
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.load import Load
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.ops import Attention
from mmplan.cost_models.shard import Shard
from mmplan.scenario.scenario import Dtype, Scenario
from mmplan.scenario.technique import Technique


@dataclass(frozen=True, kw_only=True, slots=True)
class ModalityFlops:
    """FLOPs of one optimizer step that modules of a modality take, over all devices."""

    modality: str
    model_flops: float
    padding_flops: float
    hardware_flops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilisation:
    """FLOPs by modality and the whole job's rates; fractions of the dense peak."""

    modalities: tuple[ModalityFlops, ...]
    mfu: float
    hfu: float
    padding_share: float  # of model and padding FLOPs


def step_flops(
    scenario: Scenario, graph: ComputationGraph, layouts: int | Mapping[str, Layout]
) -> tuple[ModalityFlops, ...]:
    """FLOPs per modality of a step of `global_batch` mean samples, in the order of the modules.

    Args:
        layouts: of each layer; a plain tp stands for all, recomputing as the technique says. Work that ranks of a
            replica do twice counts as padding.
    """
    sums: dict[str, list[float]] = {}
    for (modality, _), flops in _flops_by_precision(scenario, graph, layouts).items():
        known = sums.setdefault(modality, [0.0, 0.0, 0.0])
        sums[modality] = [one + more for one, more in zip(known, flops, strict=True)]
    return tuple(
        ModalityFlops(modality=name, model_flops=model, padding_flops=padding, hardware_flops=hardware)
        for name, (model, padding, hardware) in sums.items()
    )


def _flops_by_precision(
    scenario: Scenario, graph: ComputationGraph, layouts: int | Mapping[str, Layout]
) -> dict[tuple[str, Dtype], list[float]]:
    """(modality, precision) -> model, padding and hardware FLOPs of a step."""
    if isinstance(layouts, int):
        every = Layout(tp=layouts, recompute=scenario.technique.recompute)
        layouts = dict.fromkeys((layer.id for layer in graph.layers()), every)
    padded, plain = (mean_loads(one, 1) for one in (scenario, _unpadded(scenario)))
    sums: dict[tuple[str, Dtype], list[float]] = {}
    for layer in graph.layers():
        model = _products(layer, plain, Shard())
        layout = layouts[layer.id]
        share = {layer.module: layout.load(layer, padded[layer.module])}
        executed = layout.tp * layout.cp * _products(layer, share, layout.shard(layer))
        technique = replace(scenario.technique, recompute=layout.recomputed(layer), recompute_layers=None)
        whole = executed - _skipped(layer, padded, technique) + _again(layer, padded, technique)
        entry = sums.setdefault((layer.modality, scenario.precision_of(layer)), [0.0, 0.0, 0.0])
        for index, flops in enumerate((model, max(0.0, executed - model), whole)):
            entry[index] += flops * scenario.global_batch
    return sums


def utilisation(
    scenario: Scenario, graph: ComputationGraph, layouts: int | Mapping[str, Layout], devices: int, step_s: float
) -> Utilisation | None:
    """MFU and HFU of a step of that length; None where the device has no rate for a precision."""
    peaks = {one: scenario.cluster.pools[0].device.flops_per_s(one) for one in scenario.precisions}
    if step_s <= 0:
        return None
    model = padding = model_s = hardware_s = 0.0
    for (_, precision), (of_model, of_padding, of_hardware) in _flops_by_precision(scenario, graph, layouts).items():
        peak = peaks[precision]
        if peak is None:
            return None
        model, padding = model + of_model, padding + of_padding
        model_s, hardware_s = model_s + of_model / peak, hardware_s + of_hardware / peak
    return Utilisation(
        modalities=step_flops(scenario, graph, layouts),
        mfu=model_s / (step_s * devices),
        hfu=hardware_s / (step_s * devices),
        padding_share=padding / (model + padding) if model + padding else 0.0,
    )


def _unpadded(scenario: Scenario) -> Scenario:
    modules = tuple(
        module if module.audio is None else replace(module, audio=replace(module.audio, pad_s=None))
        for module in scenario.model.modules
    )
    return replace(scenario, model=replace(scenario.model, modules=modules))


def _products(layer: Layer, loads: Mapping[str, Load], shard: Shard) -> float:
    """Forward, input-gradient and weight-gradient products; the backward of attention as two more forwards, as model
    FLOPs are counted, whatever a kernel recomputes."""
    load, total = loads[layer.module], 0.0
    for op in layer.ops:
        forward = product_flops(op, load, shard)
        dgrad = op_dgrad_flops(layer, op, load, shard)
        backward = min(dgrad, 2 * forward) if isinstance(op, Attention) else dgrad
        total += forward + backward + op_wgrad_flops(op, load, shard)
    return total


def _skipped(layer: Layer, loads: Mapping[str, Load], technique: Technique) -> float:
    """Masked halves that fused kernels do not compute, less what their backward computes again."""
    if technique.attention == "math":
        return 0.0
    load, skipped = loads[layer.module], 0.0
    for op in layer.ops:
        if isinstance(op, Attention):
            forward, dgrad = product_flops(op, load), op_dgrad_flops(layer, op, load)
            counted = forward + min(dgrad, 2 * forward)
            skipped += counted - (forward + dgrad) * (0.5 if op.causal else 1.0)
    return skipped


def _again(layer: Layer, loads: Mapping[str, Load], technique: Technique) -> float:
    """Forward products that the backward repeats."""
    if layer.kind not in ("block", "cross_block") or not layer.has_backward or technique.recompute == "none":
        return 0.0
    load = loads[layer.module]
    again = 0.0
    for op in layer.ops:
        if technique.recompute == "full" or isinstance(op, Attention):
            halved = isinstance(op, Attention) and op.causal and technique.attention != "math"
            again += product_flops(op, load) * (0.5 if halved else 1.0)
    return again
