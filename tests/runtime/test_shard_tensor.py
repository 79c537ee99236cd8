"""A tensor laid on a mesh is the same tensor, whatever its rows, and gradients come back to the bit."""

from collections import Counter
from itertools import combinations_with_replacement, pairwise
from pathlib import Path
from typing import Any

import pytest
from case_processes import run_on_ranks
from hypothesis import given
from hypothesis import strategies as st
from shard_tensor_cases import LENGTHS, PROCESSES, run_shard_tensor_cases

from mmplan.runtime.row_cuts import chunk_offsets, cut_lengths, overlaps, row_offsets
from mmplan.runtime.row_spans import placed_spans, pooled_lengths, pooled_offsets, pooled_spans

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_on_ranks(run_shard_tensor_cases, PROCESSES, Path(tmp_path_factory.mktemp("shard_tensor")))


@pytest.mark.distributed
def test_every_layout_of_every_dtype_gives_the_tensor_back_to_the_bit(results: Results) -> None:
    for result in results:
        assert [name for name, exact in result["round_trips"].items() if not exact] == []


@pytest.mark.distributed
def test_moving_rows_ends_where_laying_them_there_does(results: Results) -> None:
    for result in results:
        assert [name for name, exact in result["moves"].items() if not exact] == []


@pytest.mark.distributed
def test_gradients_of_every_path_are_those_of_one_process(results: Results) -> None:
    for result in results:
        for name, error in result["gradients"].items():
            assert error < 1e-6, name


@pytest.mark.distributed
def test_rows_and_columns_lie_on_two_axes(results: Results) -> None:
    # seven images of 30 rows: 7 + 1 + 0 = 8 and 22, or 20 and 10, the smaller maximum; six columns over tp = 2
    assert [result["two_axes"]["local"] for result in results] == [(20, 3), (20, 3), (10, 3), (10, 3)]
    for result in results:
        assert result["two_axes"]["exact"] and result["two_axes"]["regular"]
        assert result["two_axes"]["gradient"] < 1e-6


@pytest.mark.distributed
def test_features_of_two_encoders_take_their_places_among_text_on_four_ranks(results: Results) -> None:
    """Ranks have places 0 to 511, to 1023, to 1535, to 2047. Image 0 has 450 to 646: 62 rows stay on rank 0, and 135 go
    to rank 1; image 1 has 1400 to 1596, of which rank 1 sends 136 to rank 2 and 61 to rank 3. Gradients come back."""
    for result in results:
        assert result["placed"]["exact"]
        assert result["placed"]["gradient"] < 1e-6
    rows = [(135, 0), (197, 135), (0, 136), (0, 61)]
    assert [result["placed"]["sent_bytes"] for result in results] == [[n * 1024 * 4 for n in pair] for pair in rows]
    assert results[0]["placed"]["refusals"] == [
        "vision: 1 places for 2 samples",
        "vision: 197 rows from place 450 on end at 647, behind place 600 of others",
        "vision: 197 rows from place 1900 on end at 2097, of 2048 places from 0 on",
    ]


@pytest.mark.distributed
def test_frames_are_pooled_where_they_are_and_cut_groups_sent_as_sums(results: Results) -> None:
    """The cuts at 130 and 385 go through groups of 4 frames, that at 256 does not: two partial sums of a row each, and
    two rows of gradients back."""
    for result in results:
        found = result["pooled"]
        assert max(found["error"], found["gradient"], found["uneven"]) < 1e-6
        assert found["uneven lengths"] == (2, 0, 0, 4, 1, 1, 0)
    assert [result["pooled"]["local"] for result in results] == [(33, 32), (31, 32), (33, 32), (31, 32)]
    row = 32 * 4
    assert [result["pooled"]["sent_bytes"] for result in results] == [[0, row], [row, 0], [0, row], [row, 0]]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    ranks=st.integers(1, 4),
    stride=st.integers(1, 5),
    gap=st.integers(0, 3),
)
def test_every_row_goes_to_one_place_and_every_group_has_all_of_its_rows(
    lengths: list[int], ranks: int, stride: int, gap: int
) -> None:
    total = sum(lengths)
    cut = row_offsets("tokens", lengths, ranks)
    firsts = [sum(lengths[:i]) + gap * (i + 1) for i in range(len(lengths))]
    target = chunk_offsets(total + gap * (len(lengths) + 1), ranks)
    places = [
        (cut[a] + span.source + row, target[b] + span.target + row)
        for a in range(ranks)
        for b in range(ranks)
        for span in placed_spans(lengths, cut, firsts, target, a, b)
        for row in range(span.rows)
    ]
    expected = [place + row for place, length in zip(firsts, lengths, strict=True) for row in range(length)]
    assert sorted(places) == list(zip(range(total), expected, strict=True))
    groups = Counter[int]()
    owners = pooled_offsets(lengths, cut, stride)
    for a in range(ranks):
        for b in range(ranks):
            for _, rows, group in pooled_spans(lengths, cut, stride, a, b):
                groups[owners[b] + group] += rows
    assert groups == dict.fromkeys(range(sum(pooled_lengths(lengths, stride))), stride)


@pytest.mark.distributed
def test_ranks_have_the_samples_that_the_cut_says(results: Results) -> None:
    own = [result["own"] for result in results]
    assert [ranks["samples"] for ranks in own] == [(7, 1), (12,), (3, 5), (2,)]  # the empty image has no rows
    assert [ranks["tokens"] for ranks in own] == [(7, 1), (12,), (3, 5, 2), ()]
    assert [ranks["rows"] for ranks in own] == [(), (7, 1, 12, 1), (1,), (1, 5, 2)]


@pytest.mark.distributed
def test_rows_of_unequal_count_stay_where_they_are_held(results: Results) -> None:
    for rank, result in enumerate(results):
        found = result["held"]
        assert found["offsets"] == (0, 0, 2, 6, 12) and found["lengths"] == (0, 0, 1, 1, 2, 2, 3, 3)
        assert found["whole"] == [1.0] * 2 + [2.0] * 4 + [3.0] * 6
        assert (
            found["gradient"] == [float(row) for row in range(12)][found["offsets"][rank] : found["offsets"][rank + 1]]
        )
    assert max(sum(result["held"]["even"]) for result in results) == 4  # 1 + 1 + 2, 2, 3, 3


@pytest.mark.distributed
def test_a_wrong_layout_is_refused_in_one_sentence_with_its_numbers(results: Results) -> None:
    for result in results:
        assert result["refusals"] == {
            "placements": "1 placements for a mesh of 2 axes",
            "sum": "vision: rows 1 + 2 + 3 + 4 = 10, and the tensor has 30",
            "counts": "vision: rows (15, 15) are 2 counts, and the axis has 4 ranks with 0 rows or more",
            "lengths": "vision: 2 lengths = 15 rows, the tensor has 30",
            "two": "2 axes of the mesh would deal the rows; one may be Ragged",
            "rows twice": "Shard(0) cuts the rows that another axis deals; one axis may have them",
            "dim": "vision: Shard(2) of a tensor of 2 dims, 0 to 1",
            "partial": "P(sum) is no layout of a tensor's values; use Shard, Replicate or Ragged",
            "modality": "modality 'vison' is none of vision, audio, text, speech",
            "features": "vision: sample 1 is (30, 2) and sample 0 (30, 6), "
            "and samples may differ in their first dim alone",
            "unlike ranks": "vision rows are (6,) in torch.float32 on rank 0 of the axis "
            "and (2,) in torch.float32 on rank 2",
            "held": "rows that are laid out already are held as they are; 'held' is for shard_tensor",
            "cut": "a cut is 'samples', 'tokens', 'held' or rows of each rank, not 'pixels'",
            "scalar": "a vision tensor of 0 dims has no rows to lay on a mesh",
        }


@given(st.lists(st.integers(0, 9), max_size=7), st.integers(1, 4))
def test_no_cut_of_whole_samples_has_a_smaller_largest_rank(lengths: list[int], ranks: int) -> None:
    def largest(offsets: list[int]) -> int:
        return max(end - first for first, end in pairwise(offsets))

    ends = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    all_cuts = combinations_with_replacement(ends, ranks - 1)
    assert largest(row_offsets("tokens", lengths, ranks)) == min(largest([0, *cut, ends[-1]]) for cut in all_cuts)


@given(st.lists(st.integers(0, 9), max_size=7), st.integers(1, 4))
def test_what_ranks_send_is_what_others_receive_and_all_of_it(lengths: list[int], ranks: int) -> None:
    source, target = (row_offsets(cut, lengths, ranks) for cut in ("samples", "tokens"))  # type: ignore[arg-type]
    moved = [overlaps(source, target, rank) for rank in range(ranks)]
    for rank, (sent, received) in enumerate(moved):
        assert received == [moved[peer][0][rank] for peer in range(ranks)]
        assert sum(sent) == source[rank + 1] - source[rank] and sum(received) == target[rank + 1] - target[rank]
        assert sum(cut_lengths(lengths, target[rank], target[rank + 1])) == sum(received)
    assert sum(LENGTHS) == 30
