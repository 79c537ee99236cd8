"""Where a rank's step goes: computing, updating, reducing, and idle time by what it waits for.

An idle rank waits for the next action of its program. Until the last input of that action has been made on another rank
nothing of the program can run: that is the bubble. From then on the input is on its way: exposed communication. What is
left, although the input is there, is overhead: the host, a launch, other processes. One definition for predictions and
for runs; the parts of a rank sum to the step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmplan.planner.prediction import TimedAction
from mmplan.planner.program import Action, Meeting, Program, RankProgram, is_ahead, meeting
from mmplan.planner.stage_graph import StageGraph

Key = tuple[int, str, int]  # stage, F, B (also for I) or W, microbatch
_COMPUTES = "FBIW"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParts:
    """Seconds of one rank in one step; without `reorderable_s`, which is a part of `bubble_s`, they sum to it.

    `bubble_s`: idle, and an input of the next action has not been made; behind the last action, idle to the end of the
    step. `reorderable_s`: of it, while another action that is left had all inputs made: another order would have had
    something to run. `exposed_s`: idle while inputs that had been made were on their way, and reductions.
    """

    rank: int
    compute_s: float
    update_s: float
    bubble_s: float
    reorderable_s: float
    exposed_s: float
    overhead_s: float


def step_parts(
    program: Program,
    stages: StageGraph,
    timeline: Sequence[TimedAction],
    step_time_s: float,
    asked_s: Sequence[float] = (),
) -> tuple[RankParts, ...]:
    """The parts of each rank.

    Args:
        timeline: computes, REDUCE and STEP of all ranks in the order of their programs; transfers are left out.
        asked_s: of each item of `timeline`, when its rank was ready for it; empty: as soon as the one before ended.
    """
    rows: list[list[tuple[TimedAction, float | None]]] = [[] for _ in program.ranks]
    index = {rank.rank: place for place, rank in enumerate(program.ranks)}
    for place, item in enumerate(timeline):
        if item.action.kind not in ("SEND", "RECV"):
            rows[index[item.rank]].append((item, asked_s[place] if asked_s else None))
    ends_s = [{key_of(item.action): item.end_s for item, _ in row} for row in rows]
    made_s = made_times(program, ends_s)
    together_s: dict[Meeting, float] = {}  # when the last rank came to a sum
    for rank, row in zip(program.ranks, rows, strict=True):
        for item, _ in row:
            if item.action.kind in ("REDUCE", "TIE"):
                met = meeting(rank, item.action)
                together_s[met] = max(item.start_s, together_s.get(met, 0.0))
    return tuple(
        _rank_parts(rank, row, _inputs_s(rank, made_s), ends, stages, together_s, step_time_s)
        for rank, row, ends in zip(program.ranks, rows, ends_s, strict=True)
    )


def key_of(action: Action) -> Key:
    return action.stage, "B" if action.kind == "I" else action.kind, action.microbatch


def made_times(program: Program, ends_s: Sequence[Mapping[Key, float]]) -> dict[tuple[int, int, str, int], float]:
    """(source rank, target rank, tensor, microbatch) -> end of the compute that made it: the one before its SEND."""
    made = {}
    for rank, ends in zip(program.ranks, ends_s, strict=True):
        last = 0.0
        for action in rank.actions:
            if action.kind in _COMPUTES:
                last = ends[key_of(action)]
            elif action.kind == "SEND":
                made[rank.rank, action.peer, action.tensor, action.microbatch] = last
    return made


def reader_of(receive: Action) -> Key:
    """The compute that waits for what a RECV receives."""
    return receive.stage, "B" if "<" in receive.tensor else "F", receive.microbatch


def _inputs_s(rank: RankProgram, made_s: Mapping[tuple[int, int, str, int], float]) -> dict[Key, float]:
    """When the last input from another rank was made, of each compute that has one."""
    inputs: dict[Key, float] = {}
    for action in rank.actions:
        if action.kind == "RECV" and not is_ahead(action.tensor):
            made = made_s[action.peer, rank.rank, action.tensor, action.microbatch]
            inputs[reader_of(action)] = max(made, inputs.get(reader_of(action), 0.0))
    return inputs


def _rank_parts(
    rank: RankProgram,
    row: Sequence[tuple[TimedAction, float | None]],
    inputs_s: Mapping[Key, float],
    ends_s: Mapping[Key, float],
    stages: StageGraph,
    together_s: Mapping[Meeting, float],
    step_time_s: float,
) -> RankParts:
    compute_s = update_s = bubble_s = reorderable_s = exposed_s = overhead_s = 0.0
    least_s = _least_ready(row, inputs_s, ends_s, stages)
    free_s = 0.0
    for place, (item, asked_s) in enumerate(row):
        key, start_s = key_of(item.action), max(free_s, item.start_s)
        if item.action.kind in ("REDUCE", "TIE"):
            made_s: float | None = together_s[meeting(rank, item.action)]
            start_s = min(item.end_s, max(start_s, together_s[meeting(rank, item.action)]))
        else:
            made_s = inputs_s.get(key)
        waited_to_s = min(start_s, max(free_s, made_s or 0.0))
        bubble_s += waited_to_s - free_s
        reorderable_s += max(0.0, waited_to_s - max(free_s, least_s[place]))
        asked_s = free_s if asked_s is None else asked_s
        on_its_way_s = start_s - min(start_s, max(waited_to_s, asked_s)) if made_s is not None else 0.0
        exposed_s += on_its_way_s
        overhead_s += start_s - waited_to_s - on_its_way_s
        length_s = max(0.0, item.end_s - start_s)
        if item.action.kind in _COMPUTES:
            compute_s += length_s
        elif item.action.kind in ("REDUCE", "TIE"):
            exposed_s += length_s
        else:
            update_s += length_s
        free_s = max(free_s, item.end_s)
    bubble_s += max(0.0, step_time_s - free_s)
    return RankParts(
        rank=rank.rank,
        compute_s=compute_s,
        update_s=update_s,
        bubble_s=bubble_s,
        reorderable_s=reorderable_s,
        exposed_s=exposed_s,
        overhead_s=overhead_s,
    )


def _least_ready(
    row: Sequence[tuple[TimedAction, float | None]],
    inputs_s: Mapping[Key, float],
    ends_s: Mapping[Key, float],
    stages: StageGraph,
) -> list[float]:
    """Of each position, when the first of the computes from there on had all inputs made, here and elsewhere."""
    least, found = math.inf, []
    for item, _ in reversed(row):
        if item.action.kind in _COMPUTES:
            stage, kind, microbatch = key_of(item.action)
            local = [(stage, "F", microbatch)] if kind == "B" else [(stage, "B", microbatch)] if kind == "W" else []
            for cut in stages.cuts:
                if kind == "F" and cut.target == stage:
                    local.append((cut.source, "F", microbatch))
                elif kind == "B" and cut.source == stage and cut.carries_grad:
                    local.append((cut.target, "B", microbatch))
            here_s = max((ends_s[key] for key in local if key in ends_s), default=0.0)
            least = min(least, max(here_s, inputs_s.get((stage, kind, microbatch), 0.0)))
        found.append(least)
    return found[::-1]
