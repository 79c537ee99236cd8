"""Sums over the ranks of a tensor-parallel group, and what autograd has to know of them.

A vocabulary is split over the ranks by token id: each rank looks up the ids it has, and the loss needs three numbers
for each row from the others (Megatron-LM, arXiv 1909.08053, section 3). Autograd keeps what the cost model counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mmplan.cost_models.layer import Layer, splits_rows
from mmplan.cost_models.shard import Shard
from mmplan.runtime.network import all_reduce
from mmplan.scenario.technique import ContextParallel


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """This rank's place among those over which a layer's experts lie, whole experts on each of `degree` of them.

    Attributes:
        tp: ranks that share each expert, 1 or those of the tensor-parallel group.
        group: the `degree` ranks that have the same part of experts.
        replicas: the ranks that hold the same experts; None: no other one does.
    """

    degree: int
    tp: int
    index: int
    group: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None


@dataclass(frozen=True, slots=True)
class Peers:
    """This rank's place among the `degree` ranks of a group."""

    degree: int
    index: int
    group: dist.ProcessGroup | None


@dataclass(slots=True)
class TensorRanks:
    """This rank's place among the `degree` ranks of its tensor-parallel group.

    `experts`: where these lie on more ranks. `context`: ranks with other rows of language models; `context_parallel`:
    how keys and values of rows come together; `width`: all that share a stage in one replica. `sequence`: modules of
    whose values each rank has rows where it does not have columns. `spread`: modules that each rank has whole, of which
    it takes some images or clips, or in the blocks of `patches` some rows of all; `stage`: all ranks that have these,
    those of all replicas. `copies`: by their number the neighbours that hold one key head. `forward_bytes`,
    `backward_bytes`: of tensors handed to sums, gathers, exchanges and the next rank since the start, by the pass they
    belong to.
    """

    degree: int
    index: int
    group: dist.ProcessGroup | None
    experts: ExpertRanks | None = None
    context: Peers | None = None
    width: Peers | None = None
    context_parallel: ContextParallel = "ring"
    sequence: tuple[str, ...] = ()
    spread: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    stage: dist.ProcessGroup | None = None
    copies: Mapping[int, dist.ProcessGroup | None] = field(default_factory=dict)
    forward_bytes: int = 0
    backward_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.forward_bytes + self.backward_bytes

    def shard(self, layer: Layer) -> Shard:
        """What of the layer is on a rank."""
        if layer.module in self.spread:
            return Shard(cp=1 if self.width is None or not self.has_patches(layer) else self.width.degree)
        splits = self.context is not None and splits_rows(layer)
        cp = self.context.degree if self.context is not None and splits else 1
        sequence = layer.module in self.sequence
        if self.experts is None or not layer.has_experts:
            return Shard(tp=self.degree, cp=cp, sequence=sequence)
        return Shard(tp=self.degree, ep=self.experts.degree, etp=self.experts.tp, cp=cp, sequence=sequence)

    def has_patches(self, layer: Layer) -> bool:
        """Whether a rank has some rows of the layer's images, as `Layout.has_patches`."""
        return layer.kind in ("block", "projector") and layer.module in self.patches

    def peers(self, layer: Layer) -> Peers:
        """Ranks with other rows of the layer, where it has any."""
        peers = self.width if self.has_patches(layer) else self.context
        assert peers is not None
        return peers

    def copies_of(self, count: int) -> dist.ProcessGroup | None:
        """So many neighbours, this rank among them."""
        return self.group if count == self.degree else self.copies[count]

    def reduce(self, tensor: Tensor, *, backward: bool = False, largest: bool = False) -> None:
        """Sum (or maximum) over the ranks, in place; nothing is sent where there are no rows."""
        if tensor.numel() == 0:
            return
        all_reduce(tensor, self.group, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        self.count(tensor, backward=backward)

    def count(self, tensor: Tensor, *, backward: bool) -> None:
        """Take down a tensor that was exchanged."""
        if backward:
            self.backward_bytes += tensor.nbytes
        else:
            self.forward_bytes += tensor.nbytes


def sum_parts(x: Tensor, ranks: TensorRanks) -> Tensor:
    """The sum of all ranks' `x`, written over it; the gradient passes as it is."""
    result: Tensor = _SumParts.apply(x, ranks)  # type: ignore[no-untyped-call]
    return result


def sum_gradients(x: Tensor, ranks: TensorRanks) -> Tensor:
    """`x` itself; its gradient is summed over the ranks."""
    result: Tensor = _SumGradients.apply(x, ranks)  # type: ignore[no-untyped-call]
    return result


def look_up(ids: Tensor, table: Tensor, ranks: TensorRanks) -> Tensor:
    """Rows of a table of which this rank has the `index`-th part: ids [tokens], table [local ids, width]."""
    result: Tensor = _LookUp.apply(ids, table, ranks)  # type: ignore[no-untyped-call]
    return result


def split_cross_entropy(logits: Tensor, labels: Tensor, size: int, ranks: TensorRanks) -> Tensor:
    """Sum of cross entropies over the rows with a label, in fp32.

    Args:
        logits: [rows, local columns], this rank's part of all columns; those from `size` on do not exist.
        labels: [rows], -100 where there is no loss.
    """
    result: Tensor = _SplitCrossEntropy.apply(logits, labels, size, ranks)  # type: ignore[no-untyped-call]
    return result


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.mark_dirty(x)
        ranks.reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradients[0] is None:  # of a weight whose gradient is postponed
            return None, None
        total = gradients[0].clone(memory_format=torch.contiguous_format)  # others may read this gradient too
        ctx.ranks.reduce(total, backward=True)
        return total, None


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.first = table.shape, ranks.index * table.shape[0]
        own, rows = _own(ids, ctx.first, table.shape[0])
        found = F.embedding(rows, table) * own.unsqueeze(1)
        ranks.reduce(found)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), (gradient,) = ctx.saved_tensors, gradients
        own, rows = _own(ids, ctx.first, ctx.shape[0])
        of_table = gradient.new_zeros(ctx.shape).index_add_(0, rows[own], gradient[own])
        return None, of_table, None


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, size: int, ranks: TensorRanks) -> Tensor:
        width = logits.shape[1]
        ctx.first, ctx.dtype = ranks.index * width, logits.dtype
        existing = max(0, min(width, size - ctx.first))
        wide = logits.float()
        if existing < width:
            wide = F.pad(wide[:, :existing], (0, width - existing), value=-torch.inf)
        largest = wide.amax(1)
        ranks.reduce(largest, largest=True)
        shifted = wide - largest.unsqueeze(1)
        own, columns = _own(labels, ctx.first, width)
        of_label = shifted.gather(1, columns.unsqueeze(1)).squeeze(1).masked_fill(~own, 0.0)
        weights = shifted.exp_()
        totals = torch.stack((weights.sum(1), of_label))
        ranks.reduce(totals)
        ctx.save_for_backward(weights.div_(totals[0].unsqueeze(1)), labels)
        return ((totals[0].log() - totals[1]) * (labels >= 0)).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, labels = ctx.saved_tensors
        own, columns = _own(labels, ctx.first, probabilities.shape[1])
        gradient = probabilities * (labels >= 0).unsqueeze(1)
        rows = own.nonzero().squeeze(1)
        gradient[rows, columns[rows]] -= 1.0
        return gradient.mul_(gradients[0]).to(ctx.dtype), None, None, None


def _own(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Whether each id is one of the `count` from `first` on, and its place there (0 for others)."""
    own = (ids >= first) & (ids < first + count)
    return own, torch.where(own, ids - first, 0)
