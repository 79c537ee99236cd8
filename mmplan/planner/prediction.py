"""What a program is expected to do, or did: times per action, and per rank busy time, bytes and memory."""

from dataclasses import dataclass

from mmplan.planner.program import Action


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action with its start and end, in seconds from the start of the step.

    SEND and RECV of one tensor both carry the times it was on the link; REDUCE starts when the last replica arrived.
    """

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPrediction:
    """One rank over one optimizer step.

    `busy_s`: seconds of F, B, I, W. `bubble`: 1 - busy_s / pipeline_s. `transfer_s`: seconds its sends and receives
    were on links. `reduce_bytes`: buffers of gradients and weights handed to collectives among ranks with the same
    weights. `peak_memory_bytes`: weights, gradients, optimizer state, the device's reserve, and the activations kept
    between forward and backward, at their worst moment; `peak_buffer_bytes`: received tensors that had arrived and were
    not yet used, at their own worst moment and not part of the former. `memory_steps`: (time, bytes from then on) of
    the memory without those buffers.
    """

    rank: int
    stage: int
    replica: int
    busy_s: float
    bubble: float
    sent_bytes: int
    received_bytes: int
    reduce_bytes: int
    transfer_s: float
    reduce_s: float
    peak_memory_bytes: int
    peak_buffer_bytes: int
    memory_steps: tuple[tuple[float, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One optimizer step over all listed ranks.

    `step_time_s` ends with the last weight update; `pipeline_s` goes from the first compute start to the last compute
    end of any rank; `bubble` = 1 - sum of busy seconds / (ranks * pipeline_s). `timeline` is ordered by rank, then as
    in its program.
    """

    step_time_s: float
    pipeline_s: float
    bubble: float
    ranks: tuple[RankPrediction, ...]
    timeline: tuple[TimedAction, ...]
