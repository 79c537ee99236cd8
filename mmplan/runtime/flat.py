"""Tensors of many shapes in one flat buffer, which ranks share equally; its memory may be given back between uses."""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from mmplan.runtime.checkpoint.boxes import Box, boxes_of_range
from mmplan.runtime.network import all_reduce, gather, scatter_sum


class FlatBuffer:
    """Room for tensors of the shapes of `parameters`, one behind the other.

    Attributes:
        whole: `[elements]`, with zeros at the end so that it has `shares` equal shares.
        views: the slice of each parameter in its shape.
    """

    def __init__(self, parameters: Sequence[Parameter], dtype: torch.dtype, shares: int = 1) -> None:
        count = sum(p.numel() for p in parameters)
        device = parameters[0].device if parameters else torch.device("cpu")
        self.whole = torch.zeros(math.ceil(count / shares) * shares, dtype=dtype, device=device)
        ends = tuple(accumulate(p.numel() for p in parameters))
        self.views = tuple(
            self.whole[end - p.numel() : end].view_as(p) for end, p in zip(ends, parameters, strict=True)
        )

    @property
    def held_bytes(self) -> int:
        """Memory in use now."""
        return self.whole.untyped_storage().nbytes()

    def share(self, replicas: dist.ProcessGroup) -> Tensor:
        """This rank's share."""
        size = self.whole.numel() // replicas.size()
        return self.whole[size * replicas.rank() :][:size].detach()

    def shared(self, replicas: dist.ProcessGroup) -> Iterator[tuple[int, Box, slice]]:
        """What is in this rank's share, by box: index of the parameter, a box of it, and its elements in the share."""
        size = self.whole.numel() // replicas.size()
        first, start = size * replicas.rank(), 0
        for index, view in enumerate(self.views):
            inside = max(0, first - start)
            place = start + inside - first
            for box in boxes_of_range(view.shape, inside, min(view.numel(), first + size - start)):
                yield index, box, slice(place, place + box.count)
                place += box.count
            start += view.numel()

    def sum(self, replicas: dist.ProcessGroup) -> int:
        """Sum over the ranks; returns the bytes. Collective."""
        all_reduce(self.whole, replicas)
        return self.whole.nbytes

    def gather(self, own: Tensor, replicas: dist.ProcessGroup) -> int:
        """Fill the buffer with the shares of all ranks; returns its bytes. Collective."""
        gather(self.whole, own.detach(), replicas)
        return self.whole.nbytes

    def scatter_sum(self, replicas: dist.ProcessGroup) -> int:
        """Sum over the ranks, of which each gets the sum of its share, in place; returns the bytes. Collective."""
        scatter_sum(self.share(replicas), self.whole, replicas)
        return self.whole.nbytes

    def release(self) -> None:
        """Give the memory back; views stay and are valid again after `restore`."""
        self.whole.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Memory again, of any content."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)
