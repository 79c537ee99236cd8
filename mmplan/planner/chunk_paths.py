"""Cuts into chunks whose busiest chunk works no longer than a limit: one that fits, or a proof that none does.

A cut is a path: chunk c leads from one group to a later one. Memory couples the chunks of a rank. With a price per byte
on each rank the cheapest path is found by dynamic programming; where it costs more than the room of all ranks is worth,
no path fits (Lagrangian relaxation: any prices prove). Prices rise on ranks where the cheapest path does not fit, round
by round.
"""

from dataclasses import dataclass

import numpy as np

from mmplan.planner.chunk_cut import ChunkValue, boundary_lags, evaluate_chunks
from mmplan.planner.cut_problem import CutProblem
from mmplan.planner.schedules.in_flight import held_by_chunks
from mmplan.planner.upsets import FloatArray, IntArray

STEP = 4.0  # of prices, in powers of e per room exceeded; less in later rounds
# What prefers even chunks among equals, and rounding, hide so much of all memory from a proof.
HIDDEN = 1e-6
EVEN = 1e-3  # weight of even chunks beside lags, in limits


@dataclass(frozen=True, slots=True)
class Proved:
    """No cut has all chunks within the limit and every rank within its memory."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One that fits."""

    ends: tuple[int, ...]
    value: ChunkValue


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tables:
    """[end, size - 1] of the chunk of so many groups before `end`: [kind] whether it is within a limit, what it keeps
    of a microbatch and its states; `even`: the lag in front of it and a preference for even chunks."""

    within: FloatArray  # 0 or infinite
    kept_bytes: FloatArray
    state_bytes: FloatArray
    even: FloatArray
    before: IntArray  # [end, size - 1] the first group, 0 where there is none


@dataclass(frozen=True, kw_only=True, slots=True)
class Paths:
    """Of a problem at one level of recomputation: [kind, groups + 1] sums of work, kept activations and states over the
    first groups; `room_bytes` and `moments` (see `held_by_chunks`) by rank; `lag_ns` of a cut before each group."""

    problem: CutProblem
    chunks: int
    work_ns: IntArray
    kept_bytes: IntArray
    state_bytes: IntArray
    kind_of: IntArray
    room_bytes: FloatArray
    moments: tuple[FloatArray, ...]
    lag_ns: FloatArray

    @classmethod
    def of(cls, problem: CutProblem, chunks: int) -> "Paths":
        kinds = problem.kinds or (problem.kind(0),)
        levels = [problem.choices[kind.levels[0]] for kind in kinds]
        kind_of = np.array(problem.kind_of or (0,) * problem.stages, dtype=np.int64)
        capacity = [kind.capacity_bytes - level.working_bytes for kind, level in zip(kinds, levels, strict=True)]
        of_rank = [held_by_chunks(problem.stages, chunks, problem.microbatches, r) for r in range(problem.stages)]
        return cls(
            problem=problem,
            chunks=chunks,
            work_ns=_sums([level.work_ns for level in levels]),
            kept_bytes=_sums([level.kept_bytes for level in levels]),
            state_bytes=_sums([level.state_bytes or problem.state_bytes for level in levels]),
            kind_of=kind_of,
            room_bytes=np.array(capacity, dtype=np.float64)[kind_of],
            moments=tuple(np.array(moments, dtype=np.float64) for moments in of_rank),
            lag_ns=boundary_lags(problem).astype(np.float64),
        )

    @property
    def most_ns(self) -> int:
        """No chunk works longer."""
        return int(self.work_ns[..., -1].max())

    def within(self, limit_ns: int, rounds: int) -> Cut | Proved | None:
        """A cut within the limit, a proof that there is none, or None where neither is found in so many rounds."""
        tables = self._tables(limit_ns) if limit_ns >= 1 and self.room_bytes.min() > 0 else None
        if tables is None:
            return Proved()
        ranks, rank_of = self.problem.stages, np.arange(self.problem.stages * self.chunks) % self.problem.stages
        free = tables.even + tables.within[self.kind_of]
        path = self._cheapest(free[rank_of], tables)
        tie = tables.even * (HIDDEN / (self.chunks * max(1.0, float(tables.even.max()))))
        prices, at = np.ones(ranks), [int(moments.sum(axis=1).argmax()) for moments in self.moments]
        for turn in range(1, rounds + 1):
            if path is None:
                return Proved()
            used = self._used(path, tables)
            over = np.array([float(one.max()) for one in used]) / self.room_bytes - 1
            if over.max() <= 0 or turn == 1:
                value = evaluate_chunks(self.problem, self.chunks, path)
                if value.fits and value.busiest_ns <= limit_ns:
                    return Cut(path, value)
            at = [int(one.argmax()) for one in used]
            if turn > 1:
                prices *= np.exp(STEP / turn**0.5 * over)
                prices /= prices.mean()
            costs = self._priced(tables, prices, at) + tie
            path = self._cheapest(costs, tables)
            if path is not None and _spent(costs, path) > ranks * (1 + 2 * HIDDEN):
                return Proved()
        return None

    def _tables(self, limit_ns: int) -> _Tables | None:
        """None where some group alone is beyond the limit."""
        groups, quickest = self.problem.groups, self.work_ns.min(axis=0)
        reach = np.searchsorted(quickest, quickest[:-1] + limit_ns, side="right") - 1 - np.arange(groups)
        if reach.min() < 1:
            return None
        end, sizes = np.arange(groups + 1)[:, None], np.arange(1, int(reach.max()) + 1)
        before = np.maximum(end - sizes, 0)
        work_ns, kept_bytes, state_bytes = (
            (sums[:, end] - sums[:, before]).astype(np.float64)
            for sums in (self.work_ns, self.kept_bytes, self.state_bytes)
        )
        return _Tables(
            within=np.where((work_ns <= limit_ns) & (end >= sizes), 0.0, np.inf),
            kept_bytes=kept_bytes,
            state_bytes=state_bytes,
            even=self.lag_ns[before] + EVEN * limit_ns * np.square(np.minimum(work_ns.min(axis=0) / limit_ns, 1.0)),
            before=before,
        )

    def _priced(self, tables: _Tables, prices: FloatArray, at: list[int]) -> FloatArray:
        """[chunk, end, size - 1] what its memory costs, in rooms of a rank; infinite where it is too much alone."""
        alive = np.array([moments[one] for moments, one in zip(self.moments, at, strict=True)])  # [rank, loop]
        most = np.array([moments.max(axis=0) for moments in self.moments])
        room = self.room_bytes[:, None, None]
        kept, state = tables.kept_bytes[self.kind_of], tables.state_bytes[self.kind_of]
        costs = []
        for loop in range(self.chunks):
            alone = state + most[:, loop, None, None] * kept > room
            price = prices[:, None, None] / room * (state + alive[:, loop, None, None] * kept)
            costs.append(np.where(alone, np.inf, price) + tables.within[self.kind_of])
        return np.concatenate(costs)

    def _used(self, path: tuple[int, ...], tables: _Tables) -> list[FloatArray]:
        """[rank][moment] bytes."""
        end, size = np.array(path), np.diff(np.array((0, *path)))
        kind = np.tile(self.kind_of, self.chunks)
        kept, state = (of[kind, end, size - 1] for of in (tables.kept_bytes, tables.state_bytes))
        ranks = self.problem.stages
        return [moments @ kept[rank::ranks] + state[rank::ranks].sum() for rank, moments in enumerate(self.moments)]

    def _cheapest(self, costs: FloatArray, tables: _Tables) -> tuple[int, ...] | None:
        """Ends of the chunks of the cheapest path, None where there is none."""
        groups, ends = self.problem.groups, np.arange(self.problem.groups + 1)
        best = np.full(groups + 1, np.inf)
        best[0] = 0.0
        sizes = np.zeros((len(costs), groups + 1), dtype=np.int64)
        for chunk, cost in enumerate(costs):
            total = best[tables.before] + cost
            chosen = total.argmin(axis=1)
            sizes[chunk], best = chosen + 1, total[ends, chosen]
        if not np.isfinite(best[groups]):
            return None
        found = [groups]
        for chunk in range(len(costs) - 1, 0, -1):
            found.append(found[-1] - int(sizes[chunk, found[-1]]))
        return tuple(reversed(found))


def _spent(costs: FloatArray, path: tuple[int, ...]) -> float:
    end, size = np.array(path), np.diff(np.array((0, *path)))
    return float(costs[np.arange(len(path)), end, size - 1].sum())


def _sums(values: list[tuple[int, ...]]) -> IntArray:
    """[kind, groups + 1] sums over the first groups."""
    sums: IntArray = np.cumsum(np.array([(0, *of_kind) for of_kind in values], dtype=np.int64), axis=1)
    return sums
