"""All steps of a run as Chrome trace events, which https://ui.perfetto.dev opens; run.json keeps one step.

One process per rank with two tracks: what it computed, and where it stood waiting for inputs. Arrows lead from the
compute that made a tensor to the one that read it. Times count from the start of the first step by rank 0's host; steps
stand where they were, with the time between them. Format: "Trace Event Format", Google, 2016 (microseconds).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmplan.files import write_file
from mmplan.planner.program import Action, is_ahead
from mmplan.runtime.ranges import range_name
from mmplan.runtime.train import RankStep
from mmplan.units import microseconds

_COMPUTE, _WAIT, _STEP = 0, 1, 2
_COLOURS = {"F": "thread_state_running", "B": "rail_response", "I": "rail_animation", "W": "rail_load"}

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedStep:
    """One step of one rank, and its number."""

    step: int
    rank: RankStep


def write_trace(runs: Sequence[Sequence[TracedStep]], modalities: Mapping[int, str], path: Path) -> None:
    """Args: runs: [rank][step].

    Raises:
        InputError: the file cannot be written.
    """
    other = {"started_s": runs[0][0].rank.started_s}  # where health's marks go
    document = {"traceEvents": trace_events(runs, modalities), "displayTimeUnit": "ms", "otherData": other}
    write_file(path, json.dumps(document))


def trace_events(runs: Sequence[Sequence[TracedStep]], modalities: Mapping[int, str]) -> list[Event]:
    events: list[Event] = []
    for steps in runs:
        program = steps[0].rank.program
        stages = sorted({item.action.stage for item in steps[0].rank.timeline})
        names = ", ".join(f"stage {stage} ({modalities.get(stage, '')})" for stage in stages)
        common: Event = {"ph": "M", "pid": program.rank}
        events.append({**common, "name": "process_name", "args": {"name": f"rank {program.rank}: {names}"}})
        events.append({**common, "name": "process_sort_index", "args": {"sort_index": program.rank}})
        for track, name in ((_COMPUTE, "compute"), (_WAIT, "waiting for inputs"), (_STEP, "steps")):
            events.append({**common, "name": "thread_name", "tid": track, "args": {"name": name}})
    first_s = runs[0][0].rank.started_s
    for position, first in enumerate(runs[0]):
        begun_s = first.rank.started_s - first_s
        row = [steps[position].rank for steps in runs]
        for done in row:
            events += _rank_events(first.step, done, begun_s, modalities)
        events += _arrows(len(events), row, begun_s)
    return events


def _rank_events(step: int, done: RankStep, begun_s: float, modalities: Mapping[int, str]) -> list[Event]:
    rank, end_s = done.program.rank, max(item.end_s for item in done.timeline)
    events = [_slice(f"step {step}", "step", rank, _STEP, begun_s, end_s, dict(done.losses))]
    for item, asked_s in zip(done.timeline, done.asked_s, strict=True):
        action = item.action
        number = "tie" if action.kind == "TIE" else "microbatch"
        args: Event = {"step": step, "stage": action.stage, number: action.microbatch}
        args["modality"] = modalities.get(action.stage, "")
        name = range_name(action, modalities)
        event = _slice(name, action.kind, rank, _COMPUTE, begun_s + item.start_s, item.end_s - item.start_s, args)
        events.append({**event, "cname": _COLOURS[action.kind]} if action.kind in _COLOURS else event)
        if item.start_s > asked_s:
            events.append(_slice(f"for {action}", "wait", rank, _WAIT, begun_s + asked_s, item.start_s - asked_s, args))
    return events


def _slice(name: str, category: str, rank: int, track: int, start_s: float, length_s: float, args: Event) -> Event:
    times = {"ts": microseconds(start_s), "dur": microseconds(length_s)}
    return {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": track, **times, "args": args}


def _arrows(first: int, row: Sequence[RankStep], begun_s: float) -> list[Event]:
    """From the end of the compute that a SEND stands behind to the start of the one that a RECV is for."""
    readers: dict[tuple[int, int, str, int], tuple[int, float]] = {}
    for done in row:
        starts = {(i.action.stage, _half(i.action), i.action.microbatch): i.start_s for i in done.timeline}
        for action in done.program.actions:
            if action.kind == "RECV" and not is_ahead(action.tensor):
                key = (action.stage, "B" if "<" in action.tensor else "F", action.microbatch)
                tensor = (action.peer, done.program.rank, action.tensor, action.microbatch)
                readers[tensor] = (done.program.rank, starts[key])
    events: list[Event] = []
    for done in row:
        ends = {str(item.action): item.end_s for item in done.timeline}
        made_s = 0.0
        for action in done.program.actions:
            if action.kind in ("F", "B", "I", "W"):
                made_s = ends[str(action)]
            reader = readers.get((done.program.rank, action.peer, action.tensor, action.microbatch))
            if action.kind == "SEND" and reader is not None:
                common = {"name": action.tensor, "cat": "tensor", "id": first + len(events), "tid": _COMPUTE}
                start, end = microseconds(begun_s + made_s), microseconds(begun_s + reader[1])
                events.append({**common, "ph": "s", "pid": done.program.rank, "ts": start})
                events.append({**common, "ph": "f", "bp": "e", "pid": reader[0], "ts": end, "id": common["id"]})
    return events


def _half(action: Action) -> str:
    return "B" if action.kind == "I" else action.kind
