"""What ranks say to each other, over NCCL or gloo. Tensors of a GPU go through host memory where gloo carries them.

gloo is for processes on CPUs, and for several processes on one GPU, which NCCL refuses (`execute --share-devices`).
Of tensors on a GPU gloo takes no messages and not all collectives, so they are copied here.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mmplan.runtime.thread_group import ThreadGroup

# Renamed in torch 2.13, which warns of the old names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def through_host(device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Whether tensors of the device are copied to the host on their way."""
    return device.type != "cpu" and dist.get_backend(group) == "gloo"


def _carried(tensor: Tensor) -> Tensor:
    """Moved as bytes where the type is one: gloo carries no booleans and no 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """In place. Collective."""
    if isinstance(group, ThreadGroup):
        of_all = torch.stack(group.exchanged(tensor))
        tensor.copy_(of_all.sum(0) if op == dist.ReduceOp.SUM else of_all.amax(0))
    elif through_host(tensor.device, group):
        host = tensor.cpu()
        dist.all_reduce(host, op=op, group=group)
        tensor.copy_(host)
    else:
        dist.all_reduce(tensor, op=op, group=group)


def gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill `whole` with the shares of all ranks. Collective."""
    whole, own = _carried(whole), _carried(own)
    if isinstance(group, ThreadGroup):
        whole.copy_(torch.stack(group.exchanged(own)).view(whole.shape))
    elif through_host(whole.device, group):
        host = torch.empty(whole.shape, dtype=whole.dtype)
        _gather(host, own.cpu(), group=group)
        whole.copy_(host)
    else:
        _gather(whole, own, group=group)


def gather_rows(own: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """All ranks' rows, of which each has its count, in rank order. Collective where there are rows."""
    if not sum(counts):
        return own
    padded = own.new_zeros(max(counts), *own.shape[1:])
    padded[: own.shape[0]] = own
    everything = own.new_empty(len(counts) * max(counts), *own.shape[1:])
    gather(everything, padded, group)
    pieces = zip(torch.split(everything, max(counts)), counts, strict=True)
    return torch.cat([rows[:count] for rows, count in pieces])


def broadcast(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """The first rank's tensor, in place on the others. Collective."""
    if through_host(tensor.device, group):
        host = tensor.cpu()
        dist.broadcast(host, group=group, group_src=0)
        tensor.copy_(host)
    else:
        dist.broadcast(tensor, group=group, group_src=0)


def gather_text(own: str | None, group: dist.ProcessGroup | None) -> list[str | None]:
    """What every rank says. Collective."""
    if isinstance(group, ThreadGroup):
        return group.exchanged(own)
    told: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, own, group=group)
    return told


def scatter_sum(own: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> None:
    """`own` becomes this rank's share of the sum of all ranks' `whole`. Collective."""
    if isinstance(group, ThreadGroup):
        own.copy_(torch.stack(group.exchanged(whole)).sum(0).view(group.size(), *own.shape)[group.rank()])
    elif through_host(whole.device, group):
        host = torch.empty(own.shape, dtype=own.dtype)
        _scatter(host, whole.cpu(), group=group)
        own.copy_(host)
    else:
        _scatter(own, whole, group=group)


def all_to_all(
    received: Tensor, sent: Tensor, rows: list[int] | None, sent_rows: list[int] | None, group: dist.ProcessGroup | None
) -> None:
    """Rows of `sent` to each rank, those of `received` from each; None: equally many. Collective."""
    received, sent = _carried(received), _carried(sent)
    if isinstance(group, ThreadGroup):
        parts = group.exchanged((sent, sent_rows or [len(sent) // group.size()] * group.size()))
        received.copy_(torch.cat([torch.split(rows, counts)[group.rank()] for rows, counts in parts]))
    elif through_host(received.device, group):
        host = torch.empty(received.shape, dtype=received.dtype)
        dist.all_to_all_single(host, sent.cpu(), rows, sent_rows, group=group)
        received.copy_(host)
    else:
        dist.all_to_all_single(received, sent, rows, sent_rows, group=group)


@dataclass(slots=True)
class Message:
    """A tensor that is under way; `there` waits and gives it on the device it is for.

    `held` is what the library reads or writes. NCCL lets the device's stream wait, gloo this thread.
    """

    held: Tensor
    device: torch.device
    work: dist.Work

    def there(self) -> Tensor:
        self.work.wait()
        return self.held.to(self.device)

    def left(self) -> bool:
        return self.work.is_completed()


def post_receive(size: int, device: torch.device, peer: int, group: dist.ProcessGroup | None, tag: int) -> Message:
    """Room for `size` bytes from `peer`."""
    where = torch.device("cpu") if through_host(device, group) else device
    buffer = torch.empty(size, dtype=torch.uint8, device=where)
    return Message(held=buffer, device=device, work=_posted(dist.irecv(buffer, peer, group=group, tag=tag)))


def post_send(flat: Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> Message:
    """Start to send bytes; a copy to the host waits until they have been computed."""
    held = flat.cpu() if through_host(flat.device, group) else flat
    return Message(held=held, device=flat.device, work=_posted(dist.isend(held, peer, group=group, tag=tag)))


@dataclass(slots=True)
class Passing:
    """What is under way around a ring of ranks; `there` waits for what comes, and until this rank's own has left."""

    received: list[Tensor]
    sent: list[Tensor]
    device: torch.device
    works: list[dist.Work]

    def there(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        return tuple(tensor.to(self.device) for tensor in self.received)


def pass_on(parts: Sequence[Tensor], group: dist.ProcessGroup) -> Passing:
    """Start to send this rank's tensors to the next rank, and to receive those of the one before. Collective."""
    if isinstance(group, ThreadGroup):
        of_all = group.exchanged(tuple(parts))
        return Passing(list(of_all[group.rank() - 1]), [], parts[0].device, [])
    rank, size, device = dist.get_rank(group), dist.get_world_size(group), parts[0].device
    after, before = (dist.get_global_rank(group, (rank + by) % size) for by in (1, -1))
    sent = [part.cpu() if through_host(device, group) else part.contiguous() for part in parts]
    received = [torch.empty_like(part) for part in sent]
    # NCCL would have both sends of a pair wait for each other, where they are not one batch with what is received.
    operations = [dist.P2POp(dist.isend, part, after, group, tag) for tag, part in enumerate(sent)]
    operations += [dist.P2POp(dist.irecv, part, before, group, tag) for tag, part in enumerate(received)]
    return Passing(received, sent, device, dist.batch_isend_irecv(operations))


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the group it sends to"
    return work


def connect(pairs: Collection[tuple[int, int]], rank: int, device: torch.device, group: dist.ProcessGroup) -> None:
    """Let every pair of ranks meet once, in one order on all of them; collective.

    NCCL sets up a pair at its first message and holds both hosts meanwhile. In a step a rank would first post what it
    receives last, and three ranks could wait for each other in a circle.
    """
    for low, high in sorted({(min(pair), max(pair)) for pair in pairs}):
        if rank == low:
            send(torch.zeros(1, dtype=torch.uint8, device=device), high, group)
            receive(1, device, high, group)
        elif rank == high:
            receive(1, device, low, group)
            send(torch.zeros(1, dtype=torch.uint8, device=device), low, group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def send(flat: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    post_send(flat, peer, group, 0).work.wait()


def receive(size: int, device: torch.device, peer: int, group: dist.ProcessGroup) -> Tensor:
    return post_receive(size, device, peer, group, 0).there()
