"""Sequence parallelism: of what tensor parallelism does not split along width each of its ranks has as many rows
(Megatron, arXiv 2205.05198, section 4.2.2).

Products gather the rows that they read, for their result and, when gradients of weights need them, once more: between
the two a rank keeps its own. The last rank's rows are filled up with zeros, which nobody else ever sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmplan.cost_models.values import rows_of_sequence_rank
from mmplan.runtime.context import OwnRowsOf
from mmplan.runtime.exchange import join_rows, own_rows
from mmplan.runtime.head_linears import HeadLinear
from mmplan.runtime.network import gather, scatter_sum
from mmplan.runtime.tensor_sums import TensorRanks, sum_gradients
from mmplan.runtime.weight_store import Postponed


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """A rank's rows of `count`; `context`: these are the rows of a cp rank, which fill up its own chunks."""

    count: int
    degree: int
    index: int
    context: OwnRowsOf | None = None

    @property
    def size(self) -> int:
        return rows_of_sequence_rank(self.count, self.degree)

    @property
    def ends(self) -> tuple[int, int]:
        """First and end of those that are there."""
        return min(self.index * self.size, self.count), min((self.index + 1) * self.size, self.count)

    def take(self, rows: Tensor) -> Tensor:
        """This rank's of all rows of a sequence; what lies behind their end is zero."""
        rows = rows if self.context is None else self.context.take(rows)
        return self.filled(rows[slice(*self.ends)])

    def filled(self, part: Tensor) -> Tensor:
        return F.pad(part, (0, 0) * (part.dim() - 1) + (0, self.size - part.shape[0]))


class WholeRows:
    """All rows of a value of which each rank has its own, gathered once more for the weights of its `readers`."""

    def __init__(self, rows: SequenceRows, ranks: TensorRanks, readers: int) -> None:
        self.rows, self._ranks, self._readers = rows, ranks, readers
        self._whole: Tensor | None = None
        self._left = 0

    def of(self, own: Tensor) -> Tensor:
        """The gradient of a rank's rows is their part of the sum over the ranks."""
        if not own.is_floating_point():
            return _gathered(own, self.rows, self._ranks, backward=False)
        result: Tensor = _GatherRows.apply(own, self.rows, self._ranks)  # type: ignore[no-untyped-call]
        return result

    def again(self, own: Tensor) -> Tensor:
        """The same in a backward, for one reader after the other."""
        if self._whole is None:
            self._whole, self._left = _gathered(own, self.rows, self._ranks, backward=True), self._readers
        whole, self._left = self._whole, self._left - 1
        if not self._left:
            self._whole = None
        return whole


def linear_of_rows(linear: nn.Linear | HeadLinear, whole: Tensor, own: Tensor, rows: WholeRows) -> Tensor:
    """`linear(whole)`, of which autograd keeps `own`, the rank's rows."""
    weights = linear.weights_for(whole) if isinstance(linear, HeadLinear) else (linear.weight, linear.bias)
    result: Tensor = _LinearOfRows.apply(whole, *weights, own.detach(), rows, linear)  # type: ignore[no-untyped-call]
    return result


def sum_to_rows(x: Tensor, rows: SequenceRows, ranks: TensorRanks) -> Tensor:
    """This rank's rows of the sum of all ranks' `x`; gradients are gathered."""
    result: Tensor = _SumToRows.apply(x, rows, ranks)  # type: ignore[no-untyped-call]
    return result


def cut_rows(x: Tensor, rows: SequenceRows, ranks: TensorRanks) -> Tensor:
    """This rank's rows of what all ranks have alike, as their gradients then are."""
    return rows.filled(own_rows(x, ranks))


def whole_rows(x: Tensor, rows: SequenceRows, ranks: TensorRanks) -> Tensor:
    """All rows for operators that all ranks run alike: a rank's gradient is that of its rows."""
    first, end = rows.ends
    return join_rows(x[: end - first], rows.count, ranks)


def with_summed_weights(module: nn.Module, inputs: Sequence[Tensor], ranks: TensorRanks) -> Tensor:
    """`module(*inputs)` of a rank's rows: gradients of the weights are summed over the ranks."""
    shared = {name: sum_gradients(value, ranks) for name, value in module.named_parameters()}
    result: Tensor = torch.func.functional_call(module, shared, tuple(inputs))
    return result


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: SequenceRows, ranks: TensorRanks) -> Tensor:
        ctx.rows, ctx.ranks = rows, ranks
        return _gathered(own, rows, ranks, backward=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _scattered(gradients[0], ctx.rows, ctx.ranks, backward=True), None, None


class _SumToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: SequenceRows, ranks: TensorRanks) -> Tensor:
        ctx.rows, ctx.ranks = rows, ranks
        return _scattered(x, rows, ranks, backward=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(gradients[0], ctx.rows, ctx.ranks, backward=True), None, None


class _LinearOfRows(torch.autograd.Function):
    """x W^T + b; the weight's gradient may be postponed (`weight_store.py`)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, own: Tensor, rows: WholeRows, linear: nn.Module
    ) -> Tensor:
        ctx.save_for_backward(own, weight)
        ctx.rows, ctx.linear = rows, linear
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (own, weight), gradient = ctx.saved_tensors, gradients[0]
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        postponed = ctx.linear.forward
        if isinstance(postponed, Postponed) and postponed.store.takes(
            ctx.linear, own, gradient, bias=ctx.needs_input_grad[2], whole=ctx.rows.again
        ):
            return of_x, None, None, None, None, None
        of_weight = gradient.t() @ ctx.rows.again(own)
        of_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias, None, None, None


def _gathered(own: Tensor, rows: SequenceRows, ranks: TensorRanks, *, backward: bool) -> Tensor:
    if not rows.count:
        return own
    everything = own.new_empty(rows.degree * rows.size, *own.shape[1:])
    gather(everything, own.contiguous(), ranks.group)
    ranks.count(everything, backward=backward)
    return everything[: rows.count]


def _scattered(whole: Tensor, rows: SequenceRows, ranks: TensorRanks, *, backward: bool) -> Tensor:
    if not rows.count:
        return whole
    everything = whole.new_zeros(rows.degree * rows.size, whole.shape[1])
    everything[: rows.count] = whole
    own = whole.new_empty(rows.size, whole.shape[1])
    scatter_sum(own, everything, ranks.group)
    ranks.count(everything, backward=backward)
    return own
