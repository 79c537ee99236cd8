"""What two stages of a real model hand each other of a microbatch: outputs of units, as one row of bytes.

The replicas of every mesh split a microbatch's samples. Where a batch of a model can be cut nobody knows, so a
microbatch is made of parts that each replica of any mesh has a whole number of (`Plan.parts`): each is a batch of the
job, run alone, and what crosses between unlike meshes are the outputs of the parts that both ends have. Slices of them
are slices of elements (`runtime/crossing.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mmplan.errors import InputError
from mmplan.planner.mesh import overlap_index, partners, parts_with
from mmplan.planner.plan import Plan, module_of
from mmplan.planner.stage_graph import CutTensor
from mmplan.runtime.crossing import Crossing, crossing
from mmplan.runtime.ghost.flow import Source
from mmplan.runtime.ghost.recording import Recording
from mmplan.runtime.ghost.rows_of_units import RowsOfUnits
from mmplan.runtime.ghost.traffic import Owners, carried, payload
from mmplan.runtime.places import Place
from mmplan.runtime.tensor_sums import TensorRanks

Parts = Sequence[Recording]  # of a microbatch, those of one replica


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Handover:
    """One end of a tensor that the cut joins.

    Attributes:
        readers: layers of the stage that reads it.
        overlaps: how many parts in a row each replica of the other end has too.
        first: the place of the first of these overlaps among all of the two meshes.
        crossing: between unlike meshes, where more is done to it than to copy it.
        unlike: whether the meshes are.
        rows: of what blocks give each rank has some; None: all.
    """

    cut: CutTensor
    owners: Owners
    readers: frozenset[str]
    overlaps: tuple[int, ...]
    first: int
    crossing: Crossing | None
    unlike: bool
    rows: RowsOfUnits | None
    device: torch.device

    def sources(self, recording: Recording) -> tuple[Source, ...]:
        """Outputs that cross of a part."""
        return payload(recording, self.owners, self.cut.edge.producer, self.readers)

    def message_bytes(self, parts: Parts) -> list[int]:
        """Of the message to or from each replica of the other end.

        Raises:
            InputError: ranks have rows of what crosses.
        """
        for recording in parts if self.unlike else ():
            if split := next((s.unit for s in self.sources(recording) if s in recording.apart), None):
                raise InputError(
                    f"ranks of one replica have rows of what '{split}' gives to ranks of their own, which take what is "
                    "whole: set `constraints.cp: [1]` and no `sequence_parallel`, or take them out of "
                    "`constraints.modules`, and optimize again"
                )
        overlaps = self._by_overlap([self._bytes(recording) for recording in parts])
        if self.crossing is None:
            return overlaps
        width = self._dtype(parts).itemsize
        return [-(-size // width // self.crossing.slices) * width for size in overlaps]

    def handed(self, parts: Parts, outputs: Sequence[Sequence[Tensor]]) -> Tensor:
        """What this rank hands over of its outputs, part by part."""
        whole = _packed([output for part in outputs for output in part])
        if self.crossing is None:
            return whole
        return self.crossing.cut(self._elements(whole, parts), self._rows(parts)).view(-1).view(torch.uint8)

    def got(self, parts: Parts, came: Tensor | None, ranks: TensorRanks | None) -> list[dict[Source, Tensor]]:
        """The outputs of each part, in memory of their own. Collective over the ranks of the stage in a replica."""
        if self.crossing is not None and any(self._rows(parts)):
            own = self._elements(self._nothing() if came is None else came, parts)
            came = self.crossing.whole(own, self._rows(parts), ranks).view(-1).view(torch.uint8)
        return self._unpacked(parts, came)

    def returned(self, parts: Parts, gradients: Sequence[Sequence[Tensor]], ranks: TensorRanks | None) -> Tensor:
        """What this rank gives back of gradients, part by part. Collective like `got`."""
        whole = _packed([gradient for part in gradients for gradient in part])
        if self.crossing is None:
            return whole
        own = self.crossing.scattered(self._elements(whole, parts), self._rows(parts), ranks)
        return own.contiguous().view(-1).view(torch.uint8)

    def came_back(self, parts: Parts, came: Tensor | None, ranks: TensorRanks | None) -> list[dict[Source, Tensor]]:
        """The gradients of what was handed over, part by part. Collective like `got`."""
        if self.crossing is not None and any(self._rows(parts)):
            own = self._elements(self._nothing() if came is None else came, parts)
            came = self.crossing.placed(own, self._rows(parts), ranks).contiguous().view(-1).view(torch.uint8)
        return self._unpacked(parts, came)

    def shared_bytes(self, parts: Parts, *, gets: bool, backward: bool) -> int:
        """What this rank hands to collectives with those that share its stage."""
        if self.crossing is None or (backward and not self.cut.carries_grad):
            return 0
        rows, width = self._rows(parts), self._dtype(parts).itemsize
        told = self.crossing.told_bytes(rows, width) if gets != backward else 0
        return told + (self.crossing.joined_bytes(rows, width) if gets else 0)

    def _bytes(self, recording: Recording) -> int:
        return sum(carried(recording, source, self.rows).nbytes for source in self.sources(recording))

    def _by_overlap(self, of_parts: Sequence[int]) -> list[int]:
        ends = [0, *accumulate(self.overlaps)]
        return [sum(of_parts[first:end]) for first, end in pairwise(ends)]

    def _rows(self, parts: Parts) -> list[int]:
        """Elements of each overlap, which are what is cut into slices."""
        width = self._dtype(parts).itemsize
        return [size // width for size in self._by_overlap([self._bytes(recording) for recording in parts])]

    def _dtype(self, parts: Parts) -> torch.dtype:
        """Of all that crosses.

        Raises:
            InputError: there are several.
        """
        likes = {s: recording.like(s) for recording in parts for s in self.sources(recording)}
        dtypes = {like.dtype: source.unit for source, like in likes.items()}
        if len(dtypes) > 1:
            (first, one), (second, other) = list(dtypes.items())[:2]
            raise InputError(
                f"'{one}' gives {first} and '{other}' {second} to ranks of their own, which take slices of one type: "
                f"take '{module_of(self.cut.edge.producer)}' out of `constraints.modules` and optimize again"
            )
        return next(iter(dtypes), torch.uint8)

    def _elements(self, flat: Tensor, parts: Parts) -> Tensor:
        return flat.view(self._dtype(parts)).view(-1, 1)

    def _nothing(self) -> Tensor:
        """What a rank has got that the first of its tensor-parallel group tells."""
        assert self.crossing is not None and self.crossing.told_by_first, self.cut.activation
        return torch.empty(0, dtype=torch.uint8, device=self.device)

    def _unpacked(self, parts: Parts, flat: Tensor | None) -> list[dict[Source, Tensor]]:
        found, first = list[dict[Source, Tensor]](), 0
        flat = torch.empty(0, dtype=torch.uint8, device=self.device) if flat is None else flat  # nothing has bytes
        for recording in parts:
            part: dict[Source, Tensor] = {}
            for source in self.sources(recording):
                like = carried(recording, source, self.rows)
                end = first + like.nbytes
                part[source] = flat[first:end].clone().view(like.dtype).view(like.shape)
                first = end
            found.append(part)
        return found


def handover(
    plan: Plan,
    owners: Owners,
    cut: CutTensor,
    stage: int,
    at: Place,
    rows: RowsOfUnits | None,
    device: torch.device,
) -> Handover:
    """The end of a tensor at a rank's stage. Args: rows: how its units run on some."""
    border, is_source = plan.border(cut.activation, cut.source, cut.target), stage == cut.source
    own, other = (border.source, border.target)[:: 1 if is_source else -1]
    return Handover(
        cut=cut,
        owners=owners,
        readers=frozenset(plan.stages[cut.target].layers),
        overlaps=parts_with(at.replica, own, other, plan.parts),
        first=overlap_index(at.replica, own.dp, partners(at.replica, own, other)[0], other.dp),
        crossing=crossing(border, at.shard, is_source=is_source),
        unlike=own != other,
        rows=rows,
        device=device,
    )


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """One row of bytes; no copy where there is one tensor."""
    flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
