"""Small schedule problems, and a check of schedules that shares nothing with how they are made."""

from collections.abc import Sequence

from mmplan.planner.schedule import Compute, Schedule
from mmplan.planner.schedules.problem import ScheduleProblem, StageEdge, StageWork

UNLIMITED = float("inf")


def chain(
    ranks: int,
    m: int,
    *,
    forward_s: float = 1.0,
    input_s: float = 1.0,
    weight_s: float = 1.0,
    hop_s: float = 0.0,
    capacity: float = UNLIMITED,
    chunks: int = 1,
    v_shaped: bool = False,
) -> ScheduleProblem:
    """Equal stages; a rank's work is split over its chunks, and so are the 2 units of memory of a microbatch."""
    count = ranks * chunks
    places = [stage % ranks for stage in range(count)]
    if v_shaped:
        places = [stage if stage < ranks else count - 1 - stage for stage in range(count)]
    stages = tuple(
        StageWork(
            rank=place,
            forward_s=(forward_s / chunks,) * m,
            input_s=(input_s / chunks,) * m,
            weight_s=(weight_s / chunks,) * m,
            held=(2.0 / chunks,) * m,
        )
        for place in places
    )
    lags = [0.0 if places[s] == places[s + 1] else hop_s for s in range(count - 1)]
    edges = tuple(StageEdge(source=s, target=s + 1, forward_s=lag, backward_s=lag) for s, lag in enumerate(lags))
    return ScheduleProblem(stages=stages, edges=edges, microbatches=m, capacity=(capacity,) * ranks)


def dag(
    edges: Sequence[tuple[int, int]],
    m: int,
    *,
    frozen: Sequence[int] = (),
    no_weight: Sequence[int] = (),
    places: Sequence[int] = (),
    capacity: float = UNLIMITED,
    encoders: Sequence[int] = (),
) -> ScheduleProblem:
    """Unit stages on a DAG, one per rank unless `places` says otherwise."""
    count = 1 + max(max(edge) for edge in edges)
    places = places or range(count)
    stages = tuple(
        StageWork(
            rank=places[stage],
            forward_s=(1.0,) * m,
            input_s=() if stage in frozen else (1.0,) * m,
            weight_s=() if stage in frozen or stage in no_weight else (1.0,) * m,
            held=(2.0,) * m,
            role="encoder" if stage in encoders else "backbone",
        )
        for stage in range(count)
    )
    links = tuple(
        StageEdge(source=a, target=b, carries_grad=a not in frozen and b not in frozen) for a, b in sorted(edges)
    )
    return ScheduleProblem(stages=stages, edges=links, microbatches=m, capacity=(capacity,) * (max(places) + 1))


def faults(problem: ScheduleProblem, schedule: Schedule) -> list[str]:
    """What is missing, doubled, on the wrong rank or before its F or I; empty for a complete schedule."""
    found = []
    for stage, work in enumerate(problem.stages):
        order = [action for action in schedule[work.rank] if action.stage == stage]
        for k in range(problem.microbatches):
            kinds = "".join(action.kind for action in order if action.microbatch == k)
            allowed = {"F"} if not work.has_backward else {"FB", "FIW"} if work.has_weight else {"FB", "FI"}
            if k not in work.skipped and kinds not in allowed:
                found.append(f"stage {stage}, microbatch {k}: {kinds}")
    for rank, order in enumerate(schedule):
        found += [f"{action} on rank {rank}" for action in order if problem.stages[action.stage].rank != rank]
    return found


def text(order: Sequence[Compute]) -> str:
    return " ".join(map(str, order))
