"""Slices of rows between unlike meshes, without processes: what cp ranks cut off, and what they have of it together."""

import pytest
import torch

from mmplan.planner.border import Border
from mmplan.planner.mesh import Mesh
from mmplan.runtime.crossing import Crossing, crossing

ROWS = [5, 0, 3, 8]  # of the parts of a tensor


@pytest.mark.parametrize(("slices", "degree"), [(2, 2), (4, 4), (4, 2), (4, 1), (3, 3), (16, 2)])
def test_slices_of_all_ranks_are_the_tensor(slices: int, degree: int) -> None:
    """Each rank's slices at their place among zeros add up to all rows; all ranks have equally many."""
    whole = torch.arange(2.0 * sum(ROWS)).view(-1, 2) + 1
    ranks = [Crossing(slices=slices, others=len(ROWS), degree=degree, index=index) for index in range(degree)]
    cut = [rank.cut(whole, ROWS) for rank in ranks]
    assert {part.shape[0] for part in cut} == {sum(-(-count // slices) for count in ROWS) * slices // degree}
    placed = [rank.placed(part, ROWS, None) for rank, part in zip(ranks, cut, strict=True)]
    assert torch.equal(sum(placed, torch.zeros_like(whole)), whole)
    if degree == 1:  # nobody to gather from: what fills up the last slices goes
        assert torch.equal(ranks[0].whole(cut[0], ROWS, None), whole)


def test_a_tensor_without_rows_stays_one() -> None:
    (rank,) = [Crossing(slices=4, others=2, degree=1, index=0)]
    nothing = torch.zeros(0, 3)
    assert rank.cut(nothing, [0, 0]).shape == rank.whole(nothing, [0, 0], None).shape == (0, 3)


def test_only_unlike_meshes_with_cp_cut_rows() -> None:
    wide, cut = Mesh(modules=("vision",), tp=2, dp=2, first_rank=4), Mesh(modules=(), tp=2, cp=2, dp=1, first_rank=0)
    alike = Border(wide, wide), Border(cut, cut), Border(wide, Mesh(modules=(), tp=1, dp=4, first_rank=0))
    assert [crossing(border, 0, is_source=True) for border in alike] == [None] * 3
    there = crossing(Border(cut, wide), 3, is_source=True)
    assert there == Crossing(slices=2, others=2, degree=2, index=1, tp=2, tp_index=1)
    back = crossing(Border(cut, wide), 1, is_source=False)
    assert back == Crossing(slices=2, others=1, degree=1, index=0, tp=2, tp_index=1)
