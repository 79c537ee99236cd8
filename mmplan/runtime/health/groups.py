"""Statistics over the right ranks: sums and means over a group, and norms of parameters however they are sharded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Groups:
    """Who holds what. `replicas`: ranks with other data and the same model (DDP, FSDP); `shards`: ranks that share
    layers by heads or columns without DTensors; `stages`: ranks of one pipeline. None: this rank alone."""

    replicas: dist.ProcessGroup | None = None
    shards: dist.ProcessGroup | None = None
    stages: dist.ProcessGroup | None = None

    @property
    def collective(self) -> bool:
        return any(group is not None for group in (self.replicas, self.shards, self.stages))


def summed(
    numbers: Sequence[float], group: dist.ProcessGroup | None, device: torch.device | None = None
) -> list[float]:
    """Sums over a group; collective."""
    if group is None:
        return list(numbers)
    tensor = torch.tensor(list(numbers), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, group=group)
    return [float(value) for value in tensor.tolist()]


def largest(
    numbers: Sequence[float], group: dist.ProcessGroup | None, device: torch.device | None = None
) -> list[float]:
    """Maxima over a group; collective."""
    if group is None or not numbers:
        return list(numbers)
    tensor = torch.tensor(list(numbers), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return [float(value) for value in tensor.tolist()]


def gathered(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The rows of all ranks of a group, in their order; ranks may have unequally many. Collective."""
    if group is None:
        return tensor
    counts = [0] * dist.get_world_size(group)
    dist.all_gather_object(counts, len(tensor), group=group)
    padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def square_sum(tensors: Iterable[Tensor]) -> Tensor:
    """Sum of squares of all numbers in double precision; those of DTensors are summed over the mesh axes that shard
    them, once for each way of sharding. Collective where there are any."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        mesh = getattr(tensor, "device_mesh", None)
        sharded = tuple(place.is_shard() for place in getattr(tensor, "placements", ()))
        value = tensor.to_local() if mesh is not None else tensor  # type: ignore[attr-defined]
        by_mesh.setdefault((mesh, sharded), []).append(value.detach())
    total = torch.zeros((), dtype=torch.float64)
    for (mesh, sharded), values in by_mesh.items():
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(values)]) if values else total
        part = norms.square().sum()
        for axis, split in enumerate(sharded):
            if split:
                dist.all_reduce(part, group=mesh.get_group(axis))
        total = total.to(part.device) + part
    return total
