"""Contrastive losses of three processes with unlike numbers of pairs, one of them with none."""

from typing import Any

import torch
import torch.distributed as dist
from numerics_ranks import run_cases
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from mmplan.runtime.numerics.contrastive import info_nce, siglip
from mmplan.runtime.numerics.gradient_cache import Tower, cached_backward

PROCESSES = 3
WIDTH = 5
COUNTS = {"even": (4, 4, 4), "uneven": (5, 3, 4), "a rank without pairs": (5, 0, 7)}
SETTINGS = [
    (loss, counts, exchange) for loss in ("info_nce", "siglip") for counts in COUNTS for exchange in ("gather", "ring")
]


def features(seed: int, rows: int = 12, dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return nn.functional.normalize(drawn, dim=1)


def loss_of(name: str, x: Tensor, y: Tensor, scale: Tensor, exchange: Any = "gather", averaged: bool = False) -> Tensor:
    if name == "info_nce":
        return info_nce(x, y, scale, averaged=averaged, exchange=exchange)
    return siglip(x, y, scale, -2.0, averaged=averaged, exchange=exchange)


def derivatives(loss: Tensor, inputs: list[Tensor], directions: list[Tensor]) -> dict[str, Any]:
    """The first derivatives, and those of their product with the directions."""
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    along = sum((g * v).sum() for g, v in zip(first, directions, strict=True))
    second = torch.autograd.grad(along, inputs)
    return {"loss": loss.item(), "first": [g.detach() for g in first], "second": list(second)}


def _sharded(rank: int) -> dict[tuple[str, str, str], dict[str, Any]]:
    results = {}
    for loss, counts, exchange in SETTINGS:
        x, y, v, w = (features(seed).split(COUNTS[counts])[rank] for seed in range(4))
        inputs = [x.requires_grad_(), y.requires_grad_(), torch.tensor(7.0, dtype=torch.float64, requires_grad=True)]
        value = loss_of(loss, inputs[0], inputs[1], inputs[2], exchange)
        results[loss, counts, exchange] = derivatives(value, inputs, [v, w, torch.tensor(0.3)])
    return results


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def largest_tensor(rows: int, exchange: Any) -> int:
    """Of loss, gradient and Hessian-vector product."""
    x, y = (features(seed, rows).requires_grad_() for seed in (0, 1))
    with LargestTensor() as largest:
        derivatives(info_nce(x, y, 7.0, averaged=False, exchange=exchange), [x, y], [x, y])
    return largest.elements


def kept_elements(rows: int, exchange: Any) -> int:
    """That autograd keeps between loss and backward, each storage once."""
    x, y = (features(seed, rows).requires_grad_() for seed in (0, 1))
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = info_nce(x, y, 7.0, averaged=False, exchange=exchange)
    assert loss.requires_grad
    return sum(kept.values())


def _largest(rank: int) -> dict[str, tuple[int, int]]:
    return {exchange: (largest_tensor(64, exchange), kept_elements(64, exchange)) for exchange in ("gather", "ring")}


def tower(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()


def attentive(weight: Tensor, tokens: Tensor) -> Tensor:
    """Features [samples, width] of samples [samples, tokens, width] by one attention with one weight."""
    projected = tokens @ weight
    with sdpa_kernel(SDPBackend.MATH):
        mixed = nn.functional.scaled_dot_product_attention(projected, projected, tokens)
    return nn.functional.normalize(mixed.mean(1), dim=1)


def attention_product(rows: slice | Tensor, weights: list[Tensor], directions: list[Tensor], sharded: bool) -> Any:
    """Loss, gradients and Hessian-vector product in the weights of two encoders with attention."""
    tokens = [features(seed, 36).view(12, 3, WIDTH)[rows] for seed in (20, 21)]
    x, y = (attentive(weight, own) for weight, own in zip(weights, tokens, strict=True))
    return derivatives(info_nce(x, y, 7.0, averaged=sharded), weights, directions)


def attention_weights() -> tuple[list[Tensor], list[Tensor]]:
    weights = [features(seed, WIDTH).requires_grad_() for seed in (30, 31)]
    return weights, [features(seed, WIDTH) for seed in (32, 33)]


def _plainly_gathered(rank: int) -> dict[str, Any]:
    """InfoNCE on features that `dist.all_gather` has gathered, which has no derivative; the own ones put back."""
    x, y, v, w = (features(seed).split(COUNTS["even"])[rank] for seed in range(4))
    inputs = [x.requires_grad_(), y.requires_grad_()]
    whole = []
    for own in inputs:
        parts = [torch.empty_like(own) for _ in range(PROCESSES)]
        dist.all_gather(parts, own.detach())
        parts[rank] = own
        whole.append(torch.cat(parts))
    labels = torch.arange(4) + 4 * rank
    shares = [nn.functional.cross_entropy(7 * a @ b.T, labels) for a, b in zip(inputs, whole[::-1], strict=True)]
    return derivatives(sum(shares) / (2 * PROCESSES), inputs, [v, w])


def _attention(rank: int) -> Any:
    return attention_product(torch.arange(12).split(COUNTS["uneven"])[rank], *attention_weights(), sharded=True)


def _cached_under_ddp(rank: int) -> dict[str, Tensor]:
    modules = [tower(10), tower(11)]
    wrapped = [DistributedDataParallel(module) for module in modules]
    data = [features(seed).split(COUNTS["uneven"])[rank] for seed in (0, 1)]
    towers = [
        Tower(encode=ddp, chunks=rows.split(2), without_sync=ddp.no_sync)
        for ddp, rows in zip(wrapped, data, strict=True)
    ]
    cached_backward(towers, lambda x, y: info_nce(x, y, 7.0, averaged=True))
    return {f"{i}.{name}": p.grad for i, m in enumerate(modules) for name, p in m.named_parameters()}


def run_contrastive_cases(rank: int, folder: str) -> None:
    cases = {
        "sharded": _sharded,
        "largest": _largest,
        "cached under DDP": _cached_under_ddp,
        "attention": _attention,
        "plainly gathered": _plainly_gathered,
    }
    run_cases(rank, folder, PROCESSES, cases)
