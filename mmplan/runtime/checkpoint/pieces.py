"""The state of a rank as pieces of the whole model's parameters, and which rank writes which of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mmplan.planner.plan import Plan
from mmplan.runtime.checkpoint.boxes import Box, whole
from mmplan.runtime.held import Buffer
from mmplan.runtime.places import Place, mesh_of_row
from mmplan.runtime.weighted_stage import WeightedStage

BUFFER = "buffer"  # the kind of its one tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """A box of the parameter `name`, which has `shape` in the whole model: live tensors of the box's shape, by kind.

    `copied`: all replicas keep the same; `everywhere`: so do all ranks that share the layer; `writes`, `repeated`: see
    `Place`.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensors: Mapping[str, Tensor]
    copied: bool
    everywhere: bool
    writes: bool | None = None
    repeated: bool = False

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def pieces_of(stages: Iterable[WeightedStage]) -> list[Piece]:
    """What the stages hold between two steps, without padding."""
    pieces = []
    for stage in stages:
        for held in stage.state.held():
            place = stage.places[held.parameter]
            everywhere = place.shape == tuple(held.parameter.shape)
            pieces += [
                Piece(
                    name=place.name,
                    shape=place.shape,
                    box=box,
                    tensors={kind: tensor[inside] for kind, tensor in held.tensors.items()},
                    copied=held.copied,
                    everywhere=everywhere,
                    writes=place.writes,
                    repeated=place.repeated,
                )
                for box, inside in place.boxes(held.box)
            ]
        pieces += [_whole(buffer) for buffer in stage.buffers]
    return pieces


def _whole(buffer: Buffer) -> Piece:
    shape = tuple(buffer.tensor.shape)
    return Piece(
        name=buffer.name,
        shape=shape,
        box=whole(shape),
        tensors={BUFFER: buffer.tensor},
        copied=True,
        everywhere=True,
        writes=buffer.writes,
    )


def to_write(pieces: Sequence[Piece], plan: Plan, at: Place) -> list[Piece]:
    """Those that this rank writes: of equal ones on several ranks one rank writes each, all about as much."""
    mesh = mesh_of_row(plan, at.row)
    loads, own = [0] * (mesh.dp * mesh.cp), at.replica * mesh.cp + at.shard // mesh.tp
    chosen = []
    for piece in pieces:
        if piece.writes is not None:
            chosen += [piece] if (piece.writes or not piece.copied) and not piece.repeated else []
            continue
        holder = loads.index(min(loads)) if piece.copied else own
        loads[holder] += piece.nbytes if piece.copied else 0
        if holder == own and not piece.repeated and (at.shard % mesh.tp == 0 or not piece.everywhere):
            chosen.append(piece)
    return chosen
