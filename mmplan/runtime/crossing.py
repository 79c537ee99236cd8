"""Rows of tensors between stages of unlike meshes: what a rank has of them, hands over, gets and shares.

A tensor is one part for each replica of the other mesh that has some of it. Where a side has cp, or the way is slices,
the rows of a part are cut into equal slices, the last one filled up with zeros, and each rank hands over or gets some
of them (`planner/mesh.py`, `planner/border.py`). What a rank got it shares over tp, as a gather of slices or a
broadcast of the first one's; readers then gather over cp, or give each row to the rank that has its place. What came
back to cp ranks is a part of their gradient, zeros elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmplan.cost_models.graph import Edge
from mmplan.planner.border import SHARED, Border, Way
from mmplan.planner.mesh import edge_rows, slices
from mmplan.runtime.batch import Microbatch
from mmplan.runtime.context import Held
from mmplan.runtime.network import broadcast, gather, scatter_sum
from mmplan.runtime.placed_rows import returned, row_moves, taken
from mmplan.runtime.tensor_sums import TensorRanks


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """A rank's side of a border between two meshes. Attributes: slices: of the rows of a part; others: replicas of the
    other mesh; degree, index: of this rank over cp; tp, tp_index: over tp."""

    slices: int
    others: int
    degree: int
    index: int
    tp: int = 1
    tp_index: int = 0
    way: Way = "copies"

    def part_rows(self, edge: Edge, batch: Microbatch) -> list[int]:
        """Rows of each part of a tensor."""
        return [round(edge_rows(edge, load)) for load in batch.parts[self.others]]

    @property
    def told_by_first(self) -> bool:
        """Whether this rank gets nothing from other meshes, and all from the first of its tensor-parallel group."""
        return self.way == "broadcast" and self.tp_index > 0

    def cut(self, whole: Tensor, rows: Sequence[int]) -> Tensor:
        """This rank's slices of all rows, filled up, part by part."""
        return self._own_share(self._cut(whole, rows, self.index), rows)

    def held(self, rows: Sequence[int]) -> Held:
        """Of each row the cp rank that has it."""
        rank, at, first = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)], 0
        for count, size in zip(rows, self._sizes(rows), strict=True):
            rank.append(torch.arange(count) // max(1, size))
            at.append(first + torch.arange(count) % max(1, size))
            first += size
        return Held(torch.cat(rank), torch.cat(at), first)

    def scattered(
        self, partial: Tensor, rows: Sequence[int], ranks: TensorRanks | None, needed_by: Tensor | None = None
    ) -> Tensor:
        """The same of the sum over the cp ranks. Collective where there are rows.

        Args:
            needed_by: of each row the cp rank that reads it; None: all do.
        """
        context = None if ranks is None else ranks.context
        if needed_by is not None and ranks is not None and context is not None:
            return returned(partial, row_moves(self.held(rows), needed_by, context), ranks, context)
        if context is None or ranks is None or not sum(rows):
            return self.cut(partial, rows)
        everything = torch.cat([self._cut(partial, rows, index) for index in range(self.degree)])
        own = everything.new_empty(everything.shape[0] // self.degree, everything.shape[1])
        assert context.group is not None
        scatter_sum(own, everything, context.group)
        ranks.count(everything, backward=True)
        return self._own_share(own, rows)

    def whole(
        self, own: Tensor, rows: Sequence[int], ranks: TensorRanks | None, needed_by: Tensor | None = None
    ) -> Tensor:
        """All rows, of which every cp rank has got its slices; zeros in those that other ranks need by `needed_by`.
        Collective where there are rows."""
        if needed_by is not None and ranks is not None and ranks.context is not None:
            return taken(own, row_moves(self.held(rows), needed_by, ranks.context), ranks, ranks.context)
        own, context = self._shared(own, rows, ranks, backward=False), None if ranks is None else ranks.context
        if context is None or ranks is None or not sum(rows):
            return self._joined(own, rows)
        everything = own.new_empty(self.degree * own.shape[0], own.shape[1])
        gather(everything, own.contiguous(), context.group)
        ranks.count(everything, backward=False)
        return self._joined(everything, rows)

    def placed(self, own: Tensor, rows: Sequence[int], ranks: TensorRanks | None) -> Tensor:
        """The rows of a gradient that this rank and those beside it over tp have got, zeros elsewhere. Collective where
        there are rows."""
        own = self._shared(own, rows, ranks, backward=True)
        count = own.shape[0]
        return self._joined(F.pad(own, (0, 0, self.index * count, (self.degree - 1 - self.index) * count)), rows)

    def told_bytes(self, rows: Sequence[int], row_bytes: int) -> int:
        """What this rank hands to the gather or broadcast of rows that its tensor-parallel group has got."""
        return 0 if self.way not in SHARED or self.tp == 1 else row_bytes * sum(self._sizes(rows))

    def joined_bytes(self, rows: Sequence[int], row_bytes: int) -> int:
        """What it hands to the gather over cp of rows to read, and to the sum of their gradient."""
        return 0 if self.degree == 1 else row_bytes * self.degree * sum(self._sizes(rows))

    def _shared(self, own: Tensor, rows: Sequence[int], ranks: TensorRanks | None, *, backward: bool) -> Tensor:
        """What the ranks of the tensor-parallel group have got together."""
        if self.way not in SHARED or self.tp == 1 or ranks is None or not sum(rows):
            return own
        sizes = self._sizes(rows)
        together = own.new_empty(sum(sizes), own.shape[1])
        if self.way == "broadcast":
            if not self.told_by_first:
                together.copy_(own)
            broadcast(together, ranks.group)
        else:
            gather(together, own.contiguous(), ranks.group)
        ranks.count(together, backward=backward)
        if self.way == "broadcast":
            return together
        return torch.cat(_by_part(together, [size // self.tp for size in sizes]))

    def _own_share(self, piece: Tensor, rows: Sequence[int]) -> Tensor:
        """Of the slices that the tensor-parallel group hands over together those of this rank."""
        if self.way != "slices" or self.tp == 1:
            return piece
        sizes = self._sizes(rows)
        parts = zip(torch.split(piece, sizes), sizes, strict=True)
        return torch.cat([part.narrow(0, size // self.tp * self.tp_index, size // self.tp) for part, size in parts])

    def _sizes(self, rows: Sequence[int]) -> list[int]:
        """Rows that a cp rank has of each part."""
        return [self.slices // self.degree * -(-count // self.slices) for count in rows]

    def _cut(self, whole: Tensor, rows: Sequence[int], index: int) -> Tensor:
        pieces = []
        for part, size in zip(torch.split(whole, list(rows)), self._sizes(rows), strict=True):
            own = part[index * size : (index + 1) * size]
            pieces.append(F.pad(own, (0, 0, 0, size - own.shape[0])))
        return torch.cat(pieces)

    def _joined(self, everything: Tensor, rows: Sequence[int]) -> Tensor:
        """From the slices of all cp ranks, rank by rank, to parts, and without what fills them up."""
        sizes = self._sizes(rows)
        if not sum(sizes):
            return everything
        return torch.cat([part[:count] for part, count in zip(_by_part(everything, sizes), rows, strict=True)])


def _by_part(everything: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """From what ranks have, rank by rank, to parts, of which each has as many rows as `sizes` say."""
    by_rank = [torch.split(own, list(sizes)) for own in torch.split(everything, sum(sizes))]
    return [torch.cat(pieces) for pieces in zip(*by_rank, strict=True)]


def crossing(border: Border, shard: int, *, is_source: bool) -> Crossing | None:
    """Of a rank on one side of a border; None where tensors pass as they are."""
    own, other = (border.source, border.target)[:: 1 if is_source else -1]
    cut = slices(*border.seen)
    if own == other or (cut == 1 and (border.way not in SHARED or own.tp == 1)):
        return None
    return Crossing(
        slices=cut,
        others=other.dp,
        degree=own.cp,
        index=shard // own.tp,
        tp=own.tp,
        tp_index=shard % own.tp,
        way=border.way,
    )
