"""Statistics over the right ranks: sums, maxima and rows of a group, and which groups a model's own meshes tell."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Groups:
    """Who holds what. `replicas`: ranks with other data and the same model (DDP, FSDP); `shards`: ranks that share
    layers by heads or columns; `stages`: ranks of one pipeline. None: this rank alone."""

    replicas: dist.ProcessGroup | None = None
    shards: dist.ProcessGroup | None = None
    stages: dist.ProcessGroup | None = None

    def first(self, *, of_all_stages: bool) -> bool:
        """Whether this rank tells what its stage knows, or all stages: the first of those that know the same."""
        groups = (self.replicas, self.shards, *((self.stages,) if of_all_stages else ()))
        return all(group is None or dist.get_rank(group) == 0 for group in groups)


def summed(numbers: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
    """Sums over a group; collective."""
    return _reduced(numbers, group, dist.ReduceOp.SUM)


def largest(numbers: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
    """Maxima over a group; collective."""
    return _reduced(numbers, group, dist.ReduceOp.MAX)


def _reduced(numbers: Sequence[float], group: dist.ProcessGroup | None, kind: Any) -> list[float]:
    if group is None or not numbers:
        return list(numbers)
    device = torch.cuda.current_device() if dist.get_backend(group) == "nccl" else None
    tensor = torch.tensor(list(numbers), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=kind, group=group)
    return [float(value) for value in tensor.tolist()]


def each(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """What all ranks of a group have, in their order; collective."""
    if group is None:
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def found_groups(model: nn.Module) -> Groups:
    """Groups of a model whose parameters are DTensors of one mesh: FSDP2 (replicas), tensor parallelism (shards), or
    one inside the other; none where that does not tell."""
    from torch.distributed.fsdp import FSDPModule

    placed = [p for p in model.parameters() if hasattr(p, "device_mesh")]
    meshes: set[Any] = {getattr(p, "device_mesh", None) for p in placed}
    if len(meshes) != 1:
        return Groups()
    mesh = meshes.pop()
    is_fsdp = any(isinstance(module, FSDPModule) for module in model.modules())
    if mesh.ndim == 1:
        group = mesh.get_group(0)
        return Groups(replicas=group) if is_fsdp else Groups(shards=group)
    if mesh.ndim == 2 and is_fsdp:
        if any(not _placement(p, 0).is_replicate() for p in placed):
            return Groups(replicas=mesh.get_group(0), shards=mesh.get_group(1))
        if mesh.size() == dist.get_world_size():  # replicas of shards
            return Groups(replicas=dist.group.WORLD)
    return Groups()


def _placement(parameter: Tensor, axis: int) -> Any:
    return parameter.placements[axis]  # type: ignore[attr-defined]
