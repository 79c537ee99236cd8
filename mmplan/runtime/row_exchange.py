"""Rows that go from rank to rank, each to those that need it and to no others (an all-to-all)."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mmplan.runtime.network import all_to_all


def exchanged_rows(
    own: Tensor,
    leaving: Sequence[Tensor],
    arriving: Sequence[Tensor],
    count: int,
    here: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Rows `leaving[peer]` of one's own go to each peer; what comes is added into `count` rows, at `arriving[peer]`.
    What stays on this rank (`here`) is not sent. Collective."""
    away = [rows if peer != here else rows[:0] for peer, rows in enumerate(leaving)]
    come = [rows if peer != here else rows[:0] for peer, rows in enumerate(arriving)]
    sent = own.index_select(0, torch.cat(away).to(own.device))
    received = own.new_empty(sum(map(len, come)), *own.shape[1:])
    all_to_all(received, sent, list(map(len, come)), list(map(len, away)), group)
    result = own.new_zeros(count, *own.shape[1:])
    result.index_add_(0, torch.cat(come).to(own.device), received)
    stays = own.index_select(0, leaving[here].to(own.device))
    return result.index_add_(0, arriving[here].to(own.device), stays)
