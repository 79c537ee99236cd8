"""Counts of the layers of a model against what torch does with the same layers."""

from collections.abc import Mapping

import torch
from layer_zoo import microbatch_of, scenario_of
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import (
    dgrad_flops,
    edge_bytes,
    forward_flops,
    kept_bytes,
    parameters,
    trainable_parameters,
    wgrad_flops,
)
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load
from mmplan.cost_models.loads import sample_loads
from mmplan.cost_models.ops import Norm, Rope
from mmplan.runtime.attention import rope_table
from mmplan.runtime.batch import Microbatch
from mmplan.runtime.layers import build_layer
from mmplan.scenario.scenario import Dtype, Model, Sample

aten = torch.ops.aten
CPU_ATTENTION = {  # FlopCounterMode knows the CUDA kernels only; same formulas
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *args, out_shape=None, **kwargs: sdpa_flop_count(
        q, k, v
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *args, out_shape=None, **kwargs: (
        sdpa_backward_flop_count(g, q, k, v)
    ),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _Observed:
    """What torch did in one forward and backward of a layer."""

    def __init__(self, layer: Layer, module: nn.Module, batch: Microbatch, inputs: Mapping[str, Tensor]) -> None:
        self.saved: list[Tensor] = []
        with saved_tensors_hooks(self._keep, lambda tensor: tensor):
            with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
                self.output: Tensor = module(inputs, batch)
            self.forward_flops = counter.get_total_flops()
        self.backward_flops = 0
        if self.output.requires_grad:
            with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
                self.output.float().sum().backward()
            self.backward_flops = counter.get_total_flops()
        shared = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        for op in layer.ops:
            if isinstance(op, Rope):
                lengths, head_dim = batch.lengths[layer.module], op.dims or op.x.width // op.heads
                tables = rope_table(lengths, head_dim, self.output.dtype, self.output.device)
                shared |= {table.untyped_storage().data_ptr() for table in tables}
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in self.saved if tensor.is_floating_point()}
        self.kept_bytes = sum(
            tensor.untyped_storage().nbytes() for pointer, tensor in storages.items() if pointer not in shared
        )

    def _keep(self, tensor: Tensor) -> Tensor:
        if tensor.dim() > 0:  # cross entropy keeps the sum of its weights, one number
            self.saved.append(tensor)
        return tensor


def _norm_statistics_excess(layer: Layer, load: Load, precision: Dtype) -> int:
    """CPU keeps layer norm's two statistics per row in the dtype of the input, CUDA and the count in fp32."""
    norms = [op for op in layer.ops if isinstance(op, Norm) and op.kind == "layer" and op.y.name in layer.grad_values]
    return round(sum(op.x.rows.of(load) * op.groups * 2 * 2 for op in norms)) if precision == "bf16" else 0


def compare(model: Model, samples: tuple[Sample, ...], precision: Dtype) -> set[str]:
    """Asserts that all counts of all layers are exact; returns the kinds of layers seen."""
    scenario = scenario_of(model, precision, samples)
    graph, loads = build_graph(scenario), sample_loads(scenario, samples)
    batch = microbatch_of(scenario, samples)
    outputs: dict[str, Tensor] = {}
    for layer in graph.layers():
        load, own = loads[layer.module], scenario.precision_of(layer)
        module = build_layer(layer).to(DTYPES[own])
        inputs = {
            source.producer: outputs[source.producer].detach().clone().requires_grad_(source.value in layer.grad_values)
            for source in layer.sources
        }
        observed = _Observed(layer, module, batch, inputs)
        outputs[layer.id] = observed.output
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        assert parameters(layer) == sum(p.numel() for p in module.parameters()), layer.id
        assert trainable_parameters(layer) == sum(p.numel() for p in trained), layer.id
        assert layer.has_backward == observed.output.requires_grad, layer.id
        assert forward_flops(layer, load) == observed.forward_flops, layer.id
        assert dgrad_flops(layer, load) + wgrad_flops(layer, load) == observed.backward_flops, layer.id
        expected = kept_bytes(layer, load, own) - _norm_statistics_excess(layer, load, own)
        assert expected == observed.kept_bytes, layer.id
        assert all(p.grad is not None for p in trained), layer.id
    for edge in graph.edges():
        if edge.cuttable:
            assert edge_bytes(edge, loads, scenario.precision_of(edge)) == outputs[edge.producer].nbytes, edge.name
    return {layer.kind for layer in graph.layers()}
