"""Boxes: rectangular parts of a tensor, by the offset of their first element and their shape.

Whatever part of a parameter a rank holds, a slice of columns or a share of a flat buffer, is a list of boxes of the
whole parameter. So what one plan has written another can read: it takes what its own boxes and the written ones share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """Elements `offset[d]` to `offset[d] + shape[d]` along every dim; a scalar has no dims."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def moved(self, by: Sequence[int]) -> "Box":
        return Box(tuple(a + b for a, b in zip(self.offset, by, strict=True)), self.shape)

    def common(self, other: "Box") -> "Box | None":
        """What both have; None where that is nothing."""
        first = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        sizes = (
            min(a + m, b + n) - start
            for a, m, b, n, start in zip(self.offset, self.shape, other.offset, other.shape, first, strict=True)
        )
        shape = tuple(sizes)
        return Box(first, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Where it lies in a tensor that holds `outer`."""
        places = zip(self.offset, self.shape, outer.offset, strict=True)
        return tuple(slice(a - b, a - b + size) for a, size, b in places)


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def boxes_of_range(shape: Sequence[int], first: int, end: int) -> list[Box]:
    """Elements `first` to `end` of a tensor in row-major order as boxes, in that order; at most 2 for each dim."""
    if first >= end:
        return []
    if len(shape) <= 1:
        return [Box((first,), (end - first,))] if shape else [Box((), ())]
    row = math.prod(shape[1:])
    boxes = []
    while first < end:
        index, inside = divmod(first, row)
        if inside == 0 and end - first >= row:  # whole rows
            count = (end - first) // row
            boxes.append(Box((index, *(0 for _ in shape[1:])), (count, *shape[1:])))
            first += count * row
            continue
        stop = min(row, inside + end - first)
        inner = boxes_of_range(shape[1:], inside, stop)
        boxes += [Box((index, *box.offset), (1, *box.shape)) for box in inner]
        first += stop - inside
    return boxes
