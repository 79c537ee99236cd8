"""The recorded step of a run in the form of a prediction, its transfers put back where they must have been.

A communication library tells neither end when a tensor was on the wire. It left when its producer was done and the link
was free; it arrived when the compute that had waited for it began, or, if nobody waited, after as long as a message of
its size took alone.
"""

from collections.abc import Mapping, Sequence

from mmplan.planner.prediction import Prediction, RankPrediction, TimedAction
from mmplan.planner.program import Action, Meeting, Program, is_ahead, meeting
from mmplan.planner.step_parts import Key, key_of, made_times, reader_of
from mmplan.planner.timing import Seconds
from mmplan.runtime.measurement import Measurement

Times = tuple[float, float]


def measured_step(program: Program, run: Measurement, durations: Seconds) -> Prediction:
    """The step with its transfers and without memory over time.

    Args:
        program: of the recorded step; its ranks are those of the run, in order.
        durations: of its actions, for messages that the run did not time.
    """
    of_key = {(item.rank, str(item.action)): (item.start_s, item.end_s) for item in run.timeline}
    sent = measured_transfers(program, run, durations)
    places = {rank.rank: index for index, rank in enumerate(program.ranks)}
    timeline = []
    for index, rank in enumerate(program.ranks):
        for action in rank.actions:
            if action.kind == "SEND":
                times = sent[index, places[action.peer], action.tensor, action.microbatch]
            elif action.kind == "RECV":
                times = sent[places[action.peer], index, action.tensor, action.microbatch]
            else:
                times = of_key[index, str(action)]
            timeline.append(TimedAction(rank.rank, action, *times))
    return Prediction(
        step_time_s=run.step_time_s,
        pipeline_s=run.pipeline_s,
        bubble=run.bubble,
        ranks=tuple(_rank(run, index, program) for index in range(len(program.ranks))),
        timeline=tuple(timeline),
    )


def measured_transfers(
    program: Program, run: Measurement, durations: Seconds
) -> dict[tuple[int, int, str, int], Times]:
    """(source, target, tensor, microbatch) -> (start, end) on the link, ranks by their place in the program."""
    places = {rank.rank: index for index, rank in enumerate(program.ranks)}
    ends, waits = _computes(run)
    made = {
        (places[source], places[target], tensor, microbatch): made_s
        for (source, target, tensor, microbatch), made_s in made_times(program, ends).items()
    }
    alone_s = {(one.source, one.target, one.bytes): one.seconds for one in run.transfers}
    last_made = _last_made(program, places, made)
    free_s: dict[tuple[int, int], float] = {}
    sent: dict[tuple[int, int, str, int], Times] = {}
    readers = {
        (places[action.peer], index, action.tensor, action.microbatch): reader_of(action)
        for index, rank in enumerate(program.ranks)
        for action in rank.actions
        if action.kind == "RECV" and not is_ahead(action.tensor)
    }
    for index, rank in enumerate(program.ranks):
        for action, predicted_s in zip(rank.actions, durations[index], strict=True):
            if action.kind != "SEND":
                continue
            target = places[action.peer]
            message = (index, target, action.tensor, action.microbatch)
            start_s = max(made[message], free_s.get((index, target), 0.0))
            end_s = start_s + alone_s.get((index, target, action.bytes), predicted_s)
            if message in readers:
                asked_s, begun_s = waits[target][readers[message]]
                if last_made[target, readers[message]] == made[message] and asked_s < min(begun_s, end_s):
                    end_s = begun_s  # it was what the compute waited for
                end_s = max(start_s, min(end_s, begun_s))
            free_s[index, target] = end_s
            sent[message] = (start_s, end_s)
    return sent


def _computes(run: Measurement) -> tuple[list[dict[Key, float]], list[dict[Key, Times]]]:
    """By rank and compute: its end, and when its rank asked for it and it began."""
    ends: list[dict[Key, float]] = [{} for _ in run.ranks]
    waits: list[dict[Key, Times]] = [{} for _ in run.ranks]
    for item, asked_s in zip(run.timeline, run.asked_s or [item.start_s for item in run.timeline], strict=True):
        ends[item.rank][key_of(item.action)] = item.end_s
        waits[item.rank][key_of(item.action)] = (asked_s, item.start_s)
    return ends, waits


def _last_made(
    program: Program, places: Mapping[int, int], made: Mapping[tuple[int, int, str, int], float]
) -> dict[tuple[int, Key], float]:
    """(rank, compute) -> when the last of what it receives was made."""
    last: dict[tuple[int, Key], float] = {}
    for index, rank in enumerate(program.ranks):
        for action in rank.actions:
            if action.kind == "RECV" and not is_ahead(action.tensor):
                at = (index, reader_of(action))
                last[at] = max(last.get(at, 0.0), made[places[action.peer], index, action.tensor, action.microbatch])
    return last


def link_seconds(program: Program, run: Measurement, durations: Seconds) -> Seconds:
    """`durations` with those of transfers and reductions as the run had them: what a transfer took from when it could
    start, a reduction from when the last replica had come."""
    sent = measured_transfers(program, run, durations)
    places = {rank.rank: index for index, rank in enumerate(program.ranks)}
    reduced = _reductions(program, run.timeline)

    def seconds(index: int, action: Action, otherwise_s: float) -> float:
        if action.kind == "SEND":
            start_s, end_s = sent[index, places[action.peer], action.tensor, action.microbatch]
            return end_s - start_s
        return reduced.get((index, str(action)), otherwise_s)

    return tuple(
        tuple(seconds(index, action, value) for action, value in zip(rank.actions, row, strict=True))
        for index, (rank, row) in enumerate(zip(program.ranks, durations, strict=True))
    )


def _reductions(program: Program, timeline: Sequence[TimedAction]) -> dict[tuple[int, str], float]:
    sums = [
        (item, meeting(program.ranks[item.rank], item.action))
        for item in timeline
        if item.action.kind in ("REDUCE", "TIE")
    ]
    together_s: dict[Meeting, float] = {}
    for item, met in sums:
        together_s[met] = max(item.start_s, together_s.get(met, 0.0))
    return {(item.rank, str(item.action)): max(0.0, item.end_s - together_s[met]) for item, met in sums}


def _rank(run: Measurement, index: int, program: Program) -> RankPrediction:
    rank = run.ranks[index]
    return RankPrediction(
        rank=program.ranks[index].rank,
        stage=rank.stage,
        replica=rank.replica,
        busy_s=rank.busy_s,
        bubble=rank.bubble,
        sent_bytes=rank.sent_bytes,
        received_bytes=0,
        reduce_bytes=rank.reduce_bytes,
        transfer_s=rank.transfer_s,
        reduce_s=rank.reduce_s,
        peak_memory_bytes=rank.peak_memory_bytes,
        peak_buffer_bytes=0,
        memory_steps=(),
    )
