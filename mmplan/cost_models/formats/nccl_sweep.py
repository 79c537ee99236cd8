"""From the rows of a run to a sweep: which collective over how many ranks of how many nodes, with rows that can be.

busbw over algbw gives the number of ranks where no list of devices does, and convicts numbers that cannot be.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.cost_models.formats.nccl_collective import (
    LEAST_RATE,
    ONCE,
    TWICE,
    collective_of,
    factor_of,
    factor_range,
    share_of,
    usual_share,
)
from mmplan.cost_models.formats.nccl_log import RankLine, Run
from mmplan.cost_models.formats.nccl_rows import Block, Row
from mmplan.errors import InputError
from mmplan.scenario.document import counted

_MOST_RANKS = 200_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A message size with the seconds of each sample, and the busbw (GB/s) of the quickest."""

    size_bytes: int
    samples_s: tuple[float, ...]
    line: int

    @property
    def time_s(self) -> float:
        """The lower median: first calls that warm up are slower, none is faster than it can be."""
        return sorted(self.samples_s)[(len(self.samples_s) - 1) // 2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A run that can be used.

    Attributes:
        collective: None where several are possible.
        ranks: least and most that the rounded numbers allow; equal where they are known.
        nodes: None where nothing tells.
        factor: busbw over algbw.
        names: of the devices.
        notes, left_out, warnings: sentences on how it was recognised, on rows that were not taken, on what is odd.
    """

    run: Run
    collective: str | None
    ranks: tuple[int, int]
    nodes: int | None
    why_nodes: str
    factor: float
    points: tuple[Point, ...]
    names: tuple[str, ...]
    notes: tuple[str, ...]
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]


def sweep_of(run: Run, fastest_port_bytes_per_s: float) -> Sweep:
    """The sweep of a run.

    Raises:
        InputError: no rows, placeholders, one rank, ranks that each print a table, or numbers that contradict the
            collective or the number of ranks.
    """
    _refuse_empty(run)
    _refuse_single(run)
    listed, per_group, listing = _listed_ranks(run)
    collective, why = collective_of(run, listed)
    least = _least_ranks(run, collective)
    if listed is not None and least > listed:
        listing.append(f"the list of devices shows {listed} of {least} ranks or more: it is not whole")
        listed = per_group = None
    rows, left_out = _sound_rows(run, collective, listed)
    low, high, factor = _ranks(run, rows, collective, listed)
    if low == high == 1:
        raise InputError("one rank: nothing is sent, so nothing is measured", file=run.file, line=rows[0].line)
    shown = max((rank.rank for rank in run.ranks), default=0) + 1
    if shown > high:
        listing.append(f"the list of devices goes to rank {shown - 1}, busbw / algbw is that of {high} ranks")
    nodes, why_nodes = _nodes(run, rows, low, high, per_group, fastest_port_bytes_per_s)
    points = _points(rows)
    if not points:
        raise InputError("every row has 0 bytes", file=run.file, line=rows[0].line)
    return Sweep(
        run=run,
        collective=collective,
        ranks=(low, high),
        nodes=nodes,
        why_nodes=why_nodes,
        factor=factor,
        points=points,
        names=tuple(dict.fromkeys(rank.name for rank in run.ranks if rank.name)),
        notes=(*why, *listing),
        left_out=tuple(left_out),
        warnings=_warnings(run, rows),
    )


def _refuse_empty(run: Run) -> None:
    placeholder = next((item for item in run.damaged if item.placeholder), None)
    if placeholder is not None:
        raise InputError(placeholder.why, file=run.file, line=placeholder.line)
    if "cputime" in run.titles:
        why = "the times are the CPU's (-C 1), not those of the collective: run it without that option"
        raise InputError(why, file=run.file, line=run.titles_line)
    if run.rows:
        return
    if run.damaged:
        raise InputError(run.damaged[0].why, file=run.file, line=run.damaged[0].line)
    failed = f"; the run failed: {run.failures[0][1]}" if run.failures else ""
    line = run.failures[0][0] if run.failures else run.titles_line or run.line
    raise InputError(f"the log has no row of a table{failed}", file=run.file, line=line)


def _refuse_single(run: Run) -> None:
    """One rank, or the classic mistake: each process was started for itself."""
    firsts = [rank for rank in run.ranks if rank.rank == 0]
    processes = {(rank.host, rank.pid) for rank in firsts}
    if len(processes) > 1 and all(rank.rank == 0 for rank in run.ranks):
        told = f"{len(processes)} processes are rank 0, each for itself"
        message = f"{told}: build nccl-tests with MPI=1 and start it with mpirun or srun --mpi=pmix"
        raise InputError(message, file=run.file, line=firsts[1].line)
    large = [row for row in run.rows if row.blocks[0].algbw >= LEAST_RATE]
    listed_alone = len(run.ranks) == 1 and run.ranks[0].rank == 0
    if (large or listed_alone) and all(row.blocks[0].busbw == 0 for row in large or run.rows):
        row = (large or run.rows)[0]
        block = row.blocks[0]
        message = f"one rank: busbw is {block.busbw:g} GB/s beside algbw {block.algbw:g}, nothing is sent"
        raise InputError(message, file=run.file, line=row.line)


def _listed_ranks(run: Run) -> tuple[int | None, dict[str, int] | None, list[str]]:
    """How many ranks the list of devices has, and how many of a group on each host (None where it is not whole); what
    is odd about it."""
    if not run.ranks:
        return None, None, []
    by_rank: dict[int, RankLine] = {}
    for rank in run.ranks:
        known = by_rank.setdefault(rank.rank, rank)
        if (known.host, known.device) != (rank.host, rank.device):
            message = (
                f"rank {rank.rank} stands twice, on device {known.device} in line {known.line} and on {rank.device}"
            )
            raise InputError(message, file=run.file, line=rank.line)
    total = max(by_rank) + 1
    if total > _MOST_RANKS:
        raise InputError(f"rank {total - 1:,} in a list of devices", file=run.file, line=run.ranks[0].line)
    if len(by_rank) < total:
        return None, None, [f"the list of devices shows {len(by_rank)} of {total} ranks"]
    places = Counter((rank.host, rank.device) for rank in by_rank.values())
    ((place, times),) = places.most_common(1)
    notes = [f"{times} ranks share device {place[1]} of {place[0]}"] if times > 1 else []
    groups = {rank.group for rank in by_rank.values()}
    first = [rank for rank in by_rank.values() if rank.group == min(groups)]
    if len(groups) > 1:
        notes.append(f"{len(groups)} groups of {len(first)} ranks run at a time")
    return len(first), dict(Counter(rank.host for rank in first)), notes


def _sound_rows(run: Run, collective: str | None, listed: int | None) -> tuple[list[Row], list[str]]:
    """Rows whose busbw and count agree with those of the most; what was left out.

    Raises:
        InputError: most rows disagree with the collective and its ranks, or with each other.
    """
    notes = [f"line {item.line} left out: {item.why}" for item in run.damaged[:5] if not item.cut]
    cut = [item for item in run.damaged if item.cut]
    notes += [f"line {item.line} left out: the row is cut off" for item in cut[:3]]
    share = usual_share(run)
    kept: list[Row] = []
    odd: list[tuple[Row, str]] = []
    for row in run.rows:
        if row.count and share_of(row) != share:
            odd.append((row, f"{row.count:,} {row.dtype} are not {row.size_bytes:,} bytes x 1/{share}"))
        else:
            kept.append(row)
    if collective is not None and listed is not None:
        expected = factor_of(collective, listed)
        telling = [row for row in kept if row.blocks[0].algbw >= LEAST_RATE]
        wrong = [row for row in kept if not factor_range(row)[0] <= expected <= factor_range(row)[1]]
        for row in wrong:
            block = row.blocks[0]
            told = f"busbw {block.busbw} is not {expected:.4g} x algbw {block.algbw}"
            odd.append((row, f"{told} ({collective} of {listed} ranks)"))
        if 2 * len(wrong) > max(1, len(telling)):
            raise InputError(odd[-1][1], file=run.file, line=odd[-1][0].line)
        kept = [row for row in kept if row not in wrong]
    if len(odd) > len(kept):
        raise InputError(odd[0][1], file=run.file, line=odd[0][0].line)
    notes += [f"line {row.line} left out: {why}" for row, why in odd[:5]]
    return kept, notes


def _least_ranks(run: Run, collective: str | None) -> int:
    """What counts (a rank's part of the size) and busbw / algbw of most rows need at least."""
    if collective in ("all_gather", "reduce_scatter", "alltoall"):
        return usual_share(run)
    telling = sorted(factor_range(row) for row in run.rows if row.blocks[0].algbw >= LEAST_RATE)
    if collective not in TWICE or not telling:
        return 1
    return _inverse((2 - telling[len(telling) // 2][0]) / 2)


def _ranks(run: Run, rows: Sequence[Row], collective: str | None, listed: int | None) -> tuple[int, int, float]:
    """Least and most ranks, and the factor of the largest rate.

    Raises:
        InputError: no number of ranks gives what the rows say.
    """
    block = max((row.blocks[0] for row in rows), key=lambda one: one.algbw)
    factor = block.busbw / block.algbw if block.algbw > 0 else 1.0
    if listed is not None:
        return listed, listed, factor_of(collective, listed) if collective is not None else factor
    low, high = 0.0, math.inf
    for row in rows:
        least, most = factor_range(row)
        low, high = max(low, least), min(high, most)
    if low > high:
        raise _unlike(run, rows)
    shares = {share_of(row) for row in rows if row.count}
    if collective in ONCE or (collective is None and shares and min(shares) > 1):
        if len(shares) == 1 and min(shares) > 1:
            return min(shares), min(shares), (min(shares) - 1) / min(shares)
        return _inverse(1 - low), _inverse(1 - high), factor
    if collective in TWICE:
        if high < 1:
            raise _contradiction(run, rows, collective, 2)
        return max(2, _inverse((2 - low) / 2)), _inverse((2 - high) / 2), factor
    return 2, _MOST_RANKS, factor


def _unlike(run: Run, rows: Sequence[Row]) -> InputError:
    """Two rows whose busbw / algbw cannot both be."""
    most = max(rows, key=lambda row: factor_range(row)[0])
    least = min(rows, key=lambda row: factor_range(row)[1])
    here, there = (least, most) if least.line > most.line else (most, least)
    ratios = [row.blocks[0].busbw / row.blocks[0].algbw if row.blocks[0].algbw else 0.0 for row in (there, here)]
    message = f"busbw / algbw is {ratios[0]:.4g} in line {there.line} and {ratios[1]:.4g} here"
    return InputError(f"{message}: no number of ranks gives both", file=run.file, line=here.line)


def _contradiction(run: Run, rows: Sequence[Row], collective: str, ranks: int) -> InputError:
    row = max(rows, key=lambda one: one.blocks[0].algbw)
    block = row.blocks[0]
    ratio = block.busbw / block.algbw if block.algbw else 0.0
    told = f"busbw {block.busbw} is {ratio:.4g} x algbw {block.algbw}"
    message = f"{told}; {collective} has 2(n-1)/n, at least 1 and below 2"
    return InputError(message, file=run.file, line=row.line)


def _inverse(part: float) -> int:
    """n of 1/n, as far as it is a number of ranks."""
    return _MOST_RANKS if part <= 1.0 / _MOST_RANKS else max(1, round(1 / part))


def _nodes(
    run: Run,
    rows: Sequence[Row],
    low: int,
    high: int,
    per_group: dict[str, int] | None,
    fastest_port_bytes_per_s: float,
) -> tuple[int | None, str]:
    """Nodes by the list of devices, or by one process with all GPUs, or because no network is as fast."""
    if per_group is not None:
        if len(set(per_group.values())) > 1:
            told = ", ".join(f"{count} on {host}" for host, count in list(per_group.items())[:4])
            raise InputError(f"hosts with unlike numbers of ranks ({told})", file=run.file, line=run.ranks[0].line)
        return len(per_group), "by the list of devices"
    if low == high and run.gpus_per_process == low > 1:
        return 1, "as one process has all GPUs"
    if low == high and run.nodes is not None and 1 <= run.nodes <= low and low % run.nodes == 0:
        return run.nodes, "by NCCL's own lines"
    per_node = (run.tasks_per_node or 0) * (run.gpus_per_process or 1)
    if low == high and per_node > 0 and low % per_node == 0:
        return low // per_node, "by the tasks per node of the command"
    block = max((row.blocks[0] for row in rows), key=lambda one: one.busbw)
    most = high / 2 * fastest_port_bytes_per_s / 1e9
    if high <= 16 and block.busbw > most:
        return (
            1,
            f"as {block.busbw:g} GB/s of busbw are more than {high // 2} ports of {fastest_port_bytes_per_s / 1e9:g}",
        )
    return None, ""


def _points(rows: Sequence[Row]) -> tuple[Point, ...]:
    """One point a size. In place counts where its result was checked, or nothing was."""
    found: dict[int, list[Block]] = {}
    lines: dict[int, int] = {}
    for row in rows:
        if row.size_bytes <= 0:
            continue
        lines.setdefault(row.size_bytes, row.line)
        blocks = found.setdefault(row.size_bytes, [])
        blocks.append(row.blocks[0])
        if len(row.blocks) == 2 and not (row.blocks[0].checked and row.blocks[1].checked is False):
            blocks.append(row.blocks[1])
    return tuple(
        Point(size_bytes=size, samples_s=tuple(block.time_us * 1e-6 for block in blocks), line=lines[size])
        for size, blocks in sorted(found.items())
    )


def _warnings(run: Run, rows: Sequence[Row]) -> tuple[str, ...]:
    warnings = []
    if run.failures:
        line, text = run.failures[0]
        after = "after" if rows[-1].line < line else "before"
        warnings.append(f"the run failed {after} its rows (line {line}: {text}); the rows before are taken")
    wrong = sum(block.wrong or 0 for row in rows for block in row.blocks)
    if wrong or run.wrong_values:
        warnings.append(
            f"{counted(int(wrong or run.wrong_values), 'value')} of the results are wrong: data is corrupted"
        )
    rates = [block.busbw for row in run.rows for block in row.blocks]
    mean = sum(rates) / len(rates)
    if run.average is not None and abs(run.average - mean) > 0.02 * max(run.average, mean) + 0.01:
        warnings.append(
            f"the mean of the rows is {mean:.4g} GB/s, the log says {run.average:g}: rows are missing or changed"
        )
    return tuple(warnings)
