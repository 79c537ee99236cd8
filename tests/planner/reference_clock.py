"""A clock that knows only events: one heap, one thing at a time. Slow, and shares nothing with the product's clocks."""

import heapq
from collections import deque
from collections.abc import Sequence

from mmplan.planner.program import Action, Program

Times = dict[tuple[int, int], tuple[float, float]]  # (rank, position) -> start, end


def _tie(action: Action) -> int:
    return action.microbatch if action.kind == "TIE" else -1


def reference_times(program: Program, durations: Sequence[Sequence[float]]) -> Times | None:
    """Start and end of all actions; None when some rank never ends or a receive never gets its tensor."""
    times: Times = {}
    heap: list[tuple[float, int, int]] = []  # time, counter, rank that goes on
    todo = {rank.rank: deque(enumerate(rank.actions)) for rank in program.ranks}
    seconds = {rank.rank: row for rank, row in zip(program.ranks, durations, strict=True)}
    busy_until = {rank.rank: 0.0 for rank in program.ranks}
    posted: dict[int, list[Action]] = {rank.rank: [] for rank in program.ranks}
    link_free: dict[tuple[int, int], float] = {}
    arrivals: dict[tuple[int, int, str, int], tuple[float, float]] = {}
    met: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # holders, stage, tie -> who has come
    counter = 0

    def wake(time_s: float, rank: int) -> None:
        nonlocal counter
        heapq.heappush(heap, (time_s, counter, rank))
        counter += 1

    def needed(rank: int, action: Action) -> list[tuple[int, int, str, int]]:
        if action.kind not in ("F", "B", "I"):
            return []
        return [
            (r.peer, rank, r.tensor, r.microbatch)
            for r in posted[rank]
            if r.stage == action.stage
            and r.microbatch == action.microbatch
            and ("<" in r.tensor) == (action.kind != "F")
        ]

    for rank in todo:
        wake(0.0, rank)
    while heap:
        now_s, _, rank = heapq.heappop(heap)
        while todo[rank] and busy_until[rank] <= now_s:
            position, action = todo[rank][0]
            length_s = seconds[rank][position]
            if action.kind == "RECV":
                posted[rank].append(action)
            elif action.kind == "SEND":
                start_s = max(now_s, link_free.get((rank, action.peer), 0.0))
                link_free[rank, action.peer] = start_s + length_s
                times[rank, position] = (start_s, start_s + length_s)
                key = (rank, action.peer, action.tensor, action.microbatch)
                if key in arrivals:
                    return None
                arrivals[key] = (start_s, start_s + length_s)
                if action.peer in todo:
                    wake(start_s + length_s, action.peer)
            elif action.kind in ("REDUCE", "TIE"):
                replica = next(r.replica for r in program.ranks if r.rank == rank)
                if action.kind == "TIE":
                    holders = [
                        r.rank
                        for r in program.ranks
                        if r.replica == replica and any(_tie(a) == action.microbatch for a in r.actions)
                    ]
                else:
                    holders = [
                        r.rank
                        for r in program.ranks
                        if r.stage == action.stage
                        or any(a.kind == "REDUCE" and a.stage == action.stage for a in r.actions)
                    ]
                waiting = met.setdefault((*holders, action.stage if action.kind == "REDUCE" else -1, _tie(action)), [])
                if (rank, position) not in waiting:
                    waiting.append((rank, position))
                if {r for r, _ in waiting} != set(holders):
                    break
                for member, place in waiting:
                    times[member, place] = (now_s, now_s + seconds[member][place])
                    busy_until[member] = now_s + seconds[member][place]
                    todo[member].popleft()
                    wake(busy_until[member], member)
                waiting.clear()
                continue
            else:
                keys = needed(rank, action)
                if any(key not in arrivals or arrivals[key][1] > now_s for key in keys):
                    break
                times[rank, position] = (now_s, now_s + length_s)
                busy_until[rank] = now_s + length_s
                wake(busy_until[rank], rank)
            todo[rank].popleft()
    if any(todo.values()):
        return None
    for rank_program in program.ranks:
        for position, action in enumerate(rank_program.actions):
            if action.kind == "RECV":
                key = (action.peer, rank_program.rank, action.tensor, action.microbatch)
                if key not in arrivals:
                    return None
                times[rank_program.rank, position] = arrivals[key]
    return times
