"""What is measured: a model as layers with parameters, and its data as forwards whose samples are of known modalities.

The loss of a branch, that is of a modality m on one batch of samples, is the training loss over the samples of the
batch that contain m: for each loss of the model the sum over the targets of these samples divided by their number, and
of several losses the sum. A sample contains vision (audio) when it has an image (a clip), text when it has text tokens;
in most data that is all of them, and the branch of text is then the whole loss. A layer has a value in the branches of
the modalities that reach it: those of its own module and of all modules before it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmplan.cost_models.graph import ComputationGraph
from mmplan.errors import InputError
from mmplan.units import format_bytes

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outputs:
    """Of one forward: `losses`, sums over its targets, by name; `logits`, what these are computed of, by name, None
    where the model does not show them."""

    losses: Mapping[str, Tensor]
    logits: Mapping[str, Tensor] | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """Samples that are computed together, all of the same modalities.

    Attributes:
        run: the forward.
        targets: what the losses are sums over, by name.
    """

    run: Callable[[], Outputs]
    targets: Mapping[str, float]
    modalities: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Subject:
    """
    Attributes:
        layers: layer id -> its parameters, in the order of the graph; each parameter once.
        names: parameter -> its name in the model.
        frozen: layers of which no parameter is trained.
        branches: layer id -> the modalities it has a value for.
        batch: number of a batch -> its forwards; the same each time.
        source: what the data is, in words.
    """

    model: nn.Module
    layers: Mapping[str, tuple[nn.Parameter, ...]]
    names: Mapping[nn.Parameter, str]
    frozen: frozenset[str]
    branches: Mapping[str, tuple[str, ...]]
    batch: Callable[[int], Sequence[Piece]]
    source: str
    device: torch.device


def reaching_modalities(graph: ComputationGraph) -> dict[str, tuple[str, ...]]:
    """Layer id -> modalities of its own module and of all before it, in the order of the graph."""
    found: dict[str, dict[str, None]] = {}
    for layer in graph.layers():
        own: dict[str, None] = {}
        for before in graph.predecessors(layer.id):
            own |= found[before]
        found[layer.id] = own | {layer.modality: None}
    return {layer: tuple(modalities) for layer, modalities in found.items()}


def require_memory(parameters: int, device: torch.device) -> None:
    """InputError where fp32 weights alone are more than the whole memory: each process has them all."""
    if device.type == "cuda":
        _, whole_bytes = torch.cuda.mem_get_info(device)
    else:
        whole_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed_bytes = parameters * _FP32_BYTES
    if needed_bytes > whole_bytes:
        raise InputError(
            f"{parameters:,} parameters in fp32 are {format_bytes(needed_bytes)}, and this {device.type} has "
            f"{format_bytes(whole_bytes)}: each process holds the whole model; measure a smaller one of the family"
        )


def own_parameters(modules: Mapping[str, Sequence[nn.Parameter]]) -> dict[str, tuple[nn.Parameter, ...]]:
    """Layer -> parameters that no earlier layer has, so that a tied head counts to its table; no layer without any."""
    seen: set[int] = set()
    layers: dict[str, tuple[nn.Parameter, ...]] = {}
    for layer, parameters in modules.items():
        fresh = {id(p): p for p in parameters if id(p) not in seen and p.numel()}
        seen |= fresh.keys()
        if fresh:
            layers[layer] = tuple(fresh.values())
    return layers
