"""Context parallelism: each of cp ranks has some rows of every packed microbatch of a language model, or each of all
ranks that share a stage some rows of the images of an encoder (patch groups).

Rows are cut into 2 cp equal chunks; a rank has one from the front and its counterpart from the back. What needs rows of
others gathers them.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mmplan.cost_models.values import rows_of_context_rank
from mmplan.runtime.attention import rope_table
from mmplan.runtime.network import all_reduce, gather
from mmplan.runtime.tensor_sums import Peers, TensorRanks


@dataclass(frozen=True, slots=True)
class Held:
    """Of each row the rank that has it, and as which of its `own` rows (as many on every rank)."""

    rank: Tensor
    at: Tensor
    own: int


@dataclass(frozen=True, slots=True)
class OwnRowsOf:
    """A rank's rows of `count`. Attributes: chunks: first and end of each, within the count; size: of a chunk."""

    count: int
    degree: int
    index: int

    @property
    def size(self) -> int:
        return rows_of_context_rank(self.count, self.degree) // 2

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        firsts = (self.index * self.size, (2 * self.degree - 1 - self.index) * self.size)
        return tuple((min(first, self.count), min(first + self.size, self.count)) for first in firsts)

    def take(self, rows: Tensor, fill: float = 0) -> Tensor:
        """This rank's of all rows; what lies behind their end is `fill`."""
        parts = []
        for first, end in self.chunks:
            part = rows[first:end]
            missing = (0, 0) * (rows.dim() - 1) + (0, self.size - (end - first))
            parts.append(F.pad(part, missing, value=fill) if missing[-1] else part)
        return torch.cat(parts)

    def held(self, rows: Tensor) -> Held:
        """Who has each of these rows."""
        chunk = rows // max(1, self.size)
        back = chunk >= self.degree
        rank = torch.where(back, 2 * self.degree - 1 - chunk, chunk)
        return Held(rank, rows - chunk * self.size + back * self.size, 2 * self.size)

    def among(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Which of these rows the rank has (their numbers in the list), and where among its own."""
        place = torch.full((self.count,), -1, dtype=torch.int64, device=positions.device)
        for number, (first, end) in enumerate(self.chunks):
            begin = number * self.size
            place[first:end] = torch.arange(begin, begin + end - first, device=positions.device)
        at = place.index_select(0, positions)
        mine = (at >= 0).nonzero().squeeze(1)
        return mine, at.index_select(0, mine)


def rows_of(lengths: Sequence[int], peers: Peers) -> OwnRowsOf:
    return OwnRowsOf(sum(lengths), peers.degree, peers.index)


class HasRows(Hashable, Protocol):
    """Which rows of a sequence a rank has."""

    def take(self, rows: Tensor) -> Tensor: ...


def rotate_own(x: Tensor, own: HasRows, lengths: Sequence[int], heads: int, dims: int | None) -> Tensor:
    """As `attention.rotate`, of a rank's rows."""
    whole = x.view(x.shape[0], heads, x.shape[1] // heads)
    still = whole.shape[2] - (dims or whole.shape[2])
    parts = whole[:, :, still:]
    cos, sin = _own_table(tuple(lengths), own, parts.shape[2], x.dtype, x.device)
    first, second = parts.chunk(2, dim=-1)
    rotated: Tensor = parts * cos + torch.cat((-second, first), dim=-1) * sin
    return (torch.cat((whole[:, :, :still], rotated), dim=-1) if still else rotated).view(x.shape)


@lru_cache(maxsize=16)
def _own_table(
    lengths: tuple[int, ...], own: HasRows, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    cos, sin = rope_table(lengths, head_dim, dtype, device)
    return own.take(cos), own.take(sin)


def whole_states(x: Tensor, lengths: Sequence[int], ranks: TensorRanks, peers: Peers) -> Tensor:
    """All rows of a language model's states, of which a rank has its own."""
    return gather_rows(x, rows_of(lengths, peers), ranks, peers)


def all_rows(x: Tensor, own: OwnRowsOf, ranks: TensorRanks, peers: Peers, *, backward: bool) -> Tensor:
    """All rows in their order, of which a rank has its own. Collective where there are rows."""
    if not own.count:
        return x
    everything = x.new_empty(own.degree * x.shape[0], x.shape[1])
    gather(everything, x.contiguous(), peers.group)
    ranks.count(everything, backward=backward)
    return everything.index_select(0, rank_order(own, x.device))


def among_all(x: Tensor, own: OwnRowsOf) -> Tensor:
    """A rank's rows at their places among all, zeros elsewhere."""
    everything = x.new_zeros(own.degree * x.shape[0], x.shape[1])
    everything[own.index * x.shape[0] : (own.index + 1) * x.shape[0]] = x
    return everything.index_select(0, rank_order(own, x.device))


def gather_rows(x: Tensor, own: OwnRowsOf, ranks: TensorRanks, peers: Peers) -> Tensor:
    """As `all_rows`, and what others did with a rank's rows enters their gradient."""
    if not own.count:
        return x
    result: Tensor = _GatherRows.apply(x, own, ranks, peers)  # type: ignore[no-untyped-call]
    return result


class _GatherRows(torch.autograd.Function):
    """All rows in their order; the gradient of a rank's rows is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: OwnRowsOf, ranks: TensorRanks, peers: Peers) -> Tensor:
        ctx.own, ctx.ranks, ctx.peers = own, ranks, peers
        return all_rows(x, own, ranks, peers, backward=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        own, ranks = ctx.own, ctx.ranks
        everything = gradients[0].new_zeros(own.degree * 2 * own.size, gradients[0].shape[1])
        everything.index_copy_(0, rank_order(own, gradients[0].device), gradients[0])
        all_reduce(everything, ctx.peers.group)
        ranks.count(everything, backward=True)
        rows = 2 * own.size
        return everything[own.index * rows : (own.index + 1) * rows], None, None, None


@lru_cache(maxsize=64)
def rank_order(own: OwnRowsOf, device: torch.device) -> Tensor:
    """Where each row lies among those of all ranks, rank by rank."""
    places = torch.empty(2 * own.degree * own.size, dtype=torch.int64)
    for rank in range(own.degree):
        for place, first in enumerate((rank * own.size, (2 * own.degree - 1 - rank) * own.size)):
            begin = (2 * rank + place) * own.size
            places[first : first + own.size] = torch.arange(begin, begin + own.size)
    return places[: own.count].to(device)
