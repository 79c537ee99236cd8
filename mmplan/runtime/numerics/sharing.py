"""How ranks share a model's gradients, so that a sum over ranks counts every element once.

A DTensor says it itself. Of plain tensors the caller has to say how many ranks hold the same elements: norms of layers
on all ranks of a tensor-parallel group, an embedding that the first and the last stage both have, dense layers beside
experts. Elements that `n` ranks hold alike count 1/n on each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from mmplan.runtime.numerics.collectives import Group, place_in, reduce_
from mmplan.runtime.numerics.modality_parts import SHARED, Parts, part_of_parameters


def held(gradient: Tensor) -> Tensor:
    """What lies in this process of a gradient: a shard's elements, a sparse one's values."""
    if isinstance(gradient, DTensor):
        return gradient.to_local()
    return gradient._values() if gradient.is_sparse else gradient


@dataclass(frozen=True, slots=True)
class HeldGradient:
    """`stored`: this rank's elements as they lie in `.grad`; `values`: the same once sums still to be made are made,
    which `copies` ranks of those that are summed over hold alike; `mesh`: of a DTensor, with the axes that split it."""

    name: str
    part: str
    stored: Tensor
    values: Tensor
    copies: int
    mesh: DeviceMesh | None = None
    split_axes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sharing:
    """A model's parts, and the ranks that hold them.

    Attributes:
        group: ranks that together hold the model once or several times, those of its DTensors among them: stages of a
            pipeline, tensor-parallel ranks, expert ranks. None: this rank has all of it but what DTensors split (DDP,
            FSDP).
        copies: name of a parameter -> how many ranks of `group` hold the same elements of it; of a DTensor, beyond what
            its own mesh says. None: 1 each.
    """

    model: nn.Module
    modalities: Parts
    group: Group = None
    copies: Callable[[str], int] | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.modalities, SHARED)

    def gradients(self) -> list[HeldGradient]:
        """Those that this rank holds.

        Raises:
            ValueError: a DTensor's mesh has ranks outside of `group`.
        """
        part_of = part_of_parameters(self.model, self.modalities)
        named = [(n, part_of.get(p, SHARED), p.grad) for n, p in self.model.named_parameters() if p.grad is not None]
        return [self._held(name, part, gradient) for name, part, gradient in named]

    def _held(self, name: str, part: str, gradient: Tensor) -> HeldGradient:
        copies, stored = 1 if self.copies is None else self.copies(name), held(gradient)
        if not isinstance(gradient, DTensor):
            values = held(gradient.coalesce()) if gradient.is_sparse else stored
            return HeldGradient(name, part, stored, values, copies)
        if any(placement.is_partial() for placement in gradient.placements):
            whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
            gradient = gradient.redistribute(placements=whole)
        mesh, split = gradient.device_mesh, []
        for axis, placement in enumerate(gradient.placements):
            if isinstance(placement, Replicate):
                copies *= mesh.size(axis)
            else:
                split.append(axis)
        if self.group is None:
            return HeldGradient(name, part, stored, gradient.to_local(), 1, mesh, tuple(split))
        outside = set(mesh.mesh.flatten().tolist()) - set(dist.get_process_group_ranks(self.group))
        if outside:
            raise ValueError(f"'{name}' lies on ranks {sorted(outside)} too, which are not in the group")
        return HeldGradient(name, part, stored, gradient.to_local(), copies)

    def summed(self, numbers: Mapping[str, Tensor], gradients: list[HeldGradient], width: int) -> Tensor:
        """Sum by part of what each gradient's elements on this rank give: [parts, width] in fp64, alike on all ranks.

        Args:
            numbers: [width] in fp64, by name of a gradient.
        """
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        zero = torch.zeros(len(self.parts), width, dtype=torch.float64, device=device)
        sums: dict[tuple[DeviceMesh | None, tuple[int, ...]], Tensor] = {}
        for one in gradients:
            where = sums.setdefault((one.mesh, one.split_axes), zero.clone())
            where[self.parts.index(one.part)] += numbers[one.name].to(device) / one.copies
        for (mesh, axes), part_sums in sums.items():
            for axis in axes:
                assert mesh is not None
                reduce_(part_sums, mesh.get_group(axis))
        total = sum(sums.values(), zero)
        return total if self.group is None or place_in(self.group)[1] == 1 else reduce_(total, self.group)
