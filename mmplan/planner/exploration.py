"""How far the configurations of a space are looked at: the least bound first, each cut exactly, until a gap is proven.

Those with one chunk of layers per rank come first: they are quick to prove, and their best plan is what those with
several, whose proofs can stay open, have to beat. Then come those with modules on meshes of their own.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mmplan.planner.bounds import NEVER
from mmplan.planner.chunk_floors import may_be_below
from mmplan.planner.frontier import Frontier
from mmplan.planner.mesh_search import mesh_frontiers, solve_meshed
from mmplan.planner.result import Progress
from mmplan.planner.rivals import candidate
from mmplan.planner.search_state import Part, Search
from mmplan.planner.space import Space, solve_configuration
from mmplan.planner.stopping import Deadline

# Once the gap is proven, so many more configurations that might beat the plan by less are solved: they cost little.
MOST_WITHIN_GAP = 8
Tell = Callable[[Progress], None]


def explored(
    space: Space, gap: float, seed: int, on_improvement: Tell | None, deadline: Deadline, share_s: float
) -> Search:
    """As far as the gap and the deadline ask; no longer than `share_s` from now once there is a plan."""
    search, share = Search(parts=(), meshes=(), scale=space.scale), deadline.within(share_s)
    deadline = replace(deadline, stop=lambda: share.stop() or (search.incumbent is not None and share.passed()))
    shared = not space.prices.scenario.constraints.modules
    search.parts = _parts(space, deadline) if shared else ()
    search.meshes = mesh_frontiers(space, deadline)

    def tell() -> None:
        if on_improvement is not None:
            on_improvement(_progress(space, search, deadline))

    try:
        for index in range(len(search.parts)):
            if index > 0:
                _without_slow_chunks(space, search, gap, deadline)
            part = search.parts[index]
            while _worth_more(search, part, gap, deadline):
                _solve_next(space, search, part, gap, seed, deadline)
                tell()
        while not deadline.passed() and _solve_next_meshed(space, search, gap, deadline):
            tell()
    except KeyboardInterrupt:
        search.exhausted = True
    return search


def _parts(space: Space, deadline: Deadline) -> tuple[Part, ...]:
    """One chunk per rank, then several, where there are such."""
    chunks = space.configurations.vp
    rows = [np.flatnonzero(chunks == 1), np.flatnonzero(chunks > 1)]
    return tuple(Part(Frontier(space.bounds, space.scale, some, deadline.passed)) for some in rows if len(some))


def _without_slow_chunks(space: Space, search: Search, gap: float, deadline: Deadline) -> None:
    """Raise the bounds of configurations in chunks that cannot beat the best plan by the gap, as far as that is cheap
    to see: there are many, and a closer look at one takes as long as a thousand of these."""
    target = search.target(gap)
    if target == NEVER or deadline.passed():
        return
    values = space.scale.values(space.bounds_ns)
    rows = np.flatnonzero((space.configurations.vp > 1) & (values < target))
    if not len(rows):
        return
    steps_ns = np.array([space.scale.step_below(row, target) for row in rows.tolist()], dtype=np.int64)
    may = may_be_below(space.prices, space.groups, space.configurations, space.first, rows, steps_ns)
    space.bounds_ns[rows[~may]] = steps_ns[~may]
    chunked = np.flatnonzero(space.configurations.vp > 1)
    parts = search.parts[0], Part(Frontier(space.bounds, space.scale, chunked, deadline.passed))
    search.parts = parts


def _worth_more(search: Search, part: Part, gap: float, deadline: Deadline) -> bool:
    """Whether the next configuration could still beat the incumbent by more than the gap, or, for a few with one chunk
    per rank, at all; no more when time is out."""
    least = NEVER if deadline.passed() else part.frontier.least_value()
    if deadline.passed():
        return False
    if least < search.target(gap):
        return True
    part.within_gap += 1
    few = part is search.parts[0] and part.within_gap <= MOST_WITHIN_GAP
    return few and least < search.target(0.0)


def _solve_next(space: Space, search: Search, part: Part, gap: float, seed: int, deadline: Deadline) -> None:
    """Solve one configuration and keep its cut if it is the best so far."""
    index, before = part.frontier.pop(), part.unproved
    part.unproved = min(before, search.scale.value(index, int(space.bounds_ns[index])))  # should Ctrl-C come
    tolerance = 0.0 if space.exact else gap  # CP-SAT alone is quick to prove the gap, slow to prove the optimum
    free = search.incumbent is None and not search.scale.limited
    answer = solve_configuration(
        space,
        index,
        cutoff_ns=None if free else search.scale.step_below(index, search.target(tolerance)),
        tolerance=tolerance,
        gap=gap,
        seed=seed,
        deadline=deadline,
    )
    search.solved += 1
    search.last = space.configurations[index]
    search.answers[index] = answer
    if answer.stages is not None:
        found = candidate(space, space.configurations[index], answer.stages)
        if search.scale.value(index, found.step_ns) < search.target(0.0):
            search.incumbent = found
    bound = search.scale.value(index, max(answer.bound_ns, int(space.bounds_ns[index])))
    part.unproved = min(before, bound)
    search.exhausted |= answer.exhausted


def _solve_next_meshed(space: Space, search: Search, gap: float, deadline: Deadline) -> bool:
    """The same with modules on meshes of their own; False when none is worth it."""
    target = search.target(gap)
    frontier = min(search.meshes, key=lambda one: one.least_value(target), default=None)
    found = None if frontier is None else frontier.pop(target)
    if frontier is None or found is None:
        return False
    before, search.unproved = (
        search.unproved,
        min(search.unproved, search.scale.value_of(found.configuration, found.step_ns)),
    )
    configuration, free = found.configuration, search.incumbent is None and not search.scale.limited
    cutoff_ns = None if free else search.scale.step_below_of(configuration, search.target(0.0))
    answer = solve_meshed(space, frontier, found, cutoff_ns=cutoff_ns, deadline=deadline)
    search.solved += 1
    search.last = configuration
    if answer.stages is not None:
        one = candidate(space, configuration, answer.stages)
        search.meshed[configuration] = one
        if search.scale.value_of(configuration, one.step_ns) < search.target(0.0):
            search.incumbent = one
    elif answer.unfit:
        search.unfit += 1
    bound = search.scale.value_of(configuration, max(answer.bound_ns, found.step_ns))
    search.unproved = min(before, bound)
    search.exhausted |= answer.exhausted
    return True


def _progress(space: Space, search: Search, deadline: Deadline) -> Progress:
    best = search.incumbent
    best_s = best.time.objective_s if best is not None else None
    bound_s = search.bound_s(best) if best is not None else 0.0
    return Progress(
        objective_s=best_s,
        bound_s=bound_s,
        gap=(best_s - bound_s) / best_s if best_s else None,
        wall_s=deadline.spent_s,
        enumerated=search.met(space),
        solved=search.solved,
        doing=str(search.last),
    )
