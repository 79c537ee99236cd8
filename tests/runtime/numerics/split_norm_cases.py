"""Norms and means over sequences that three processes share unevenly."""

from typing import Any

import torch
import torch.distributed as dist
from numerics_ranks import run_cases
from torch import Tensor, nn

from mmplan.kernels.segment_moments import segment_moments
from mmplan.runtime.numerics.collectives import gather_rows
from mmplan.runtime.numerics.modality_norm import ModalityNorm
from mmplan.runtime.numerics.sequence_chunks import DelayedMean, exact_mean, tokens_in_step

PROCESSES = 3
WIDTH = 6
MODALITIES = ("vision", "text")
CHUNKS = (7, 2, 11)  # tokens of each rank
STEPS = 6


def sequence() -> tuple[Tensor, Tensor, Tensor]:
    """x, the weights of its outputs [tokens, width], modalities [tokens] with padding (2); vision is far from text."""
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(sum(CHUNKS), WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    modality = torch.randint(0, 3, (sum(CHUNKS),), generator=generator)
    return torch.where((modality == 0)[:, None], 40 + 3 * x, x).float(), weights.float(), modality


def norm_of(kind: Any, over: Any, group: Any = None, columns: slice = slice(None)) -> ModalityNorm:
    generator = torch.Generator().manual_seed(1)
    norm = ModalityNorm(2, len(range(WIDTH)[columns]), kind=kind, over=over, group=group)
    for parameter in norm.parameters():
        parameter.data = torch.randn(2, WIDTH, generator=generator)[:, columns].clone()
    return norm


def run_norm(norm: ModalityNorm, x: Tensor, weights: Tensor, modality: Tensor) -> dict[str, Any]:
    x = x.clone().requires_grad_()
    y = norm(x, modality)
    (y * weights).sum().backward()
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, "parameters": [p.grad for p in norm.parameters()]}


def _norms(rank: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Columns split over ranks for statistics of tokens, tokens for those of modalities."""
    x, weights, modality = sequence()
    columns = slice(2 * rank, 2 * rank + 2)
    rows = [whole.split(CHUNKS)[rank] for whole in (x, weights, modality)]
    results = {}
    for kind in ("layer", "rms"):
        token = norm_of(kind, "token", dist.group.WORLD, columns)
        results[kind, "token"] = run_norm(token, x[:, columns], weights[:, columns], modality)
        results[kind, "modality"] = run_norm(norm_of(kind, "modality", dist.group.WORLD), *rows)
    return results


def _reductions(rank: int) -> dict[str, Any]:
    """Mean and standard deviation of each modality by several reductions, right ones and wrong ones."""
    x, _, modality = (whole.split(CHUNKS)[rank] for whole in sequence())
    own = segment_moments(x, modality, 2)
    moments = gather_rows(own[None], dist.group.WORLD)
    whole = own.clone()
    dist.all_reduce(whole)
    each = torch.stack([statistics(one) for one in moments])
    seen = (moments[..., 0] > 0)[..., None]
    return {
        "moments": moments,
        "right": statistics(whole),
        "global": statistics(whole.sum(0, keepdim=True)).expand(2, 2),
        "local": statistics(own),
        "mixed": statistics(own.sum(0, keepdim=True)).expand(2, 2),
        "mean": torch.where(seen, each, 0).sum(0) / seen.sum(0),
    }


def statistics(moments: Tensor) -> Tensor:
    """[..., 2]: mean and standard deviation."""
    count, total, squares = moments.double().unbind(-1)
    mean = total / count
    return torch.stack([mean, (squares / count - mean.square()).sqrt()], -1)


class Line(nn.Module):
    """Its gradients do not depend on its weights: sums over steps can be compared exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def tokens_of(step: int, rank: int) -> Tensor:
    """[own tokens, width]; now and then none."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    count = int(torch.randint(0, 9, (), generator=generator))
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64) + rank


def _means(rank: int) -> dict[str, Any]:
    exact, naive, delayed = [], [], []
    line, late = Line(), Line()
    mean = DelayedMean(late.parameters())
    for step in range(STEPS):
        tokens = tokens_of(step, rank)
        line.weight.grad = None
        loss = exact_mean(line(tokens).sum(), tokens_in_step(len(tokens)), averaged=True)
        loss.backward()
        exact.append(averaged(line.weight.grad))
        own = tokens.mean(0) if len(tokens) else torch.zeros(WIDTH, dtype=torch.float64)
        naive.append(averaged(own))
        late.weight.grad = own.clone() if len(tokens) else None
        mean.reduce_(len(tokens))
        delayed.append(late.weight.grad)
    mean.flush_()
    return {"exact": exact, "naive": naive, "delayed": delayed, "flushed": late.weight.grad}


def averaged(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    result = gradient.clone()
    dist.all_reduce(result)
    return result / PROCESSES


def run_split_norm_cases(rank: int, folder: str) -> None:
    run_cases(rank, folder, PROCESSES, {"norms": _norms, "reductions": _reductions, "means": _means})
