"""The best placement under a cap on the load, by dynamic programming over downsets.

A state is (CPUs used, accelerators used, downset); its value is the busiest load so far. Downsets are sorted by work,
and taken in blocks: the loads of all stages that start at a block come from one matrix product. A state dies when its
value passes the cap, or when the rest cannot fit into the devices that are left.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from mmplan.planner.partition.groups import GroupProblem
from mmplan.planner.stopping import never
from mmplan.planner.upsets import BoolArray, FloatArray, IntArray

# Whole picoseconds as doubles: matrix products of doubles are fast, and exact below 2^53 ps = 9,007 s.

# [first, last] entries that are computed at once: 2 M are 16 MB a matrix, of which some ten are alive.
ENTRIES = 2_000_000
BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class Table:
    """Downsets of a problem, least work first, and what each holds; `member[i, g]`: downset i holds group g.

    `held[i, n]`: groups of net n in downset i. `cut[i, n]`: some, but not all. `cut_ps[i]`: cost of the nets it cuts.
    """

    problem: GroupProblem
    member: BoolArray
    work_ps: FloatArray
    cpu_ps: FloatArray
    size_bytes: FloatArray
    needs_cpu: FloatArray
    needs_accelerator: FloatArray
    held: npt.NDArray[np.int16]
    cut: BoolArray
    cut_ps: FloatArray
    net_ps: FloatArray

    @property
    def count(self) -> int:
        return len(self.member)

    @cached_property
    def cpu_speedup(self) -> float:
        """The most accelerator work that a CPU does in the time of one unit of CPU work."""
        pairs = zip(self.problem.accelerator_ps, self.problem.cpu_ps, strict=True)
        return max((work / cpu if cpu else np.inf for work, cpu in pairs if work), default=0.0)


def make_table(problem: GroupProblem, member: BoolArray) -> Table:
    """Sorts the downsets by work; the empty one comes first and all groups last."""
    work_ps = _sums(member, problem.accelerator_ps)
    member = member[np.lexsort((member.sum(axis=1), work_ps))]
    nets = np.zeros((problem.groups, len(problem.nets)), dtype=np.float32)
    for index, net in enumerate(problem.nets):
        nets[list(net.groups), index] = 1
    held = (member.astype(np.float32) @ nets).astype(np.int16)
    cut = (held > 0) & (held < nets.sum(axis=0))
    net_ps = np.array([net.cost_ps for net in problem.nets], dtype=np.float64)
    return Table(
        problem=problem,
        member=member,
        work_ps=_sums(member, problem.accelerator_ps),
        cpu_ps=_sums(member, problem.cpu_ps),
        size_bytes=_sums(member, problem.size_bytes),
        needs_cpu=_sums(member, problem.needs_cpu),
        needs_accelerator=_sums(member, problem.needs_accelerator),
        held=held,
        cut=cut,
        cut_ps=cut @ net_ps,
        net_ps=net_ps,
    )


def _sums(member: BoolArray, values: tuple[int, ...]) -> FloatArray:
    sums = member @ np.array(values, dtype=np.float64)
    return cast(FloatArray, sums)


def loads(table: Table, first: IntArray, last: IntArray) -> tuple[FloatArray, FloatArray]:
    """[first, last] load on an accelerator and on a CPU of the stage between two downsets; infinite where none is."""
    inside = _contains(table.member[first], table.member[last])
    accelerator = _grid(table.work_ps, first, last) + table.cut_ps[first, None] + table.cut_ps[None, last]
    accelerator -= _shared_cuts(table, first, last)
    barred = ~inside | (_grid(table.needs_cpu, first, last) > 0)
    if table.problem.capacity_bytes is not None:
        barred |= _grid(table.size_bytes, first, last) > table.problem.capacity_bytes
    accelerator[barred] = np.inf
    cpu = _grid(table.cpu_ps, first, last)
    cpu[~inside | (_grid(table.needs_accelerator, first, last) > 0)] = np.inf
    return accelerator, cpu


def _grid(values: FloatArray, first: IntArray, last: IntArray) -> FloatArray:
    difference: FloatArray = values[None, last] - values[first, None]
    return difference


def _contains(smaller: BoolArray, larger: BoolArray) -> BoolArray:
    """[smaller, larger] the second holds the first and more; only groups on which rows differ are compared."""
    telling = smaller.any(axis=0) & ~larger.all(axis=0)
    words = [_words(rows[:, telling]) for rows in (smaller, larger)]
    missing = np.zeros((len(smaller), len(larger)), dtype=np.bool_)
    for mine, theirs in zip(words[0].T, words[1].T, strict=True):
        missing |= (mine[:, None] & ~theirs[None, :]) != 0
    more: BoolArray = smaller.sum(axis=1)[:, None] < larger.sum(axis=1)[None, :]
    return ~missing & more


def _words(rows: BoolArray) -> npt.NDArray[np.uint64]:
    packed = np.packbits(rows, axis=1)
    packed = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8)))
    return np.ascontiguousarray(packed).view(np.uint64)


def _shared_cuts(table: Table, first: IntArray, last: IntArray) -> FloatArray:
    """[first, last] what `cut_ps` of both counts too much.

    A stage pays a net that either downset cuts, once, and not when it adds no group of it:
    paid = cut_I + cut_J - cut_I cut_J - [cut_I, cut_J, held_I = held_J].
    """
    nets = np.flatnonzero(table.cut[first].any(axis=0) & table.cut[last].any(axis=0))
    left, right = table.held[np.ix_(first, nets)], table.held[np.ix_(last, nets)]
    cut_left, cut_right = table.cut[np.ix_(first, nets)], table.cut[np.ix_(last, nets)]
    columns = [(cut_left, cut_right)]
    for value in range(1, int(left.max(initial=0)) + 1):
        columns.append((cut_left & (left == value), cut_right & (right == value)))
    weighted = np.concatenate([side * table.net_ps[nets] for side, _ in columns], axis=1)
    other = np.concatenate([side for _, side in columns], axis=1).astype(np.float64)
    useful = weighted.any(axis=0) & other.any(axis=0)
    product: FloatArray = weighted[:, useful] @ other[:, useful].T
    return product


@dataclass(frozen=True, kw_only=True)
class Search:
    """What one cap found: `best[c, a, i]`, the least busiest load of c CPUs and a accelerators that hold downset i."""

    best: FloatArray
    ended: bool

    @property
    def value_ps(self) -> float:
        """The optimum, infinite when it is above the cap."""
        return float(self.best[:, :, -1].min())


def search_under(table: Table, cap_ps: float, stop: Callable[[], bool] = never) -> Search:
    """All states within the cap; `ended` when `stop` said so first."""
    problem = table.problem
    best = np.full((problem.cpus + 1, problem.accelerators + 1, table.count), np.inf)
    best[0, 0, 0] = 0.0
    fits = np.stack([_rest_fits(table, cap_ps, cpus, used) for cpus, used in _device_counts(problem)])
    fits = fits.reshape(best.shape)
    reach_ps = cap_ps * max(1.0, table.cpu_speedup if problem.cpus else 1.0)
    hopeful = np.flatnonzero(fits.any(axis=(0, 1)))
    block = min(BLOCK, ENTRIES // len(hopeful) + 1)
    for start in range(0, len(hopeful), block):
        if stop():
            return Search(best=best, ended=True)
        first = hopeful[start : start + block]
        end = np.searchsorted(table.work_ps[hopeful], table.work_ps[first[-1]] + reach_ps, side="right")
        _push(table, best, fits, cap_ps, first, hopeful[start : int(end)])
    return Search(best=best, ended=False)


def _device_counts(problem: GroupProblem) -> Iterator[tuple[int, int]]:
    return ((cpus, used) for cpus in range(problem.cpus + 1) for used in range(problem.accelerators + 1))


def _rest_fits(table: Table, cap_ps: float, cpus: int, accelerators: int) -> BoolArray:
    """Downsets whose rest the devices that are left can take, as far as sums tell."""
    problem = table.problem
    cpus_left, left = problem.cpus - cpus, problem.accelerators - accelerators
    rest_ps = table.work_ps[-1] - table.work_ps
    if cpus_left:
        room_ps = cap_ps * left + cap_ps * cpus_left * table.cpu_speedup
        fits: BoolArray = rest_ps <= room_ps * (1 + 1e-12)
        return fits
    fits = (rest_ps + table.cut_ps <= cap_ps * left) & (table.needs_cpu == table.needs_cpu[-1])
    if problem.capacity_bytes is not None:
        fits &= table.size_bytes[-1] - table.size_bytes <= float(problem.capacity_bytes) * left
    return fits


def _push(table: Table, best: FloatArray, fits: BoolArray, cap_ps: float, first: IntArray, last: IntArray) -> None:
    """Extends the states at downsets `first` by one stage each, in order of devices used: a block holds chains."""
    problem = table.problem
    accelerator, cpu = loads(table, first, last)
    for cpus, used in sorted(_device_counts(problem), key=sum):
        values = best[cpus, used, first]
        rows = np.flatnonzero((values <= cap_ps) & fits[cpus, used, first])
        if not len(rows):
            continue
        for load, more_cpus, more_used in ((accelerator, cpus, used + 1), (cpu, cpus + 1, used)):
            if more_cpus <= problem.cpus and more_used <= problem.accelerators:
                reached = np.maximum(values[rows, None], load[rows]).min(axis=0)
                reached[reached > cap_ps] = np.inf
                best[more_cpus, more_used, last] = np.minimum(best[more_cpus, more_used, last], reached)


def trace(table: Table, search: Search) -> list[tuple[int, bool]]:
    """(downset, on CPU) after each stage of a placement of value `search.value_ps`, first stage first."""
    best = search.best
    flat = int(np.argmin(best[:, :, -1]))
    cpus, used = divmod(flat, best.shape[1])
    here, value = table.count - 1, float(best[cpus, used, -1])
    stages: list[tuple[int, bool]] = []
    while here:
        before = np.arange(here)
        accelerator, cpu = loads(table, before, np.array([here]))
        options = []
        if used:
            options.append((np.maximum(best[cpus, used - 1, :here], accelerator[:, 0]), False))
        if cpus:
            options.append((np.maximum(best[cpus - 1, used, :here], cpu[:, 0]), True))
        reached, on_cpu = min(options, key=lambda option: float(option[0].min()))
        assert float(reached.min()) <= value
        stages.append((here, on_cpu))
        here = int(np.argmin(reached))
        cpus, used = (cpus - 1, used) if on_cpu else (cpus, used - 1)
        value = float(best[cpus, used, here])
    return stages[::-1]
