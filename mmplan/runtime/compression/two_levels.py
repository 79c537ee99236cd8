"""Means over two levels of ranks: dense sums inside a node, where links are fast, messages across nodes (X8).

Each rank of a node sends a part of each tensor across, so that a tensor crosses once for each node.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from mmplan.runtime.compression.feedback import ErrorFeedback
from mmplan.runtime.compression.wire import Wire


class TwoLevels:
    """`feedback` averages over the ranks of the same place in all nodes; its wire counts what crosses."""

    def __init__(self, inside: dist.ProcessGroup, feedback: ErrorFeedback) -> None:
        self.feedback, self.wire = feedback, Wire()
        self._inside, self._ranks = inside, dist.get_world_size(inside)

    def average(self, tensors: Mapping[str, Tensor]) -> None:
        """In place, alike on all ranks of all nodes. Collective over both groups."""
        if not tensors:
            return
        parts = [-(-tensor.numel() // self._ranks) for tensor in tensors.values()]
        whole = torch.cat([self._rows(tensor) for tensor in tensors.values()], dim=1)
        own = self.wire.scatter_sum(whole, self._inside) / self._ranks
        self.feedback.average(dict(zip(tensors, torch.split(own, parts), strict=True)))
        everything = self.wire.gather(own, self._inside)
        for tensor, part in zip(tensors.values(), torch.split(everything, parts, dim=1), strict=True):
            tensor.copy_(part.flatten()[: tensor.numel()].view(tensor.shape))

    def _rows(self, tensor: Tensor) -> Tensor:
        """fp32 [ranks, elements of a part], zeros at the end."""
        flat = tensor.detach().flatten().float()
        return pad(flat, (0, -flat.numel() % self._ranks)).view(self._ranks, -1)
