"""What modules return whose images ranks take in turn, made whole; and the bytes of that, told from a recording."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmplan.runtime.ghost.recording import Joined, Recording
from mmplan.runtime.ghost.returning import returning_calls
from mmplan.runtime.network import all_reduce, gather_rows
from mmplan.runtime.tensor_sums import Peers, TensorRanks


@dataclass(frozen=True, slots=True)
class ImageRanks:
    """The ranks that take images of `modules` in turn; `ranks` counts what they exchange."""

    modules: tuple[str, ...]
    ranks: TensorRanks
    peers: Peers

    def whole(self, joined: Joined, own: Sequence[Tensor], slots: Sequence[int]) -> tuple[Tensor, ...]:
        """Outputs of all images, of which each rank has its part. Their gradients are alike on tp ranks, and summed
        over cp ranks. Collective."""
        result: tuple[Tensor, ...] = _Joined.apply(self, joined, slots, *own)  # type: ignore[no-untyped-call]
        return result


def joins_of(recording: Recording, own: Set[str], *, computes_loss: bool) -> dict[tuple[str, int], list[int]]:
    """Module and call -> outputs that some units, or the loss, are made of, in order."""
    readers = [call for call in recording.calls if call.unit in own] + ([recording.loss] if computes_loss else [])
    found: dict[tuple[str, int], list[int]] = {}
    for whole in sorted({whole for call in readers for whole in call.joined}):
        found.setdefault((whole.unit, whole.call), []).append(whole.slot)
    return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageSums:
    """Of one stage (see `StageSums`). units: of the stage; trained: names of parameters of the whole model."""

    model: nn.Module
    units: Set[str]
    trained: Set[str]
    computes_loss: bool
    over_cp: bool

    @property
    def exchanging(self) -> Set[str]:
        """None: what is made whole is so between units."""
        return frozenset()

    def forward_bytes(self, recording: Recording) -> int:
        return sum(self._bytes(recording, key, slots) for key, slots in self._joins(recording).items())

    def backward_bytes(self, recording: Recording) -> int:
        returning = self.returning(recording) if self.over_cp else set()
        return sum(
            self._bytes(recording, key, slots)
            for key, slots in self._joins(recording).items()
            if any((s.unit, s.call) in returning for slot in slots for s in recording.joined[key].reads[slot])
        )

    def returning(self, recording: Recording) -> Set[tuple[str, int]]:
        return returning_calls(recording, self.model, self.trained)

    def _joins(self, recording: Recording) -> Mapping[tuple[str, int], list[int]]:
        return joins_of(recording, self.units, computes_loss=self.computes_loss)

    def _bytes(self, recording: Recording, key: tuple[str, int], slots: Sequence[int]) -> int:
        return sum(recording.joined[key].output.leaves[slot].nbytes for slot in slots)


def own_parts(result: Any, slots: Sequence[int]) -> list[Tensor]:
    """Of what a module returned for a rank's images."""
    leaves = tree_leaves(result)
    return [leaves[slot] for slot in slots]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, at: ImageRanks, joined: Joined, slots: Sequence[int], *own: Tensor) -> tuple[Tensor, ...]:
        ctx.at, ctx.deal, ctx.slots, ctx.rows = at, joined.deal, slots, [len(part) for part in own]
        result = []
        for slot, part in zip(slots, own, strict=True):
            kept = part if joined.deal.keeps else part[:0]
            result.append(gather_rows(kept, joined.deal.counts[slot], at.peers.group))
            at.ranks.count(result[-1], backward=False)
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        at, own = ctx.at, []
        for slot, gradient, rows in zip(ctx.slots, gradients, ctx.rows, strict=True):
            total = gradient
            if at.ranks.context is not None:
                total = gradient.clone(memory_format=torch.contiguous_format)
                all_reduce(total, at.ranks.context.group)
                at.ranks.count(total, backward=True)
            first = sum(ctx.deal.counts[slot][: at.peers.index])
            part = total[first : first + rows] if ctx.deal.keeps else total.new_zeros(rows, *total.shape[1:])
            own.append(part)
        return None, None, None, *own
