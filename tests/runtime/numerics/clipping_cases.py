"""Gradients of one model as four processes hold them, in several layouts, clipped there."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from numerics_ranks import run_cases
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from mmplan.runtime.numerics.clipping import clip_gradients_
from mmplan.runtime.numerics.global_norm import token_norms
from mmplan.runtime.numerics.sharing import Sharing
from mmplan.runtime.numerics.spectral import SpectralClipping

PROCESSES = 4
SHAPES = {
    "vision.0": (7, 5),
    "vision.norm": (5,),
    "text.embedding": (9, 5),
    "text.0": (6, 8),
    "text.norm": (8,),
    "text.experts": (8, 3, 3),
    "head": (4, 4),
}
THRESHOLDS = {"vision": 2.0, "text": 3.0}
TOTAL = 5.0
STEPS = 50


class Held(nn.Module):
    """Parameters with given gradients, by name."""

    def __init__(self, gradients: dict[str, Tensor]) -> None:
        super().__init__()
        for name, gradient in gradients.items():
            parameter = nn.Parameter(torch.zeros_like(gradient))
            parameter.grad = gradient
            self.register_parameter(name.replace(".", "_"), parameter)

    def of(self, modality: str) -> list[nn.Parameter]:
        return [p for name, p in self.named_parameters() if name.startswith(modality)]

    def sharing(self, **options: Any) -> Sharing:
        return Sharing(self, {"vision": self.of("vision"), "text": self.of("text")}, **options)

    def give(self, gradients: dict[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            parameter = self.get_parameter(name.replace(".", "_"))
            parameter.grad = gradient.to(parameter.dtype)


def whole_gradients(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@cache
def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(str(axis) for axis in range(len(sizes))))


Layout = Callable[[dict[str, Tensor], int], tuple[dict[str, Tensor], dict[str, Any]]]


def _fsdp(gradients: dict[str, Tensor], rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    mesh = mesh_of(4)
    return {name: distribute_tensor(g, mesh, [Shard(0)]) for name, g in gradients.items()}, {}


def _hybrid(gradients: dict[str, Tensor], rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    mesh = mesh_of(2, 2)
    return {name: distribute_tensor(g, mesh, [Replicate(), Shard(0)]) for name, g in gradients.items()}, {}


def _fsdp_and_tp(gradients: dict[str, Tensor], rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Norms are replicated over tp, and the gradient of one of them is a sum still to be made."""
    mesh = mesh_of(2, 2)
    held = {
        name: distribute_tensor(g, mesh, [Shard(0), Shard(1) if g.dim() > 1 else Replicate()])
        for name, g in gradients.items()
    }
    half = gradients["text.norm"].chunk(2)[mesh.get_coordinate()[0]] / 2
    held["text.norm"] = DTensor.from_local(half, mesh, [Shard(0), Partial()])
    return held, {}


def _pipeline_and_tp(gradients: dict[str, Tensor], rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Plain tensors: two stages of two ranks; both stages have the embedding; norms are whole on both ranks of one."""
    stage, index = divmod(rank, 2)
    names = ("vision.0", "vision.norm", "text.embedding") if stage == 0 else tuple(SHAPES)[2:]
    held = {}
    for name in names:
        gradient = gradients[name]
        held[name] = gradient.clone() if gradient.dim() == 1 else gradient.tensor_split(2)[index].clone()
    copies = {"vision_norm": 2, "text_norm": 2, "text_embedding": 2}
    return held, {"group": dist.group.WORLD, "copies": lambda name: copies.get(name, 1)}


def _experts(gradients: dict[str, Tensor], rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Two experts on each rank, everything else on all of them."""
    held = {name: g.chunk(4)[rank].clone() if "experts" in name else g.clone() for name, g in gradients.items()}
    return held, {"group": dist.group.WORLD, "copies": lambda name: 1 if "experts" in name else 4}


def _tp_in_stages(gradients: dict[str, Tensor], rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """DTensors of meshes of two ranks, in two stages that a group joins."""
    stages = (("vision.0", "vision.norm"), tuple(SHAPES)[2:])
    mesh = mesh_of(2, 2)["1"]
    own = {name: gradients[name] for name in stages[rank // 2]}
    held = {n: distribute_tensor(g, mesh, [Shard(0) if g.dim() > 1 else Replicate()]) for n, g in own.items()}
    return held, {"group": dist.group.WORLD}


LAYOUTS: dict[str, Layout] = {
    "FSDP": _fsdp,
    "HSDP": _hybrid,
    "FSDP and TP": _fsdp_and_tp,
    "pipeline and TP of plain tensors": _pipeline_and_tp,
    "experts": _experts,
    "TP in stages": _tp_in_stages,
}


def _local(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: g.to_local().clone() if isinstance(g, DTensor) else g.clone() for name, g in gradients.items()}


def _clipped(rank: int) -> dict[str, Any]:
    results = {}
    for name, layout in LAYOUTS.items():
        held, options = layout(whole_gradients(), rank)
        before, model = _local(held), Held(held)
        norms = clip_gradients_(model.sharing(**options), THRESHOLDS, total=TOTAL)
        after = _local({name: model.get_parameter(name.replace(".", "_")).grad for name in held})  # type: ignore[misc]
        results[name] = {"norms": norms, "before": before, "after": after}
    return results


def spectral(layout: Layout | None, rank: int) -> dict[str, float]:
    """The thresholds after some steps."""
    clipping: SpectralClipping | None = None
    for step in range(STEPS):
        gradients = whole_gradients(step)
        held, options = (gradients, {}) if layout is None else layout(gradients, rank)
        if clipping is None:
            model = Held(held)
            clipping = SpectralClipping(model.sharing(**options))
        model.give(held)
        clipping.clip_()
    assert clipping is not None
    return clipping.thresholds()


def _spectral(rank: int) -> dict[str, dict[str, float]]:
    return {name: spectral(LAYOUTS[name], rank) for name in ("FSDP and TP", "pipeline and TP of plain tensors")}


def tokens() -> tuple[Tensor, Tensor]:
    """Gradients [tokens, width] and their modalities; 2 is padding."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(101, 7, generator=generator), torch.randint(0, 3, (101,), generator=generator)


def _tokens(rank: int) -> Tensor:
    gradient, modality = (whole.tensor_split(PROCESSES)[rank] for whole in tokens())
    return token_norms(gradient, modality, 2)


def run_clipping_cases(rank: int, folder: str) -> None:
    run_cases(rank, folder, PROCESSES, {"clipped": _clipped, "spectral": _spectral, "tokens": _tokens})
