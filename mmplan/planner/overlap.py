"""How much of the communication of a step hides behind computing."""

from collections.abc import Sequence

from mmplan.planner.prediction import TimedAction

Interval = tuple[float, float]  # start and end in seconds


def overlap_rate(timeline: Sequence[TimedAction]) -> float:
    """Seconds in which ranks compute and communicate at once / seconds in which they communicate."""
    of_rank: dict[int, list[TimedAction]] = {}
    for item in timeline:
        of_rank.setdefault(item.rank, []).append(item)
    both_s = communicating_s = 0.0
    for own in of_rank.values():
        compute = merged([(t.start_s, t.end_s) for t in own if t.action.kind in "FBIW"])
        communicate = merged([(t.start_s, t.end_s) for t in own if t.action.kind in ("SEND", "RECV", "REDUCE", "TIE")])
        communicating_s += total_s(communicate)
        both_s += total_s(compute) + total_s(communicate) - total_s(merged([*compute, *communicate]))
    return both_s / communicating_s if communicating_s > 0 else 1.0


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """Union of intervals as disjoint ones in order."""
    union: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if union and start_s <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end_s))
        else:
            union.append((start_s, end_s))
    return union


def total_s(intervals: Sequence[Interval]) -> float:
    return sum(end_s - start_s for start_s, end_s in intervals)
