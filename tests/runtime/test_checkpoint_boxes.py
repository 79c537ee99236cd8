"""Boxes against indexing of real tensors."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.runtime.checkpoint.boxes import Box, boxes_of_range, whole

SHAPES = st.lists(st.integers(1, 5), max_size=4)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], int, int]:
    shape = draw(SHAPES)
    count = whole(shape).count
    first = draw(st.integers(0, count))
    return shape, first, draw(st.integers(first, count))


@settings(max_examples=60)
@given(ranges())
def test_the_boxes_of_a_range_are_its_elements_in_order(case: tuple[list[int], int, int]) -> None:
    shape, first, end = case
    elements = torch.arange(whole(shape).count).view(shape)
    boxes = boxes_of_range(shape, first, end)
    found = [elements[box.within(whole(shape))].flatten() for box in boxes]
    assert torch.equal(torch.cat(found) if found else elements.new_empty(0), torch.arange(first, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=60)
@given(ranges(), ranges())
def test_what_two_boxes_share_is_in_both(one: tuple[list[int], int, int], other: tuple[list[int], int, int]) -> None:
    shape, first, end = one
    count = whole(shape).count
    second, stop = other[1] * count // (whole(other[0]).count + 1), other[2] * count // (whole(other[0]).count + 1)
    shared = 0
    for a in boxes_of_range(shape, first, end):
        for b in boxes_of_range(shape, second, stop):
            common = a.common(b)
            shared += common.count if common else 0
    assert shared == max(0, min(end, stop) - max(first, second))


def test_boxes_beside_each_other_share_nothing() -> None:
    assert Box((0, 0), (2, 2)).common(Box((0, 2), (2, 2))) is None
    assert Box((0, 0), (2, 3)).common(Box((1, 2), (2, 2))) == Box((1, 2), (1, 1))
    assert Box((), ()).common(Box((), ())) == Box((), ())
