"""The scenario's model as one plain torch module that also runs alone in one process.

Weights are a function of (seed, layer id), so a rank that builds only its stage, or its part of each layer, holds
exactly the weights of the whole model. A head that is tied reads the table of its module; without that it has a copy.
"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.shard import Shard
from mmplan.cost_models.ties import table_of
from mmplan.runtime.batch import Microbatch
from mmplan.runtime.dtypes import TORCH_DTYPES
from mmplan.runtime.layers import build_layer
from mmplan.runtime.tensor_parallel import split_layer
from mmplan.runtime.tensor_sums import TensorRanks


class MultimodalModel(nn.Module):
    """The given layers of a graph.

    Args:
        layers: in topological order; all layers of the graph, or those of one stage.
        precision: `fp32`, `bf16` or `fp16`: dtype of weights and activations where modules have none of their own.
        ranks: who shares the layers with this rank; None: they are whole.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        graph: ComputationGraph,
        *,
        precision: str,
        seed: int,
        device: torch.device,
        ranks: TensorRanks | None = None,
    ) -> None:
        super().__init__()
        self.device = device
        self._order = tuple(layers)
        self._reads = {layer.id: tuple(graph.predecessors(layer.id)) for layer in layers}
        dtypes = {layer.id: TORCH_DTYPES[layer.precision or precision] for layer in layers}
        # Layer by layer, so that no process ever holds its whole stage in fp32 on the host.
        modules = {_key(layer.id): _seeded_layer(layer, seed, ranks).to(device, dtypes[layer.id]) for layer in layers}
        self.layers = nn.ModuleDict(modules)
        for layer in layers:
            table = table_of(layer)
            if table is not None:
                known = modules.get(_key(table))
                if known is None:
                    known = _seeded_layer(graph.layer(table), seed, ranks).to(device, dtypes[layer.id])
                head = modules[_key(layer.id)].get_submodule("parts.head")
                head.register_parameter("weight", known.get_parameter("parts.table.weight"))

    def layer(self, layer_id: str) -> nn.Module:
        """The module of one layer: `module(inputs by producer layer id, microbatch) -> Tensor`."""
        module: nn.Module = self.layers[_key(layer_id)]
        return module

    def forward(self, batch: Microbatch) -> dict[str, Tensor]:
        """Losses by module, each the sum over this microbatch divided by the targets of the global batch."""
        values: dict[str, Tensor] = {}
        losses: dict[str, Tensor] = {}
        for layer in self._order:
            inputs = {producer: values[producer] for producer in self._reads[layer.id]}
            values[layer.id] = self.layer(layer.id)(inputs, batch)
            if layer.kind == "loss":
                losses[layer.module] = values[layer.id]
        return losses


def module_path(layer_id: str) -> str:
    """Of a layer's module in the model."""
    return f"layers.{_key(layer_id)}"


def _key(layer_id: str) -> str:
    return layer_id.replace(".", "_")  # module names may not contain dots


def _seeded_layer(layer: Layer, seed: int, ranks: TensorRanks | None) -> nn.Module:
    """torch's own initialisation under a generator seeded by the layer id; frozen weights require no gradient."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(f"{seed}/{layer.id}".encode()))
        whole = build_layer(layer)
        return whole if ranks is None or ranks.shard(layer) == Shard() else split_layer(whole, ranks)
