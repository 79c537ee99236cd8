"""How a tensor crosses from one mesh to another, and how long each way takes; plans record the quickest.

    copies     each rank gets all rows that it needs from one that has them: nothing follows
    slices     an all-to-all of overlaps: the rows are cut over all ranks that share a stage in a replica, each hands
               over and gets its own, and those who read them gather them over tp
    broadcast  the first rank of each tensor-parallel group gets the rows and hands them to the others
    placed     as copies, but cp ranks of the reader, each of which got a slice, give each row to the one that has its
               place in the sequence (an all-to-all of overlaps), in place of gathering all

Gradients go back the same way. Over cp rows are cut in any case (`mesh.py`), and gathered but for the last way. To
`mesh.py` a way is a pair of other meshes: with tp 1, and for slices with as much more cp.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal, get_args

from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.graph import Edge
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.load import Loads
from mmplan.planner.mesh import Mesh, message_bytes, most_messages, nested, slices
from mmplan.scenario.scenario import Dtype

Way = Literal["copies", "slices", "broadcast", "placed"]
WAYS: tuple[Way, ...] = get_args(Way)
SHARED: tuple[Way, ...] = ("slices", "broadcast")  # over tp by those who get a tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorWay:
    """What a plan records of a layer's output that other meshes read: `reader` is a module of them."""

    producer: str
    reader: str
    way: Way


@dataclass(frozen=True, slots=True)
class Border:
    """Two meshes and the way of a tensor between them."""

    source: Mesh
    target: Mesh
    way: Way = "copies"

    @property
    def seen(self) -> tuple[Mesh, Mesh]:
        """The meshes as `mesh.py` has to see them."""
        return _seen(self.source, self.way), _seen(self.target, self.way)

    def piece_bytes(self, message: float, own: Mesh) -> float:
        """What tensor-parallel ranks of an end have of a tensor together: all rows of a replica, over cp its part.

        Args:
            message: bytes between two ranks, of one of the smallest parts of samples.
        """
        return message * slices(*self.seen) * (lcm(self.source.dp, self.target.dp) // own.dp) / own.cp


def _seen(mesh: Mesh, way: Way) -> Mesh:
    if way not in SHARED or mesh.tp == 1:
        return mesh
    return replace(mesh, tp=1, cp=mesh.width if way == "slices" else mesh.cp)


def shard_of(seen: int, mesh: Mesh, way: Way) -> int:
    """The place in a replica of the mesh of a shard of the mesh that a way sees."""
    return seen * mesh.tp if way == "broadcast" else seen


def seen_shard(shard: int, mesh: Mesh, way: Way) -> int | None:
    """The inverse; None of one that neither sends nor gets."""
    if way != "broadcast":
        return shard
    return None if shard % mesh.tp else shard // mesh.tp


def ways_between(source: Mesh, target: Mesh, *, placed: bool = False) -> tuple[Way, ...]:
    """Those that differ; slices need one of two widths to divide the other. `placed`: see `Edge.placed`."""
    if source == target:
        return ("copies",)
    by_place: tuple[Way, ...] = ("placed",) if placed and target.cp > 1 else ()
    if source.tp == target.tp == 1:
        return ("copies", *by_place)
    return (*(("copies", *SHARED) if nested((source.width, target.width)) else ("copies", "broadcast")), *by_place)


def way_s(
    costs: CostModel, message: float, border: Border, layouts: Sequence[Layout], *, near: bool, gradient: bool
) -> float:
    """Seconds of a tensor or its gradient: what the busiest rank sends or gets, one message after another; then what
    those who get it gather or broadcast over tp; and what cp ranks of the reader gather, or sum and scatter, or give
    each other.

    Args:
        message: bytes between two ranks, of one of the smallest parts of samples.
        layouts: of source and target.
    """
    ends, seen = (border.source, border.target), border.seen
    count, parts = most_messages(*(seen[::-1] if gradient else seen))
    seconds = count * costs.transfer_s(message * parts, near)
    getter, target = ends[not gradient], border.target
    if border.way in SHARED and getter.tp > 1:
        piece_bytes = border.piece_bytes(message, getter)
        seconds += costs.share_rows_s(piece_bytes, layouts[not gradient], gathered=border.way == "slices")
    if target.cp > 1:
        move_s = costs.place_rows_s if border.way == "placed" else costs.join_rows_s
        seconds += move_s(border.piece_bytes(message, target) * target.cp, layouts[1])
    return seconds


def ways_s(
    costs: CostModel,
    edge: Edge,
    loads: Loads,
    precision: Dtype,
    ends: tuple[Mesh, Mesh],
    layouts: Sequence[Layout],
    near: bool,
) -> dict[Way, float]:
    """Seconds of a tensor there, and of its gradient back where there is one, each way.

    Args:
        loads: of one of the smallest parts of samples.
    """
    found: dict[Way, float] = {}
    for way in ways_between(*ends, placed=bool(edge.placed)):
        border = Border(*ends, way)
        message = message_bytes(edge, loads, precision, *border.seen)
        found[way] = sum(
            way_s(costs, message, border, layouts, near=near, gradient=gradient)
            for gradient in (False, True)[: 1 + edge.carries_grad]
        )
    return found


def quickest(seconds: dict[Way, float]) -> Way:
    """The first of the quickest ways."""
    return min(seconds, key=seconds.__getitem__)
