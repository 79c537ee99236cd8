"""Rows of tensors between stages of unlike meshes where one has cp: what a rank of it has, hands over and gets.

A tensor is one part for each replica of the other mesh that has some of it. The rows of a part are cut into equal
slices, the last one filled up with zeros, and each cp rank hands over or gets some of them (`planner/mesh.py`). Readers
gather the slices; what came back to cp ranks is a part of their gradient, zeros elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmplan.cost_models.graph import Edge
from mmplan.planner.mesh import Mesh, edge_rows, slices
from mmplan.runtime.batch import Microbatch
from mmplan.runtime.network import gather, scatter_sum
from mmplan.runtime.tensor_sums import TensorRanks


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """A rank's side of a border between two meshes. Attributes: slices: of the rows of a part; others: replicas of the
    other mesh; degree, index: of this rank over cp."""

    slices: int
    others: int
    degree: int
    index: int

    def part_rows(self, edge: Edge, batch: Microbatch) -> list[int]:
        """Rows of each part of a tensor."""
        return [round(edge_rows(edge, load)) for load in batch.parts[self.others]]

    def cut(self, whole: Tensor, rows: Sequence[int]) -> Tensor:
        """This rank's slices of all rows, filled up, part by part."""
        return self._cut(whole, rows, self.index)

    def scattered(self, partial: Tensor, rows: Sequence[int], ranks: TensorRanks | None) -> Tensor:
        """The same of the sum over the cp ranks. Collective where there are rows."""
        context = None if ranks is None else ranks.context
        if context is None or ranks is None or not sum(rows):
            return self.cut(partial, rows)
        everything = torch.cat([self._cut(partial, rows, index) for index in range(self.degree)])
        own = everything.new_empty(everything.shape[0] // self.degree, everything.shape[1])
        assert context.group is not None
        scatter_sum(own, everything, context.group)
        ranks.count(everything, backward=True)
        return own

    def whole(self, own: Tensor, rows: Sequence[int], ranks: TensorRanks | None) -> Tensor:
        """All rows, of which every cp rank has got its slices. Collective where there are rows."""
        context = None if ranks is None else ranks.context
        if context is None or ranks is None or not sum(rows):
            return self._joined(own, rows)
        everything = own.new_empty(self.degree * own.shape[0], own.shape[1])
        gather(everything, own.contiguous(), context.group)
        ranks.count(everything, backward=False)
        return self._joined(everything, rows)

    def placed(self, own: Tensor, rows: Sequence[int]) -> Tensor:
        """This rank's slices among all rows, zeros elsewhere."""
        count = own.shape[0]
        return self._joined(F.pad(own, (0, 0, self.index * count, (self.degree - 1 - self.index) * count)), rows)

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
        by_rank = [torch.split(own, sizes) for own in torch.split(everything, sum(sizes))]
        by_part = zip(zip(*by_rank, strict=True), rows, strict=True)
        return torch.cat([torch.cat(pieces)[:count] for pieces, count in by_part])


def crossing(own: Mesh, other: Mesh, shard: int) -> Crossing | None:
    """Of a rank in `own`; None where tensors pass as they are."""
    cut = slices(own, other)
    if own == other or cut == 1:
        return None
    return Crossing(slices=cut, others=other.dp, degree=own.cp, index=shard // own.tp)
