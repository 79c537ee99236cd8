"""Gradients as products of two thin matrices (PowerSGD, arXiv 1905.13727), one basis for all modalities of a place.

Matrices of one name in several towers, `vision.blocks.0.q` and `text.blocks.0.q`, stand side by side as one matrix
M = [G_vision | G_text]. With P = orth(M Q) and Q' = M^T P, of which only P and Q' are summed over the ranks, the mean
is P Q'^T: one P for all towers. The next step starts from Q' (warm start); what P Q'^T leaves out is added to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from mmplan.cost_models.compressed_bytes import FP32_BYTES
from mmplan.runtime.compression.wire import Wire


@dataclass(frozen=True, kw_only=True, slots=True)
class Fused:
    """Matrices that share a basis.

    Attributes:
        names: of their parameters, in order.
        rows: the dim that all have, behind turning.
        columns: of each.
        turned: whether the matrices stand side by side transposed, because only their last dims are alike.
    """

    names: tuple[str, ...]
    rows: int
    columns: tuple[int, ...]
    turned: bool

    @property
    def elements(self) -> int:
        return self.rows * sum(self.columns)

    def wire_elements(self, rank: int) -> int:
        """In P and Q."""
        return rank * (self.rows + sum(self.columns))


def fused_matrices(shapes: Mapping[str, torch.Size], towers: Mapping[str, str], rank: int) -> list[Fused]:
    """Which parameters share a basis: those of one name behind their towers' prefixes, with a dim in common.

    Vectors, and matrices of which two thin ones would be no smaller, are in none.
    """
    places: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        if len(shape) > 1:
            prefix = next((p for p in towers.values() if name.startswith(p)), None)
            places.setdefault(name if prefix is None else f"*{name.removeprefix(prefix)}", []).append(name)
    groups = [group for names in places.values() for group in _alike(names, shapes)]
    return [group for group in groups if group.wire_elements(rank) < group.elements]


def _alike(names: Sequence[str], shapes: Mapping[str, torch.Size]) -> list[Fused]:
    """All of one row count together, the rest by column count; a matrix without partners alone."""
    flat = {name: (shapes[name][0], shapes[name].numel() // max(1, shapes[name][0])) for name in names}
    groups: dict[tuple[int, bool], list[str]] = {}
    for name, (rows, columns) in flat.items():
        partners = sum(other[0] == rows for other in flat.values())
        turned = partners == 1 and sum(other[1] == columns for other in flat.values()) > 1
        groups.setdefault((columns if turned else rows, turned), []).append(name)
    return [
        Fused(names=tuple(own), rows=rows, columns=tuple(flat[name][0 if turned else 1] for name in own), turned=turned)
        for (rows, turned), own in groups.items()
    ]


class LowRank:
    """Averages gradients over a group. State: bases Q and what they left out, fp32, by name of the parameter."""

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        towers: Mapping[str, str],
        *,
        rank: int,
        seed: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Raises ValueError for a rank below 1, or for a prefix that no parameter has."""
        if rank < 1:
            raise ValueError(f"rank {rank} of a low-rank basis; expected 1 or more")
        for modality, prefix in towers.items():
            if not any(name.startswith(prefix) for name in shapes):
                raise ValueError(f"no name of {len(shapes)} parameters begins with '{prefix}' of tower '{modality}'")
        self.fused = fused_matrices(shapes, towers, rank)
        self._names = tuple(shapes)
        self.wire = Wire()
        self._group, self._rank = group, rank
        self._bases = {
            name: _first_basis(name, columns, rank, seed)
            for group_ in self.fused
            for name, columns in zip(group_.names, group_.columns, strict=True)
        }
        self._residuals: dict[str, Tensor] = {}

    def wire_bytes(self, shapes: Mapping[str, torch.Size]) -> int:
        """In the payloads of one step."""
        thin = sum(group.wire_elements(self._rank) for group in self.fused)
        inside = {name for group in self.fused for name in group.names}
        return FP32_BYTES * (thin + sum(shape.numel() for name, shape in shapes.items() if name not in inside))

    def average(self, gradients: Mapping[str, Tensor]) -> None:
        """In place, alike on all ranks. Three all-reduces: what goes whole, all P, all Q.

        Raises:
            ValueError: a gradient of a parameter that was not among the shapes.
        """
        ranks = dist.get_world_size(self._group)
        strange = sorted(set(gradients) - set(self._names))
        if strange:
            raise ValueError(f"'{strange[0]}' is not one of the {len(self._names)} parameters that were trained")
        gradients = {name: gradients[name] for name in self._names if name in gradients}  # bits go by the order
        fused = [group for group in self.fused if all(name in gradients for name in group.names)]
        inside = {name for group in fused for name in group.names}
        self._average_whole([gradient for name, gradient in gradients.items() if name not in inside], ranks)
        if not fused:
            return
        matrices = {name: self._matrix(group, name, gradients[name]) for group in fused for name in group.names}
        ps = [sum_of([matrices[name] @ self._basis(name, matrices[name]) for name in group.names]) for group in fused]
        ps = [torch.linalg.qr(p).Q for p in self._summed(ps)]
        names = [(name, p) for group, p in zip(fused, ps, strict=True) for name in group.names]
        qs = [q / ranks for q in self._summed([matrices[name].T @ p for name, p in names])]
        turned = {name: group.turned for group in fused for name in group.names}
        for (name, p), q in zip(names, qs, strict=True):
            mean = p @ q.T
            lost = matrices[name] - mean
            finite = mean.isfinite().all()
            self._residuals[name] = torch.where(finite, lost, self._residuals.get(name, torch.zeros_like(lost)))
            self._bases[name] = torch.where(finite, q, self._bases[name].to(q.device))
            gradients[name].copy_((mean.T if turned[name] else mean).reshape(gradients[name].shape))

    def rescale(self, factor: float) -> None:
        """When the loss scale is multiplied by `factor`: what is kept was in the old one."""
        for residual in self._residuals.values():
            residual *= factor

    def state_dict(self) -> dict[str, Any]:
        """Of this rank; every rank saves its own. Bases are drawn by name, so there is no random state."""
        return {
            "ranks": dist.get_world_size(self._group),
            "rank": self._rank,
            "fused": [group.names for group in self.fused],
            "bases": {name: basis.clone() for name, basis in self._bases.items()},
            "residuals": {name: residual.clone() for name, residual in self._residuals.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError where the state is of another number of ranks, rank of the bases, or towers."""
        own = {
            "ranks": dist.get_world_size(self._group),
            "rank": self._rank,
            "fused": [group.names for group in self.fused],
        }
        for key, value in own.items():
            if state[key] != value:
                raise ValueError(f"the state was saved with {key} = {state[key]}, and here it is {value}")
        self._bases = {name: basis.clone() for name, basis in state["bases"].items()}
        self._residuals = {name: residual.clone() for name, residual in state["residuals"].items()}

    def _average_whole(self, gradients: Sequence[Tensor], ranks: int) -> None:
        if not gradients:
            return
        flat = torch.cat([gradient.flatten().float() for gradient in gradients])
        self.wire.sum(flat, self._group)
        parts = torch.split(flat / ranks, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))

    def _matrix(self, group: Fused, name: str, gradient: Tensor) -> Tensor:
        """fp32 [rows of the group, columns], with what was left out before."""
        matrix = gradient.detach().float().reshape(gradient.shape[0], -1)
        matrix = matrix.T if group.turned else matrix
        residual = self._residuals.get(name)
        return matrix if residual is None else matrix + residual.to(matrix.device)

    def _basis(self, name: str, matrix: Tensor) -> Tensor:
        return self._bases[name].to(matrix.device)

    def _summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        self.wire.sum(flat, self._group)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def _first_basis(name: str, columns: int, rank: int, seed: int) -> Tensor:
    """Drawn by the name, so alike on all ranks and whatever else there is."""
    generator = torch.Generator().manual_seed(seed + crc32(name.encode()))
    return torch.randn(columns, rank, generator=generator)
