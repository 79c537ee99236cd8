"""A training log as runs: a run ends where the count of iterations starts again or arguments are printed anew."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from mmplan.scenario.formats.launch.arguments import Argument
from mmplan.scenario.formats.logs.epochs import EpochLine, epoch_line, steps_of_epochs
from mmplan.scenario.formats.logs.lines import (
    Iteration,
    Memory,
    iterations_in,
    memory_in,
    parameters_in,
    step_time_in,
    total_parameters_in,
)
from mmplan.scenario.formats.logs.other_steps import loss_in, other_steps_in, with_seconds
from mmplan.scenario.formats.logs.progress_bars import Bars
from mmplan.scenario.formats.logs.settings import MOST_ARGUMENTS, arguments_in, starts_dump
from mmplan.scenario.formats.logs.trainer_lines import Summary, titan_parameters_in, trainer_arguments_in

MOST_ITERATIONS = 500_000
MOST_RANKS = 100_000
# A word that makes the search worth its time, what is looked for, and what it is.
_EVENTS = (
    ("checkpoint", re.compile(r"sav(?:ing|ed) checkpoint|successfully saved", re.IGNORECASE), "a checkpoint"),
    ("valid", re.compile(r"validation loss at|validation_step"), "an evaluation"),
    ("eval_loss", re.compile(r"\"current_steps\""), "an evaluation"),  # LLaMA-Factory's trainer_log.jsonl
    ("valuat", re.compile(r"evaluating on|Running evaluation", re.IGNORECASE), "an evaluation"),
)
_FAILURES = (
    "CUDA out of memory", "OutOfMemoryError", "NCCL error", "Watchdog caught", "ChildFailedError", "SIGTERM", "SIGKILL",
    "SIGABRT", "Traceback (most recent",
)  # fmt: skip
_TIMERS = "time (ms) |"
_STAGE = re.compile(r"\[stage (\d{1,5}),")
_TIMER = re.compile(r"([a-z][\w/ -]{2,60}):\s*([\d.]{1,20})\s*(?:\||$)")
_DEVICE = re.compile(r"\b(NVIDIA|AMD Instinct|Tesla)[ -][\w -]{2,40}")


@dataclass(slots=True)
class Run:
    """What one start of the training printed; filled line by line."""

    arguments: dict[str, Argument] = field(default_factory=dict)
    iterations: list[Iteration] = field(default_factory=list)
    repeated: int = 0
    memory: dict[int | None, Memory] = field(default_factory=dict)
    parameters: dict[tuple[int, int], int] = field(default_factory=dict)
    total_parameters: int | None = None
    timers: dict[str, list[float]] = field(default_factory=dict)
    events: dict[int, str] = field(default_factory=dict)  # step before which it happened -> what
    step_times: list[tuple[float | None, float | None]] = field(default_factory=list)
    failure: str = ""
    device: str = ""
    seen: set[int] = field(default_factory=set)
    stages: int = 0  # of lines that name theirs
    bars: Bars = field(default_factory=Bars)
    summary: Summary = field(default_factory=Summary)
    losses: list[float] = field(default_factory=list)  # of lines without a step
    epochs: list[EpochLine] = field(default_factory=list)  # of lines with a clock that number no steps
    timed_by: str = ""  # what the seconds are made of, where lines do not say them


def runs_of(lines: Iterable[str], file: Path) -> list[Run]:
    """The runs of a log in order; those without an iteration are kept where they say anything."""
    runs = [Run()]
    pending = ""
    for number, text in enumerate(lines, 1):
        if starts_dump(text) and runs[-1].iterations:
            runs.append(Run())
        run = runs[-1]
        for iteration in chain(iterations_in(text, number), other_steps_in(text, number)):
            if _starts_again(run, iteration):
                runs.append(_continued(run))
                run = runs[-1]
            _add(run, iteration)
            if pending and iteration.step not in run.events:
                run.events[iteration.step] = pending
            pending = ""
        for word, pattern, what in _EVENTS:
            if word in text and pattern.search(text):
                pending = what
        _add_rest(run, text, number, file)
    for run in runs:
        _finish(run)
    return [run for run in runs if run.iterations or run.arguments or run.memory or run.summary.samples_per_s]


def _finish(run: Run) -> None:
    """Seconds of steps whose lines do not say them."""
    said = any(iteration.seconds is not None for iteration in run.iterations)
    if not said and any(iteration.at_s is not None for iteration in run.iterations):
        run.iterations = with_seconds(run.iterations)
        run.timed_by = "the clock between lines"
    if any(iteration.seconds is not None for iteration in run.iterations):
        return
    if run.step_times:  # Megatron-Bridge may print its own step times alone
        run.iterations = [
            Iteration(line=0, step=index, steps=None, seconds=seconds)
            for index, (seconds, _) in enumerate(run.step_times, 1)
        ]
    elif states := run.bars.of_training(run.summary.steps or None, trained=bool(run.summary.runtime_s)):
        run.iterations, run.timed_by = states, "a progress bar, which is a mean over the last steps"
    elif not run.iterations and (counted := steps_of_epochs(run.epochs, run.summary)):
        run.iterations = with_seconds(counted)
        run.timed_by = "the clock between lines, whose epochs count the steps"
    elif (step_s := run.summary.step_s) is not None and not run.iterations:
        last = max(2, run.summary.steps)
        run.iterations = [Iteration(line=0, step=last, steps=None, seconds=step_s)]
        run.timed_by = "the whole training: its start, evaluations and checkpoints are in it"


def _starts_again(run: Run, iteration: Iteration) -> bool:
    """A smaller number than the last; the same or a smaller one of another rank's label is a repetition."""
    if not run.iterations:
        return False
    last = run.iterations[-1]
    if iteration.steps is not None and last.steps is not None and iteration.steps != last.steps:
        return True
    if iteration.step in run.seen and (iteration.label != last.label or iteration.step == last.step):
        return False
    return iteration.step < last.step


def _continued(run: Run) -> Run:
    """After a restart without arguments printed anew: those of before, and what the ranks hold."""
    return Run(arguments=dict(run.arguments), parameters=dict(run.parameters), total_parameters=run.total_parameters)


def _add(run: Run, iteration: Iteration) -> None:
    if iteration.step in run.seen or len(run.iterations) >= MOST_ITERATIONS:
        run.repeated += 1
        return
    run.seen.add(iteration.step)
    run.iterations.append(iteration)


def _add_rest(run: Run, text: str, number: int, file: Path) -> None:
    """Everything of a line besides iterations."""
    for name, argument in chain(arguments_in(text, number, file), trainer_arguments_in(text, number, file)):
        if len(run.arguments) < MOST_ARGUMENTS:
            run.arguments[name] = argument
    if (memory := memory_in(text)) is not None and len(run.memory) < MOST_RANKS:
        run.memory[memory.rank] = _larger(run.memory.get(memory.rank), memory)
    for where, count in parameters_in(text):
        if len(run.parameters) < MOST_RANKS:
            run.parameters[where] = count
    run.total_parameters = total_parameters_in(text) or titan_parameters_in(text) or run.total_parameters
    run.summary.add(text)
    run.bars.add(text, number)
    if "loss" in text and "epoch" in text and (loss := loss_in(text).get("lm loss")) is not None:
        run.losses.append(loss)
        if (epoch := epoch_line(text, number)) is not None and len(run.epochs) < MOST_ITERATIONS:
            run.epochs.append(epoch)
        if run.bars.last is not None:
            run.bars.beside[run.bars.last] += 1
    if (step_time := step_time_in(text)) is not None and len(run.step_times) < MOST_ITERATIONS:
        run.step_times.append(step_time)
    if _TIMERS in text and "[stage" not in text:
        for match in _TIMER.finditer(text.partition(_TIMERS)[2][:5000]):
            if match[1] in run.timers or len(run.timers) < 60:
                run.timers.setdefault(match[1].strip(), []).append(_milliseconds(match[2]))
    if "[stage " in text and (stage := _STAGE.search(text)) is not None:
        run.stages = max(run.stages, int(stage[1]) + 1)
    if not run.failure and any(word in text for word in _FAILURES):
        run.failure = " ".join(text.split())[:160]
    if (
        not run.device
        and any(word in text for word in ("NVIDIA", "AMD", "Tesla"))
        and (device := _DEVICE.search(text)) is not None
    ):
        run.device = device[0]


def _milliseconds(text: str) -> float:
    try:
        return min(float(text), 1e12)
    except ValueError:
        return 0.0


def _larger(one: Memory | None, other: Memory) -> Memory:
    if one is None:
        return other
    return Memory(
        rank=other.rank,
        allocated_bytes=max(one.allocated_bytes, other.allocated_bytes),
        max_allocated_bytes=max(one.max_allocated_bytes, other.max_allocated_bytes),
        reserved_bytes=max(one.reserved_bytes, other.reserved_bytes),
        max_reserved_bytes=max(one.max_reserved_bytes, other.max_reserved_bytes),
    )
