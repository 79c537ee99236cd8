"""Which labels of a dynamic program are worth keeping: per state, those that no other label beats in every column."""

import numpy as np

from mmplan.planner.upsets import IntArray


def pareto_rows(state: IntArray, bound: IntArray, columns: IntArray, width: int) -> tuple[IntArray, int | None]:
    """Rows that are not dominated within their state, at most `width` per state.

    Args:
        state: [rows] rows compete within equal states.
        bound: [rows] a value that grows with every column; the best rows by it are kept first.
        columns: [rows, columns] smaller is better; of equal rows the first one stays.

    Returns:
        Indices of the kept rows, ordered by state, then bound; and the least bound of a row that was dropped only
        because its state had `width` rows already (None when there was none).
    """
    total = columns.sum(axis=1)
    open_rows = np.lexsort((total, bound, state))
    kept: list[IntArray] = []
    for _ in range(width):
        if not len(open_rows):
            break
        first = np.flatnonzero(np.diff(state[open_rows], prepend=-1))
        leader = open_rows[first]
        kept.append(leader)
        leader_of = np.repeat(leader, np.diff(np.append(first, len(open_rows))))
        open_rows = open_rows[(columns[leader_of] > columns[open_rows]).any(axis=1)]
    rows = np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)
    rows = rows[np.lexsort((total[rows], bound[rows], state[rows]))]
    return rows, (int(bound[open_rows].min()) if len(open_rows) else None)
