"""The mean over a sequence that lies in chunks on several ranks: what averaging their means does, and what is exact.

With n_r of S tokens on rank r of R and g_r the gradient of that chunk's own mean loss, the gradient wanted is
sum_r (n_r / S) g_r, and averaging gives sum_r (1 / R) g_r. The bias, exactly:

    sum_r (1 / R - n_r / S) g_r

which is -(R / S) times the covariance over ranks of n_r and g_r. It is 0 for even chunks, and its expectation is 0
where lengths do not depend on what tokens say; then the noise grows by (S / R^2) sum_r 1 / n_r. An article's
n_r (R - 1) / (2 S) is not 0 for even chunks, where there is no bias. The same holds for R micro-batches in turn.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from mmplan.runtime.numerics.collectives import Group, place_in, reduce_, total_loss
from mmplan.runtime.numerics.sharing import held


def averaging_bias(counts: Sequence[int], gradients: Sequence[Tensor]) -> Tensor:
    """What averaging adds to the gradient.

    Args:
        counts: tokens of each chunk that have a loss.
        gradients: of each chunk's own mean loss; of a chunk without tokens, zeros.
    """
    total = _total(counts)
    pairs = zip(counts, gradients, strict=True)
    parts = [(1 / len(counts) - count / total) * gradient for count, gradient in pairs]
    return torch.stack(parts).sum(0)


def token_weights(counts: Sequence[int]) -> tuple[float, ...]:
    """How much a token of each chunk counts under averaging, 1 being right: S / (R n_r); of an empty chunk 0."""
    total = _total(counts)
    return tuple(total / (len(counts) * count) if count else 0.0 for count in counts)


def noise_ratio(counts: Sequence[int]) -> float:
    """Variance of the averaged gradient over that of the exact one, for independent gradients of tokens."""
    return _total(counts) / len(counts) ** 2 * sum(1 / count for count in counts if count)


def _total(counts: Sequence[int]) -> int:
    if sum(counts) == 0 or min(counts) < 0:
        raise ValueError(f"chunks of {list(counts)} tokens")
    return sum(counts)


def tokens_in_step(own: int | Tensor, group: Group = None, device: torch.device | None = None) -> Tensor:
    """Tokens with a loss on all ranks of the group, in all micro-batches if `own` counts these; at least 1.

    Args:
        device: of the sum, a GPU for NCCL; None: that of `own`, or the CPU.
    """
    return reduce_(torch.as_tensor(own, dtype=torch.float64, device=device).clone(), group).clamp(min=1)


def exact_mean(loss_sum: Tensor, total: Tensor, *, averaged: bool, group: Group = None) -> Tensor:
    """The mean loss over all tokens, differentiated exactly for uneven chunks.

    Args:
        loss_sum: of the own tokens.
        total: `tokens_in_step`.
        averaged: gradients of parameters are averaged over the group afterwards (DDP, FSDP) rather than summed.
    """
    return total_loss(loss_sum / total.to(loss_sum.dtype), group, averaged=averaged)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A step whose number of tokens is on its way: the own gradients as averaged, and the own tokens."""

    gradients: dict[Parameter, Tensor]
    tokens: int
    total: Tensor
    work: dist.Work | None


class DelayedMean:
    """Averages gradients of chunks' own means, and makes up for the bias of a step `delay` steps later.

    Nobody then waits for the number of tokens of a step: its sum travels while later steps run. The corrections of a
    step, (R n_r / S - 1) g_r on each rank, are added to the gradients of a later one, so that all gradients together
    are the exact ones but for the last `delay` corrections, which `flush_` gives. Holds `delay` copies of gradients.
    """

    def __init__(self, parameters: Iterable[Parameter], *, group: Group = None, delay: int = 2) -> None:
        if delay < 0:
            raise ValueError(f"a delay of {delay} steps")
        self._parameters, self._group, self._delay = tuple(parameters), group, delay
        self._waiting: deque[_Waiting] = deque()

    def reduce_(self, tokens: int) -> None:
        """Of gradients of the mean loss over `tokens` own tokens make averages over the group; collective."""
        own = {p: p.grad.detach().clone() for p in self._parameters if p.grad is not None}
        total, work = torch.tensor(float(tokens), dtype=torch.float64, device=self._parameters[0].device), None
        if place_in(self._group)[1] > 1:
            work = dist.all_reduce(total, group=self._group, async_op=True)
        self._waiting.append(_Waiting(own, tokens, total, work))
        if len(self._waiting) > self._delay:
            self._correct(self._waiting.popleft())
        self._average()

    def flush_(self) -> None:
        """Make `.grad` what corrections are left, averaged over the group, for one last step of the optimizer."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        while self._waiting:
            self._correct(self._waiting.popleft())
        self._average()

    def _correct(self, step: _Waiting) -> None:
        if step.work is not None:
            step.work.wait()
        total = step.total.item()
        excess = place_in(self._group)[1] * step.tokens / total - 1 if total else 0.0
        for parameter, gradient in step.gradients.items():
            parameter.grad = (
                gradient * excess if parameter.grad is None else parameter.grad.add_(gradient, alpha=excess)
            )

    def _average(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:  # the others wait for this rank's part
                parameter.grad = torch.zeros_like(parameter)
            reduce_(held(parameter.grad), self._group).div_(place_in(self._group)[1])
