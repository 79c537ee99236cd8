"""Where the images of a module's arguments and outputs lie, so that ranks can take some of them in turn.

Images, clips or samples lie one behind the other along the first dim. Each has one row, or equally many; or an argument
has a row of integers for each, whose product is the image's size (grids of patches), and rows go by sizes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import prod
from typing import Any

from torch import Tensor

from mmplan.runtime.dealt import share_of
from mmplan.runtime.ghost.half_meta import META
from mmplan.runtime.ghost.trials import is_float


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageWay:
    """Positions of leaves, arguments' and outputs', with rows for each unit of an image's size; None: one row for each.

    table: the argument whose rows of integers are sizes; None: all have the size 1, and `counted` has one row for each.
    """

    counted: int
    table: int | None
    arguments: Mapping[int, Fraction | None]
    outputs: Mapping[int, Fraction | None]

    def sizes(self, leaves: Sequence[Any]) -> list[int]:
        """Of all images of a call."""
        if self.table is None:
            return [1] * int(leaves[self.counted].shape[0])
        return [prod(row) for row in leaves[self.table].tolist()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """What a rank takes of a call. given: of arguments the first row and the end, by position; counts: of outputs the
    rows of each rank's images, by position; keeps: whether it has images of its own. A rank without computes the first
    one along, which nobody takes: so all ranks make the same calls."""

    given: Mapping[int, tuple[int, int]]
    counts: Mapping[int, tuple[int, ...]]
    keeps: bool

    def own(self, leaves: Sequence[Any]) -> list[Any]:
        """Arguments of this rank."""
        return [leaf[slice(*self.given[at])] if at in self.given else leaf for at, leaf in enumerate(leaves)]

    def rows(self, slot: int, index: int) -> int:
        """That this rank computes of an output."""
        return self.counts[slot][index if self.keeps else 0] if self.given else sum(self.counts[slot])


def possible_ways(arguments: Sequence[Any], outputs: Sequence[Any]) -> Iterator[ImageWay]:
    """Ways in which the images of a call may lie. Nothing says so yet that they are right."""
    floats = [at for at, leaf in enumerate(arguments) if is_float(leaf) and leaf.dim() > 0]
    if not floats:
        return
    for table, leaf in enumerate(arguments):
        if _is_table(leaf):
            sizes = [prod(row) for row in leaf.tolist()]
            given = _along(arguments, sizes, exact=False)
            if min(sizes) > 0 and any(given.get(at) is not None for at in floats):
                found = _along(outputs, sizes, exact=False)
                yield ImageWay(counted=table, table=table, arguments=given | {table: None}, outputs=found)
    count = arguments[floats[0]].shape[0]
    for exact in (True, False):
        given, found = _along(arguments, [1] * count, exact=exact), _along(outputs, [1] * count, exact=False)
        if count and floats[0] in given:
            yield ImageWay(counted=floats[0], table=None, arguments=given, outputs=found)


def deal_of(way: ImageWay, leaves: Sequence[Any], index: int, ranks: int) -> Deal:
    """A rank's images of a call: the first ranks have the most.

    Raises:
        ValueError: an argument has other rows than its images say.
    """
    sizes = way.sizes(leaves)
    shares = [share_of(len(sizes), rank, ranks) for rank in range(ranks)]
    keeps = shares[index][0] < shares[index][1]
    first, end = shares[index] if keeps else shares[0]
    given = {}
    for position, rows in way.arguments.items():
        ends = _ends(sizes, rows)
        if ends is None or ends[-1] != leaves[position].shape[0]:
            raise ValueError(f"argument {position} has {leaves[position].shape[0]} rows for {len(sizes)} images")
        given[position] = ends[first], ends[end]
    counts = {}
    for slot, rows in way.outputs.items():
        if (ends := _ends(sizes, rows)) is not None:
            counts[slot] = tuple(ends[last] - ends[start] for start, last in shares)
    return Deal(given=given, counts=counts, keeps=keeps)


def whole_deal(outputs: Sequence[Any], index: int, ranks: int) -> Deal:
    """Of a call with one image: the first rank keeps it."""
    rows = {at: leaf.shape[0] for at, leaf in enumerate(outputs) if is_float(leaf) and leaf.dim() > 0}
    return Deal(given={}, counts={at: (n, *[0] * (ranks - 1)) for at, n in rows.items()}, keeps=index == 0)


def _is_table(leaf: Any) -> bool:
    integers = isinstance(leaf, Tensor) and not leaf.is_floating_point() and leaf.device != META
    return integers and leaf.dim() == 2 and leaf.shape[0] > 0 and 0 < leaf.shape[1] <= 4


def _along(leaves: Sequence[Any], sizes: Sequence[int], *, exact: bool) -> dict[int, Fraction | None]:
    """Leaves with rows for the images. Args: exact: one row for each image alone."""
    found: dict[int, Fraction | None] = {}
    for at, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or not sum(sizes):
            continue
        rows = Fraction(leaf.shape[0], sum(sizes))
        if leaf.shape[0] == len(sizes):
            found[at] = None
        elif not exact and rows and all((rows * size).denominator == 1 for size in sizes):
            found[at] = rows
    return found


def _ends(sizes: Sequence[int], rows: Fraction | None) -> list[int] | None:
    """Of the rows of each image, behind a leading 0; None: these are no whole numbers."""
    each = [Fraction(1) if rows is None else rows * size for size in sizes]
    return None if any(one.denominator != 1 for one in each) else [0, *map(int, accumulate(each))]
