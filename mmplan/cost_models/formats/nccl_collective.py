"""Which collective a table is of: by the program that the text names, by columns, counts and busbw, or by its file.

`busbw = f x algbw`, where f is 2(n-1)/n for all-reduce, (n-1)/n for gathers, scatters and all-to-alls, 1 for the others
(nccl-tests, doc/PERFORMANCE.md).
"""

import math
from collections import Counter

from mmplan.cost_models.formats.nccl_log import Run
from mmplan.cost_models.formats.nccl_rows import TYPE_BYTES, Row

TWICE = ("all_reduce", "all_reduce_bias")
ONCE = ("all_gather", "reduce_scatter", "alltoall", "alltoallv", "gather", "scatter", "hypercube")
LEAST_RATE = 1.0  # GB/s: below it two decimals say too little of a ratio


def factor_of(collective: str, ranks: int) -> float:
    """busbw over algbw."""
    if collective in TWICE:
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in ONCE else 1.0


def collective_of(run: Run, listed: int | None) -> tuple[str | None, list[str]]:
    """By the program that the text names, else by columns, counts and factor, else by the name of the file."""
    if len(run.named) == 1:
        return run.named[0], []
    share = usual_share(run)
    usual = Counter((row.redop, row.root) for row in run.rows).most_common(1)[0][0]
    alike = [row for row in run.rows if share_of(row) == share and (row.redop, row.root) == usual]
    large = max(alike or run.rows, key=lambda row: row.blocks[0].algbw)
    block = large.blocks[0]
    ratio = block.busbw / block.algbw if block.algbw >= LEAST_RATE else None
    possible = _by_columns(run, large, ratio)
    if listed is not None and ratio is not None:
        low, high = factor_range(large)
        possible = [name for name in possible if low <= factor_of(name, listed) <= high] or possible
    if len(possible) == 1:
        return possible[0], [f"{possible[0]} by its columns and busbw / algbw"]
    plain = run.file.name.lower().replace("_", "").replace("-", "")
    in_name = [name for name in possible if name.replace("_", "") in plain]
    if in_name:
        kept = max(in_name, key=len)
        return kept, [f"{kept} by the name of the file; the table would fit {', '.join(possible)}"]
    return None, [f"the table fits {', '.join(possible) or 'no collective'}"]


def _by_columns(run: Run, large: Row, ratio: float | None) -> list[str]:
    titled = run.titles
    old = bool(titled) and "error" in titled
    rooted = large.root is not None and (large.root >= 0 or old)
    summed = large.redop not in (None, "none")
    if rooted:
        possible = ["reduce"] if summed else ["broadcast", "gather", "scatter"]
    elif old and "redop" in titled and large.redop is None:
        possible = ["alltoall"]  # printed the column and left it blank
    elif summed:
        possible = ["all_reduce", "reduce_scatter", "sendrecv"]
    else:
        possible = ["all_gather", "alltoall", "sendrecv"]
    if ratio is None:
        return possible
    share = large.size_bytes / (large.count * TYPE_BYTES[large.dtype]) if large.count else 1.0
    fits = {
        "all_reduce": ratio > 0.99 and share < 1.5,
        "reduce_scatter": ratio < 1 and share > 1.5,
        "sendrecv": abs(ratio - 1) < 0.01 and share < 1.5,
        "all_gather": ratio < 1 and share > 1.5,
        "alltoall": ratio < 1 and share > 1.5,
        "reduce": abs(ratio - 1) < 0.01,
        "broadcast": abs(ratio - 1) < 0.01,
        "gather": ratio < 0.999,
        "scatter": ratio < 0.999,
    }
    kept = [name for name in possible if fits[name]]
    if not old and set(kept) in ({"all_gather", "alltoall"}, {"all_reduce", "sendrecv"}):
        checked = [row.blocks[1].checked for row in run.rows if len(row.blocks) == 2 and row.blocks[0].checked]
        if checked and all(checked):
            return kept[:1]
        if checked and all(one is False for one in checked):
            return kept[1:]  # all-to-alls and messages have no result in place
    return kept


def factor_range(row: Row) -> tuple[float, float]:
    """What busbw / algbw can be, by both blocks, as two decimals round them; 0.1 % for what was computed before."""
    low, high = 0.0, math.inf
    for block in row.blocks:
        if block.algbw < 0.01 and block.busbw < 0.01:
            continue
        least = max(block.busbw - 0.0051, 0.0) / (block.algbw + 0.0051)
        most = (block.busbw + 0.0051) / max(block.algbw - 0.0051, 1e-9)
        low, high = max(low, least), min(high, most)
    return low, high


def share_of(row: Row) -> int:
    """Size over the bytes of `count` elements: the ranks for gathers and scatters, else 1."""
    if row.count == 0:
        return 1
    return max(1, round(row.size_bytes / (row.count * TYPE_BYTES[row.dtype])))


def usual_share(run: Run) -> int:
    """That of the most rows, as one of them may be damaged."""
    shares = Counter(share_of(row) for row in run.rows if row.count)
    return shares.most_common(1)[0][0] if shares else 1
