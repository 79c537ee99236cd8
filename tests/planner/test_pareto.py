import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mmplan.planner.pareto import pareto_rows

ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), max_size=30)


def _run(rows: list[tuple[int, ...]], width: int) -> tuple[list[int], int | None]:
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 4)
    kept, given_up = pareto_rows(table[:, 0], table[:, 1:].sum(axis=1), table[:, 1:], width)
    return kept.tolist(), given_up


@given(ROWS)
def test_kept_rows_are_those_that_no_other_row_of_the_state_beats(rows: list[tuple[int, ...]]) -> None:
    kept, given_up = _run(rows, 1000)
    beaten = {
        row
        for row in rows
        for other in rows
        if other != row and other[0] == row[0] and all(a <= b for a, b in zip(other[1:], row[1:], strict=True))
    }
    assert sorted(rows[index] for index in kept) == sorted(set(rows) - beaten)
    assert given_up is None


@given(ROWS)
def test_a_narrow_front_names_the_best_row_it_gave_up(rows: list[tuple[int, ...]]) -> None:
    kept, given_up = _run(rows, 1)
    everything, _ = _run(rows, 1000)
    lost = [sum(rows[index][1:]) for index in everything if rows[index] not in {rows[k] for k in kept}]
    assert given_up == (min(lost) if lost else None)
