"""Times and memory of a schedule under a problem's seconds: each rank works in its order as early as inputs allow.

Transfers occupy no rank; a tensor arrives its edge's seconds after its producer ended. This is the model in which the
bubble rates of the zero-bubble papers are calculated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.errors import CheckError
from mmplan.planner.schedule import Compute, Schedule
from mmplan.planner.schedules.problem import ScheduleProblem


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Times per rank, aligned with the schedule.

    `makespan_s`: from the first start to the last end of any rank. `span_s`: of the rank with the longest time between
    its own first start and last end, which is what a step takes when the optimizer needs no rank to wait for others.
    `peaks`: most memory of each rank.
    """

    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]
    makespan_s: float
    span_s: float
    peaks: tuple[float, ...]


def evaluate(problem: ScheduleProblem, schedule: Schedule) -> Evaluation:
    """Times and memory peaks of a schedule.

    Raises:
        CheckError: some ranks wait for each other for ever; names what each waits at.
    """
    needs_forward: list[list[tuple[int, float]]] = [[] for _ in problem.stages]
    needs_gradient: list[list[tuple[int, float]]] = [[] for _ in problem.stages]
    for edge in problem.edges:
        needs_forward[edge.target].append((edge.source, edge.forward_s))
        if edge.carries_grad:
            needs_gradient[edge.source].append((edge.target, edge.backward_s))
    skipped = [stage.skipped for stage in problem.stages]
    done: dict[tuple[int, bool, int], float] = {}  # end of F (True) or of I or B (False)
    starts: list[list[float]] = [[] for _ in schedule]
    ends: list[list[float]] = [[] for _ in schedule]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule):
            clock_s = ends[rank][-1] if ends[rank] else 0.0
            while len(ends[rank]) < len(order):
                action = order[len(ends[rank])]
                ready_s = _ready_s(action, needs_forward, needs_gradient, done, skipped)
                if ready_s is None:
                    break
                start_s = max(clock_s, ready_s)
                clock_s = start_s + problem.stages[action.stage].seconds(action.kind, action.microbatch)
                if action.kind != "W":
                    done[action.stage, action.kind == "F", action.microbatch] = clock_s
                starts[rank].append(start_s)
                ends[rank].append(clock_s)
                moved = True
    stuck = [str(order[len(row)]) for order, row in zip(schedule, ends, strict=True) if len(row) < len(order)]
    if stuck:
        raise CheckError(f"the schedule never reaches {', '.join(stuck)}: they wait for each other")
    first_s = min(row[0] for row in starts if row)
    return Evaluation(
        start_s=tuple(map(tuple, starts)),
        end_s=tuple(map(tuple, ends)),
        makespan_s=max(row[-1] for row in ends if row) - first_s,
        span_s=max(late[-1] - early[0] for early, late in zip(starts, ends, strict=True) if late),
        peaks=memory_peaks(problem, schedule),
    )


def _ready_s(
    action: Compute,
    needs_forward: Sequence[Sequence[tuple[int, float]]],
    needs_gradient: Sequence[Sequence[tuple[int, float]]],
    done: dict[tuple[int, bool, int], float],
    skipped: Sequence[frozenset[int]],
) -> float | None:
    """When the inputs of an action are there; None when one has no time yet."""
    if action.kind == "W":
        return done.get((action.stage, False, action.microbatch))
    forward = action.kind == "F"
    ready_s = 0.0
    for other, lag_s in (needs_forward if forward else needs_gradient)[action.stage]:
        if action.microbatch in skipped[other]:
            continue
        end_s = done.get((other, forward, action.microbatch))
        if end_s is None:
            return None
        ready_s = max(ready_s, end_s + lag_s)
    if not forward:
        own_s = done.get((action.stage, True, action.microbatch))
        return None if own_s is None else max(ready_s, own_s)
    return ready_s


def memory_peaks(problem: ScheduleProblem, schedule: Schedule) -> tuple[float, ...]:
    """Most memory each rank holds; it depends on the rank's own order alone."""
    peaks = []
    for order in schedule:
        held = peak = 0.0
        for action in order:
            held += problem.stages[action.stage].memory_change(action.kind, action.microbatch)
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def fits(problem: ScheduleProblem, schedule: Schedule) -> bool:
    """Whether every rank stays within its memory (up to rounding of sums)."""
    limits = zip(memory_peaks(problem, schedule), problem.capacity, strict=True)
    return all(peak <= capacity * (1 + 1e-9) for peak, capacity in limits)
