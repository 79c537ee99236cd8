"""One primitive that lays a tensor of any modality on a device mesh, rows of unlike samples included.

With DTensor's placements alone the result is a DTensor. With a `Ragged` cut of the rows it is a `RaggedShard`: this
rank's rows and where they lie. Both give the whole tensor back to the bit, and gradients flow through all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from mmplan.runtime.network import all_reduce, all_to_all, gather_rows
from mmplan.runtime.row_cuts import Ragged, chunk_offsets, cut_lengths, overlaps, row_offsets
from mmplan.scenario.scenario import Modality
from mmplan.scenario.sensitivity import MODALITIES

Spec = Sequence[Placement | Ragged]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RaggedShard:
    """This rank's rows of a tensor whose rows are dealt over one mesh axis as samples allow.

    Attributes:
        local: [own rows, ...], cut along other dims where other axes of the mesh shard them.
        spec: one placement for each mesh axis, one of them `Ragged`.
        offsets: first row of each rank of that axis, and the end of the last one.
        lengths: rows of each sample of the whole tensor.
        shape: of the whole tensor.
    """

    local: Tensor
    mesh: DeviceMesh
    spec: tuple[Placement | Ragged, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    shape: torch.Size
    modality: Modality

    @property
    def own_lengths(self) -> tuple[int, ...]:
        """Rows of each sample, or part of one, that is here; without those that have none."""
        index = _index(self.mesh, _ragged_axis(self.spec))
        return cut_lengths(self.lengths, self.offsets[index], self.offsets[index + 1])

    def full_tensor(self, *, partial_gradients: bool = False) -> Tensor:
        """The whole tensor, on every rank. Collective.

        Args:
            partial_gradients: each rank's gradient of the result is its own part of the sum, as where it uses all keys
                for its own queries; else all ranks have the same gradient.
        """
        axis = _ragged_axis(self.spec)
        rows = self.local
        others = _others(self.mesh, self.spec, axis)
        if others is not None:
            shape = torch.Size((rows.shape[0], *self.shape[1:]))
            rows = _laid(rows, *others, shape).full_tensor()
        result: Tensor = _Whole.apply(rows, self.offsets, self.mesh, axis, partial_gradients)  # type: ignore[no-untyped-call]
        return result

    @overload
    def redistribute(self, spec: Sequence[Placement]) -> DTensor: ...
    @overload
    def redistribute(self, spec: Spec) -> "DTensor | RaggedShard": ...
    def redistribute(self, spec: Spec) -> "DTensor | RaggedShard":
        """The same tensor laid out otherwise. Collective; rows alone move from rank to rank where only their cut
        changes, else the whole tensor is gathered.

        Raises:
            ValueError: see `shard_tensor`; "held" rows are where they are.
        """
        _check_spec(spec, self.mesh)
        axis = _ragged_axis(self.spec)
        new = spec[axis]
        moves = isinstance(new, Ragged) or new == Shard(0)
        if not moves or any(a != b for i, (a, b) in enumerate(zip(spec, self.spec, strict=True)) if i != axis):
            return shard_tensor(self.full_tensor(), self.mesh, spec, modality=self.modality, lengths=self.lengths)
        ranks = self.mesh.size(axis)
        target = (
            tuple(_offsets(new, self.lengths, ranks, self.modality))
            if isinstance(new, Ragged)
            else tuple(chunk_offsets(self.shape[0], ranks))
        )
        moved: Tensor = _Move.apply(self.local, self.offsets, target, self.mesh, axis)  # type: ignore[no-untyped-call]
        if isinstance(new, Ragged):
            return replace(self, local=moved, spec=tuple(spec), offsets=target)
        return _laid(moved, self.mesh, cast(Sequence[Placement], spec), self.shape)


@overload
def shard_tensor(
    x: Tensor | Sequence[Tensor],
    mesh: DeviceMesh,
    spec: Sequence[Placement],
    *,
    modality: Modality,
    lengths: Sequence[int] | None = None,
) -> DTensor: ...
@overload
def shard_tensor(
    x: Tensor | Sequence[Tensor],
    mesh: DeviceMesh,
    spec: Spec,
    *,
    modality: Modality,
    lengths: Sequence[int] | None = None,
) -> DTensor | RaggedShard: ...
def shard_tensor(
    x: Tensor | Sequence[Tensor],
    mesh: DeviceMesh,
    spec: Spec,
    *,
    modality: Modality,
    lengths: Sequence[int] | None = None,
) -> DTensor | RaggedShard:
    """Lay `x` on the mesh: a DTensor, or a `RaggedShard` where an axis of the spec is `Ragged`.

    Args:
        x: [rows, ...], alike on all ranks ("held": each rank's own rows), or one such tensor for each sample. A DTensor
            is gathered first. Its gradient is whole, and alike on all ranks.
        spec: one placement for each mesh axis.
        lengths: rows of each sample where x is packed; None: one sample. "held": of the own ones.

    Raises:
        ValueError: a spec that does not fit the mesh or x; lengths that do not add up; an unknown modality.
    """
    if modality not in MODALITIES:
        raise ValueError(f"modality '{modality}' is none of {', '.join(MODALITIES)}")
    _check_spec(spec, mesh)
    rows, lengths = _packed(x, lengths, modality)
    ragged = [axis for axis, placement in enumerate(spec) if isinstance(placement, Ragged)]
    if not ragged:
        placements = cast(Sequence[Placement], spec)
        _check_dims(placements, rows, modality)
        return DTensor.from_local(rows, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(mesh, placements)
    (axis,) = ragged
    return _dealt(rows, mesh, tuple(spec), axis, lengths, modality)


def _dealt(
    rows: Tensor,
    mesh: DeviceMesh,
    spec: tuple[Placement | Ragged, ...],
    axis: int,
    lengths: tuple[int, ...],
    modality: Modality,
) -> RaggedShard:
    cut = spec[axis]
    assert isinstance(cut, Ragged)
    others = _others(mesh, spec, axis)
    if others is not None:
        _check_dims(others[1], rows, modality)
    if cut.cut == "held":
        held: list[Any] = [None] * mesh.size(axis)
        dist.all_gather_object(held, (lengths, tuple(rows.shape[1:]), rows.dtype), group=mesh.get_group(axis))
        unlike = next((rank for rank, peer in enumerate(held) if peer[1:] != held[0][1:]), None)
        if unlike is not None:
            pieces = [f"{shape} in {dtype}" for _, shape, dtype in (held[0], held[unlike])]
            raise ValueError(f"{modality} rows are {pieces[0]} on rank 0 of the axis and {pieces[1]} on rank {unlike}")
        lengths = tuple(length for peer in held for length in peer[0])
        offsets = tuple(row_offsets(tuple(sum(peer[0]) for peer in held), lengths, mesh.size(axis)))
        own = rows
    else:
        offsets = tuple(_offsets(cut, lengths, mesh.size(axis), modality))
        own = _Own.apply(rows, offsets, mesh, axis)  # type: ignore[no-untyped-call]
    shape = torch.Size((offsets[-1], *rows.shape[1:]))
    if others is not None:
        submesh, placements = others
        whole = DTensor.from_local(own, submesh, [Replicate()] * submesh.ndim, run_check=False)
        own = whole.redistribute(submesh, placements).to_local()
    return RaggedShard(
        local=own, mesh=mesh, spec=spec, offsets=offsets, lengths=lengths, shape=shape, modality=modality
    )


class _Own(torch.autograd.Function):
    """This rank's rows of rows that all have; copied, so that nobody keeps all of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, offsets: tuple[int, ...], mesh: DeviceMesh, axis: int) -> Tensor:
        ctx.offsets, ctx.mesh, ctx.axis = offsets, mesh, axis
        return _slice(rows, offsets, mesh, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(gradients[0], ctx.offsets, ctx.mesh, ctx.axis), None, None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, offsets: tuple[int, ...], mesh: DeviceMesh, axis: int, partial_gradients: bool
    ) -> Tensor:
        ctx.offsets, ctx.mesh, ctx.axis, ctx.partial = offsets, mesh, axis, partial_gradients
        return _gathered(own, offsets, mesh, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0]
        if ctx.partial:
            gradient = gradient.clone(memory_format=torch.contiguous_format)  # others may read this gradient too
            all_reduce(gradient, ctx.mesh.get_group(ctx.axis))
        return _slice(gradient, ctx.offsets, ctx.mesh, ctx.axis), None, None, None, None


class _Move(torch.autograd.Function):
    """Rows go from the ranks of one cut to those of another."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, source: tuple[int, ...], target: tuple[int, ...], mesh: DeviceMesh, axis: int
    ) -> Tensor:
        ctx.source, ctx.target, ctx.mesh, ctx.axis = source, target, mesh, axis
        return _moved(own, source, target, mesh, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _moved(gradients[0], ctx.target, ctx.source, ctx.mesh, ctx.axis), None, None, None, None


def _slice(rows: Tensor, offsets: tuple[int, ...], mesh: DeviceMesh, axis: int) -> Tensor:
    index = _index(mesh, axis)
    return rows[offsets[index] : offsets[index + 1]].clone(memory_format=torch.contiguous_format)


def _gathered(own: Tensor, offsets: tuple[int, ...], mesh: DeviceMesh, axis: int) -> Tensor:
    return gather_rows(own, [end - first for first, end in pairwise(offsets)], mesh.get_group(axis))


def _moved(own: Tensor, source: tuple[int, ...], target: tuple[int, ...], mesh: DeviceMesh, axis: int) -> Tensor:
    sent, received = overlaps(source, target, _index(mesh, axis))
    result = own.new_empty(sum(received), *own.shape[1:])
    all_to_all(result, own.contiguous(), received, sent, mesh.get_group(axis))
    return result


def _laid(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """A DTensor of known shape: an uneven last shard says nothing about the whole."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _packed(
    x: Tensor | Sequence[Tensor], lengths: Sequence[int] | None, modality: str
) -> tuple[Tensor, tuple[int, ...]]:
    """All samples' rows, and how many each has."""
    if not isinstance(x, Tensor):
        if lengths is not None or not x:
            raise ValueError(f"{modality}: {len(x)} samples, each with its own length; give one or more, no lengths")
        odd = next((i for i, sample in enumerate(x) if sample.shape[1:] != x[0].shape[1:]), None)
        if odd is not None:
            shapes = f"{tuple(x[odd].shape)} and sample 0 {tuple(x[0].shape)}"
            raise ValueError(f"{modality}: sample {odd} is {shapes}, and samples may differ in their first dim alone")
        return torch.cat(list(x)), tuple(sample.shape[0] for sample in x)
    whole = x.full_tensor() if isinstance(x, DTensor) else x
    if whole.dim() == 0:
        raise ValueError(f"a {modality} tensor of 0 dims has no rows to lay on a mesh")
    lengths = (whole.shape[0],) if lengths is None else tuple(lengths)
    if sum(lengths) != whole.shape[0] or min(lengths, default=0) < 0:
        raise ValueError(f"{modality}: {len(lengths)} lengths = {sum(lengths)} rows, the tensor has {whole.shape[0]}")
    return whole, lengths


def _check_spec(spec: Spec, mesh: DeviceMesh) -> None:
    if len(spec) != mesh.ndim:
        raise ValueError(f"{len(spec)} placements for a mesh of {mesh.ndim} axes")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not one of the {mesh.size()} ranks of the mesh")
    ragged = sum(isinstance(placement, Ragged) for placement in spec)
    if ragged > 1:
        raise ValueError(f"{ragged} axes of the mesh would deal the rows; one may be Ragged")
    if ragged and mesh.ndim > 1 and not mesh.mesh_dim_names:
        raise ValueError(f"a mesh of {mesh.ndim} axes needs mesh_dim_names for a Ragged one")
    odd = next((placement for placement in spec if not isinstance(placement, Shard | Replicate | Ragged)), None)
    if odd is not None:
        raise ValueError(f"{odd} is no layout of a tensor's values; use Shard, Replicate or Ragged")
    if ragged and Shard(0) in spec:
        raise ValueError("Shard(0) cuts the rows that another axis deals; one axis may have them")


def _check_dims(placements: Sequence[Placement], rows: Tensor, modality: str) -> None:
    for placement in placements:
        if isinstance(placement, Shard) and not 0 <= placement.dim < rows.dim():
            raise ValueError(
                f"{modality}: Shard({placement.dim}) of a tensor of {rows.dim()} dims, 0 to {rows.dim() - 1}"
            )


def _offsets(cut: Ragged, lengths: Sequence[int], ranks: int, modality: str) -> list[int]:
    if cut.cut == "held":
        raise ValueError("rows that are laid out already are held as they are; 'held' is for shard_tensor")
    if not isinstance(cut.cut, tuple) and cut.cut not in ("samples", "tokens"):
        raise ValueError(f"a cut is 'samples', 'tokens', 'held' or rows of each rank, not {cut.cut!r}")
    try:
        return row_offsets(cut.cut, lengths, ranks)
    except ValueError as error:
        raise ValueError(f"{modality}: {error}") from None


def _ragged_axis(spec: Spec) -> int:
    return next(axis for axis, placement in enumerate(spec) if isinstance(placement, Ragged))


def _index(mesh: DeviceMesh, axis: int) -> int:
    index: int = mesh.get_local_rank(axis)
    return index


def _others(mesh: DeviceMesh, spec: Spec, axis: int) -> tuple[DeviceMesh, list[Placement]] | None:
    """The other axes and their placements; None where nothing lies on them."""
    placements = [placement for placement in spec if not isinstance(placement, Ragged)]
    if all(placement == Replicate() for placement in placements):
        return None
    assert mesh.mesh_dim_names is not None
    names = tuple(name for index, name in enumerate(mesh.mesh_dim_names) if index != axis)
    return mesh[names], placements
