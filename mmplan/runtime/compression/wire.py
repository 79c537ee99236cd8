"""Collectives that count what they carry: bytes handed in, and bytes that this rank sends to others."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from mmplan.runtime.network import all_reduce, all_to_all, gather, scatter_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """Of one kind of collective so far.

    Attributes:
        payload_bytes: in the tensors that this rank handed in.
        sent_bytes: that this rank sends, in the fewest that a ring or direct messages can do with: all-gather
            (ranks - 1) payloads, reduce-scatter and all-to-all (ranks - 1) / ranks of it, all-reduce twice that.
    """

    calls: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0


@dataclass(slots=True)
class Wire:
    """What one rank's collectives carried, by kind."""

    carried: dict[str, Carried] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> int:
        return sum(kind.sent_bytes for kind in self.carried.values())

    @property
    def payload_bytes(self) -> int:
        return sum(kind.payload_bytes for kind in self.carried.values())

    def gather(self, own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """[ranks, *own]: every rank's tensor."""
        ranks = dist.get_world_size(group)
        everything = own.new_empty(ranks, *own.shape)
        if own.numel():
            gather(everything.view(-1), own.contiguous().view(-1), group)
        self._count("all-gather", own.nbytes, (ranks - 1) * own.nbytes)
        return everything

    def sum(self, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        """In place."""
        ranks = dist.get_world_size(group)
        if tensor.numel():
            all_reduce(tensor, group)
        self._count("all-reduce", tensor.nbytes, 2 * (ranks - 1) * tensor.nbytes // ranks)

    def scatter_sum(self, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        """[ranks, n] of each rank -> [n], this rank's row of the sum."""
        own = torch.empty_like(whole[0])
        if own.numel():
            scatter_sum(own, whole.view(-1), group)
        self._count("reduce-scatter", whole.nbytes, (whole.shape[0] - 1) * own.nbytes)
        return own

    def swap(self, rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """[ranks, n], a row for each rank -> [ranks, n], a row from each."""
        received = torch.empty_like(rows)
        if rows.numel():
            all_to_all(received, rows, None, None, group)
        self._count("all-to-all", rows.nbytes, (rows.shape[0] - 1) * rows[0].nbytes)
        return received

    def _count(self, kind: str, payload_bytes: int, sent_bytes: int) -> None:
        so_far = self.carried.get(kind, Carried())
        self.carried[kind] = Carried(
            calls=so_far.calls + 1,
            payload_bytes=so_far.payload_bytes + payload_bytes,
            sent_bytes=so_far.sent_bytes + sent_bytes,
        )
