"""The best cut into several chunks per rank: the least limit on the busiest chunk within which a cut fits.

J grows with the busiest chunk far more than with anything else, so limits are tried from a proven floor up (see
`chunk_paths` for one limit). Small problems are solved by trying every cut.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb

import numpy as np

from mmplan.planner.chunk_cut import boundary_lags, each_level, evaluate_chunks, repeats
from mmplan.planner.chunk_paths import Cut, Paths, Proved
from mmplan.planner.cut_problem import CutProblem
from mmplan.planner.cut_result import CutResult
from mmplan.planner.first_bounds import NEVER
from mmplan.planner.floors import bottleneck_floors, finish_floor
from mmplan.planner.quantise import lowered_ns, scaled_ns
from mmplan.planner.stopping import never

MOST_CUTS = 1_000  # so many are all tried: some 0.2 s
# Limits over the floor that are tried until one gives a cut; between it and the last without, a lesser one is sought.
GROWTH = (1.0, 1.002, 1.005, 1.01, 1.02, 1.04, 1.07, 1.12, 1.2, 1.35, 1.6, 2.0, 3.0, 6.0, 1e4)
HALVINGS = 8
ROUNDS, DECISIVE_ROUNDS = 12, 200  # of prices per limit; where a proof there would end the search


def solve_chunks(
    problem: CutProblem,
    chunks: int,
    *,
    cutoff_ns: int | None = None,
    tolerance: float = 0.0,
    floor_ns: int = 0,
    stop: Callable[[], bool] = never,
) -> CutResult:
    """A cut below `cutoff_ns`, not exhausted where it is proved to be within `tolerance` of the best.

    `stage_of` of the result are chunks. With no cut in it and not exhausted, no cut is below `bound_ns`, which is
    within `tolerance` of the cutoff; where there is none, no cut fits at all.

    Args:
        problem: whose stages are the ranks.
        floor_ns: in no cut is the busiest chunk less busy.
    """
    best: CutResult | None = None
    bounds_ns, exhausted = [], False
    for at_level in each_level(problem):
        below_ns = cutoff_ns if best is None else best.objective_ns
        found = _at_level(at_level, chunks, below_ns, tolerance, floor_ns, stop)
        exhausted |= found.exhausted
        bounds_ns.append(found.bound_ns)
        best = best if found.stage_of is None else found
    bound_ns = min(bounds_ns)
    if best is None:
        return CutResult(stage_of=None, objective_ns=None, bound_ns=bound_ns, exhausted=exhausted)
    assert best.objective_ns is not None
    bound_ns = min(bound_ns, best.objective_ns)
    return replace(best, bound_ns=bound_ns, exhausted=bound_ns < lowered_ns(best.objective_ns, tolerance))


def _at_level(
    problem: CutProblem,
    chunks: int,
    cutoff_ns: int | None,
    tolerance: float,
    floor_ns: int,
    stop: Callable[[], bool],
) -> CutResult:
    """The same at one level of recomputation; NEVER bounds what does not fit."""
    count, groups = problem.stages * chunks, problem.groups
    if count > groups or comb(groups - 1, count - 1) <= MOST_CUTS:
        return _best_of_all(problem, chunks, cutoff_ns)
    lags_ns = np.sort(boundary_lags(problem)[1:groups])[: count - 1]
    search = _Search(
        paths=Paths.of(problem, chunks),
        times=repeats(problem.stages, chunks, problem.microbatches),
        once_ns=int(lags_ns.sum()) + finish_floor(problem),
        low_ns=max(1, floor_ns, busiest_floor(problem, count)),
        stop=stop,
    )
    most_ns, enough_ns = search.paths.most_ns, NEVER
    if cutoff_ns is not None:
        enough_ns = lowered_ns(cutoff_ns, tolerance)
        search.ask(min(most_ns, search.limit_below(enough_ns)), DECISIVE_ROUNDS)
        search.ask(min(most_ns, search.limit_below(cutoff_ns)))  # one that is better by less is welcome
        if search.best is None and (search.bound_ns >= enough_ns or search.low_ns > most_ns):
            return CutResult(stage_of=None, objective_ns=None, bound_ns=enough_ns, exhausted=False)
    else:
        search.ask(most_ns)
        if search.low_ns > most_ns:
            return CutResult(stage_of=None, objective_ns=None, bound_ns=NEVER, exhausted=False)
        search.best = None
        for growth in GROWTH:
            if search.best is None:
                search.ask(min(most_ns, scaled_ns(search.low_ns, growth)))
    _narrow(search, tolerance)
    best = search.best
    if best is None or (cutoff_ns is not None and best.value.objective_ns >= cutoff_ns):
        bound_ns = min(search.bound_ns, enough_ns)
        return CutResult(stage_of=None, objective_ns=None, bound_ns=bound_ns, exhausted=bound_ns < enough_ns)
    bound_ns = min(search.bound_ns, best.value.objective_ns)
    return CutResult(
        stage_of=_chunk_of(best.ends),
        objective_ns=best.value.objective_ns,
        bound_ns=bound_ns,
        exhausted=bound_ns < lowered_ns(best.value.objective_ns, tolerance),
    )


@dataclass(kw_only=True, slots=True)
class _Search:
    """What is known of one problem: the best cut so far, that no cut has a busiest chunk below `low_ns`, and the least
    limit asked that is not proved to be too low."""

    paths: Paths
    times: int
    once_ns: int
    low_ns: int
    stop: Callable[[], bool]
    best: Cut | None = None
    open_ns: int = 2**62

    @property
    def bound_ns(self) -> int:
        """No cut is faster."""
        return self.times * self.low_ns + self.once_ns

    def limit_below(self, objective_ns: int) -> int:
        """No cut that is faster than that has a busier chunk."""
        return (objective_ns - 1 - self.once_ns) // self.times

    def ask(self, limit_ns: int, rounds: int = ROUNDS) -> None:
        """Learn whether a cut is within a limit."""
        if limit_ns < self.low_ns or self.stop():
            return
        found = self.paths.within(limit_ns, rounds)
        if isinstance(found, Proved):
            self.low_ns = limit_ns + 1
            return
        self.open_ns = min(self.open_ns, limit_ns)
        if isinstance(found, Cut) and (self.best is None or found.value.objective_ns < self.best.value.objective_ns):
            self.best = found


def _narrow(search: _Search, tolerance: float) -> None:
    """Lesser limits with a cut, then greater ones proved to be too low, while either matters."""
    floor_ns = search.low_ns
    for _ in range(HALVINGS):
        if search.best is None or search.bound_ns >= lowered_ns(search.best.value.objective_ns, tolerance):
            break
        busiest_ns = search.best.value.busiest_ns
        limit_ns = (max(floor_ns, search.low_ns) + busiest_ns) // 2
        search.ask(min(limit_ns, busiest_ns - 1))
        if search.best.value.busiest_ns == busiest_ns:  # nothing found there
            floor_ns = limit_ns
    for _ in range(HALVINGS):
        if search.best is not None and search.bound_ns >= lowered_ns(search.best.value.objective_ns, tolerance):
            return
        if search.open_ns <= search.low_ns + 1:
            return
        search.ask((search.low_ns + search.open_ns) // 2)


def busiest_floor(problem: CutProblem, chunks: int) -> int:
    """No cut into so many chunks in all has a less busy busiest one."""
    return int(bottleneck_floors(problem, np.array([chunks], dtype=np.int64))[0])


def _better(best: Cut | None, found: Cut | Proved | None) -> Cut | None:
    if not isinstance(found, Cut) or (best is not None and best.value.objective_ns <= found.value.objective_ns):
        return best
    return found


def _best_of_all(problem: CutProblem, chunks: int, cutoff_ns: int | None) -> CutResult:
    """Every cut tried; none where there are more chunks than groups."""
    best: tuple[int, tuple[int, ...]] | None = None
    for inner in combinations(range(1, problem.groups), problem.stages * chunks - 1):
        ends = (*inner, problem.groups)
        value = evaluate_chunks(problem, chunks, ends)
        if value.fits and (best is None or value.objective_ns < best[0]):
            best = value.objective_ns, ends
    if best is None or (cutoff_ns is not None and best[0] >= cutoff_ns):
        bound_ns = cutoff_ns if cutoff_ns is not None else NEVER
        return CutResult(stage_of=None, objective_ns=None, bound_ns=bound_ns, exhausted=False)
    return CutResult(stage_of=_chunk_of(best[1]), objective_ns=best[0], bound_ns=best[0], exhausted=False)


def _chunk_of(ends: tuple[int, ...]) -> tuple[int, ...]:
    """The chunk of each group."""
    sizes = [end - first for first, end in zip((0, *ends), ends, strict=False)]
    return tuple(chunk for chunk, size in enumerate(sizes) for _ in range(size))
