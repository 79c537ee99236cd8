"""A timeline as Chrome trace events, which https://ui.perfetto.dev opens.

One process per rank with a track for computing and one for its outgoing transfers; arrows lead from each transfer to
the compute that reads it. Format: "Trace Event Format", Google, 2016 (times in microseconds).
"""

import json
from collections.abc import Mapping
from pathlib import Path

from mmplan.files import write_file
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import Prediction, TimedAction
from mmplan.planner.program import is_ahead
from mmplan.units import microseconds

_COMPUTE, _LINK = 0, 1  # tracks of a rank

# Names of the viewer's reserved colours (catapult/tracing/base/color_scheme.html).
_COLOURS = {"F": "thread_state_running", "B": "rail_response", "I": "rail_animation", "W": "rail_load"}


def trace_events(plan: Plan, prediction: Prediction) -> list[dict[str, object]]:
    """Events of all ranks: names of tracks, actions, arrows, memory counters."""
    events = [event for rank in prediction.ranks for event in _track_names(plan, rank.rank, rank.stage)]
    stage_of = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
    readers = {
        (item.rank, item.action.stage, item.action.kind == "F", item.action.microbatch): item
        for item in prediction.timeline
        if item.action.kind in "FBI"
    }
    for number, item in enumerate(prediction.timeline):
        if item.action.kind == "RECV":
            continue
        events.append(_slice(item))
        if item.action.kind == "SEND" and not is_ahead(item.action.tensor):
            reader = readers.get((item.action.peer, *_read_by(item.action.tensor, stage_of), item.action.microbatch))
            if reader is not None:
                events += _arrow(number, item, reader)
    for rank in prediction.ranks:
        for time_s, held_bytes in rank.memory_steps:
            args = {"memory": held_bytes}
            events.append({"name": "bytes", "ph": "C", "pid": rank.rank, "ts": microseconds(time_s), "args": args})
    return events


def save_trace(plan: Plan, prediction: Prediction, path: Path) -> None:
    """Write the trace; the file appears whole or not at all."""
    document = {
        "traceEvents": trace_events(plan, prediction),
        "displayTimeUnit": "ms",
        "otherData": {"scenario": plan.scenario.name, "schedule": plan.schedule},
    }
    write_file(path, json.dumps(document))


def _read_by(tensor: str, stage_of: Mapping[str, int]) -> tuple[int, bool]:
    """The stage that a tensor goes to, and whether a forward reads it there; a gradient goes back to its producer."""
    producer, _, consumer = tensor.partition("<" if "<" in tensor else ">")
    return (stage_of[producer], False) if "<" in tensor else (stage_of[consumer], True)


def _track_names(plan: Plan, rank: int, stage: int) -> list[dict[str, object]]:
    chunks = ((chunk, plan.stages[chunk].layers) for chunk in plan.stages_of(plan.row(stage)))
    process = f"rank {rank}: " + "; ".join(f"stage {chunk}, {layers[0]} to {layers[-1]}" for chunk, layers in chunks)
    return [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": process}},
        {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}},
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": _COMPUTE, "args": {"name": "compute"}},
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": _LINK, "args": {"name": "transfers out"}},
    ]


def _slice(item: TimedAction) -> dict[str, object]:
    action = item.action
    event: dict[str, object] = {
        "name": f"{action.tensor} {action.microbatch}" if action.kind == "SEND" else str(action),
        "cat": action.kind,
        "ph": "X",
        "pid": item.rank,
        "tid": _LINK if action.kind == "SEND" else _COMPUTE,
        "ts": microseconds(item.start_s),
        "dur": microseconds(item.end_s - item.start_s),
        "args": {"microbatch": action.microbatch, "stage": action.stage, "bytes": action.bytes, "peer": action.peer},
    }
    if action.kind in _COLOURS:
        event["cname"] = _COLOURS[action.kind]
    return event


def _arrow(number: int, send: TimedAction, reader: TimedAction) -> list[dict[str, object]]:
    """A flow from the transfer's slice to the compute that reads the tensor."""
    common = {"name": "tensor", "cat": "flow", "id": number}
    start_us, end_us = microseconds(send.start_s), microseconds(reader.start_s)
    return [
        {**common, "ph": "s", "pid": send.rank, "tid": _LINK, "ts": start_us},
        {**common, "ph": "f", "bp": "e", "pid": reader.rank, "tid": _COMPUTE, "ts": end_us},
    ]
