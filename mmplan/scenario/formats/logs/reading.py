"""A training log for `mmplan import`: the record of a measured run, and the row of it that `mmplan backtest` reads."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from mmplan.errors import InputError
from mmplan.scenario.document import counted, listed
from mmplan.scenario.formats.launch.arguments import CommandLine
from mmplan.scenario.formats.launch.comments import hinted_devices
from mmplan.scenario.formats.launch.facts import Fact, SetUp, whole
from mmplan.scenario.formats.launch.megatron import megatron_set_up
from mmplan.scenario.formats.launch.shell_text import Word
from mmplan.scenario.formats.logs.other_steps import SAMPLES, from_rates
from mmplan.scenario.formats.logs.row import count_of, missing_for_a_row, row_of
from mmplan.scenario.formats.logs.run import Run, runs_of
from mmplan.scenario.formats.logs.steps import Steps, typical_steps
from mmplan.scenario.formats.logs.text import read_log_lines
from mmplan.scenario.formats.logs.throughput import throughput_of
from mmplan.scenario.formats.logs.torchtitan_facts import torchtitan_facts
from mmplan.scenario.formats.reading import Head, Reading
from mmplan.units import format_bytes, format_seconds

_MEGATRON_MARKS = re.compile(
    r"\biteration\s+\d+\s*/\s*\d+\s*\||train_step_timing in s|using world size: \d+|-{5,} arguments -{5,}"
    r"|number of parameters on (?:\(tensor, pipeline\) )?model parallel rank|\bStep Time\s*:\s*[\d.]+\s*s\b"
    r"|iter time \(s\): \d"
)
_OTHER_MARKS = re.compile(
    r"(?:\b|Curr|RunningAvg)SamplesPerSec=\d|\bstep:\s*\d+\s+loss:.{0,200}\b(?:tps|wps):\s*\d"
    r"|[{,] ?'loss': ?['\d].{0,200}'epoch': ?['\d]|['\"]train_runtime['\"]: ?['\"\d]|\btrain_runtime\s+=\s+\d"
    r"|\"current_steps\": ?\d+, ?\"total_steps\": ?\d|\*{3,} Running training \*{3,}"
    r"|\"log_history\": ?\[|\bstep \d+ \| epoch \d+ \| loss .{0,200}\btps \d"
    r"|Iter\(train\) +\[ *\d+/\d+\]|\[XTuner\].{0,200}\bStep \d+/\d+ "
    r"|\bEpoch \d+(?:/\d+)?:\s+\d{1,3}%\|[^|\n]{0,300}\| \d+/\d+ \["
)
_OF_A_MAPPING = re.compile(
    r"\{'|\{\"current_steps\"|\{[^{}]{0,4000}\"(?:train_runtime|log_history)\""
)  # logs whose lines are such
_BATCH = "global batch size"
_ESTIMATE = re.compile(r"_est_(\d{1,9})(?!\d)")
_FACTS = (
    "world", "nodes", "per_node", "tp", "pp", "vp", "cp", "ep", "etp", "microbatch", "global_batch", "sequence",
    "layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "experts", "topk", "precision", "fp8", "recompute",
    "sharding", "attention",
)  # fmt: skip


def looks_like_megatron_log(head: Head) -> bool:
    """A line of an iteration, of the degrees at the start, or of a dump of arguments."""
    return _looks_like(head, _MEGATRON_MARKS)


def looks_like_training_log(head: Head) -> bool:
    """A line of a step, a progress bar or the end of a training with other software."""
    return _looks_like(head, _OTHER_MARKS)


def _looks_like(head: Head, marks: re.Pattern[str]) -> bool:
    text = head.text.lstrip()
    if text.startswith("{") and _OF_A_MAPPING.match(text) is None:
        return False
    return marks.search(text) is not None


def read_log(kind: str) -> Callable[[Sequence[Path]], Reading]:
    """The reader of logs of one kind: all lines are known to both."""
    return lambda paths: replace(_read_log(paths), kind=kind)


def _read_log(paths: Sequence[Path]) -> Reading:
    """The record of one log, or of the logs of one run's ranks taken one after the other.

    Raises:
        InputError: a file that cannot be read, or without a step time or a memory line.
    """
    if len(paths) > 1:
        raise InputError(f"one log is one measured run: expected one file, found {counted(len(paths), 'file')}")
    path = paths[0]
    runs = runs_of(read_log_lines(path), path)
    chosen = _longest(runs)
    if chosen is None:
        raise InputError(
            "no line of an iteration with its time, and none of memory: not the log of a training", file=path
        )
    warnings: list[str] = []
    setup = _settings(chosen, path, warnings)
    steps = typical_steps(chosen) or _steps_of_rates(chosen, setup)
    read: list[str] = []
    if len(runs) > 1:
        kept = runs.index(chosen) + 1
        warnings.append(
            f"{len(runs)} runs stand in the file: run {kept} with {len(chosen.iterations)} iterations is read"
        )
    record = {"source": path.name, **_speed(chosen, steps, setup, read, warnings)}
    memory = _memory_values(chosen)
    if memory:
        record["memory"] = memory
        read.append(f"memory of the fullest rank: {format_bytes(max(memory.values()))}")
    record["configuration"] = _configuration(setup, steps)
    parameters = _parameters(chosen, setup)
    if parameters is not None:
        record["parameters"] = parameters
        read.append(_parameter_sentence(parameters, chosen))
    if (estimate_s := _estimate_s(path)) is not None and steps is not None:
        record["estimate_s"] = estimate_s
        ratio = estimate_s / steps.median_s
        read.append(f"the file's name estimates {format_seconds(estimate_s)} a step: {ratio:.2f} x measured")
    if chosen.failure:
        warnings.append(f"the run ended with an error: {chosen.failure}")
    row = row_of(setup, steps, memory, path)
    record["row"] = row
    lacking = missing_for_a_row(row)
    if lacking:
        warnings.append(f"to price it as a measured row there are missing: {', '.join(lacking)}")
    else:
        read.append("enough for a row of a table: `-o row.csv` writes it for `mmplan backtest row.csv`")
    return Reading(
        kind="training-log",
        fragment=record,
        document="record of a measured run",
        read=tuple(read),
        ignored=_ignored(chosen, steps),
        warnings=tuple(dict.fromkeys((*warnings, *setup.warnings))),
    )


def _speed(run: Run, steps: Steps | None, setup: SetUp, read: list[str], warnings: list[str]) -> dict[str, Any]:
    """What the lines of steps give, or the end of the training where no line of a step has a time."""
    if steps is None and run.summary.samples_per_s:
        read.append(f"{run.summary.samples_per_s:g} samples/s over the whole training")
        warnings.append("no line says how many steps there were: the time of a step is not known")
        return {"printed_samples_per_s": run.summary.samples_per_s}
    if steps is None:
        if run.iterations:
            warnings.append("lines of steps say no time, and no clock or batch gives it")
        return {}
    read.append(_step_sentence(steps))
    warnings += _step_warnings(steps, run)
    warnings += [f"times of steps are of {run.timed_by}"] if run.timed_by else []
    whole_s = run.summary.step_s
    if whole_s is not None and len(steps.seconds) > 1:
        read.append(f"the whole training took {format_seconds(whole_s)} a step, evaluations and checkpoints included")
    values = {"step": _step_values(steps, run), **throughput_of(run, steps, setup, warnings)}
    losses = [loss for iteration in run.iterations if (loss := iteration.fields.get("lm loss")) is not None]
    losses = losses or run.losses
    if losses:
        values["loss"] = {"first": losses[0], "last": losses[-1]}
    return values


def _estimate_s(path: Path) -> float | None:
    """What a planner said of the step in the file's name."""
    found = _ESTIMATE.search(path.name)
    return int(found[1]) / 1000 if found is not None else None


def _parameter_sentence(parameters: int, run: Run) -> str:
    how = "" if run.total_parameters is not None else ", the sum of all ranks' (a tied table counts twice)"
    return f"{parameters:,} parameters{how}"


def log_set_up(kind: str) -> Callable[[Path], SetUp]:
    """The reader of what logs of one kind say of their run as launch files would."""
    return lambda path: replace(_log_set_up(path), kind=kind)


def _log_set_up(path: Path) -> SetUp:
    """The run that a log describes, as launch files would.

    Raises:
        InputError: no arguments in it.
    """
    runs = runs_of(read_log_lines(path), path)
    chosen = _longest(runs)
    if chosen is None or not chosen.arguments:
        raise InputError("the log prints no arguments", file=path)
    warnings: list[str] = []
    setup = _settings(chosen, path, warnings)
    return replace(setup, warnings=(*setup.warnings, *warnings))


def _longest(runs: Sequence[Run]) -> Run | None:
    """The run with the most timed iterations; of equals the one that says most of itself, and the last."""
    if not any(run.iterations or run.memory or run.summary.samples_per_s for run in runs):
        return None
    return max(
        enumerate(runs),
        key=lambda each: (len(each[1].iterations), bool(each[1].arguments), len(each[1].memory), each[0]),
    )[1]


def _steps_of_rates(run: Run, setup: SetUp) -> Steps | None:
    """Steps whose lines say samples or tokens per second alone."""
    numbers = (count_of(setup, name) for name in ("global_batch", "sequence", "world"))
    batch, sequence, world = numbers
    run.iterations = from_rates(run.iterations, batch, sequence, world)
    steps = typical_steps(run)
    run.timed_by = "the printed rate and the batch" if steps is not None else ""
    return steps


def _settings(run: Run, path: Path, warnings: list[str]) -> SetUp:
    """Facts of the dump, of the lines about degrees and of parameters per rank; the file's name fills what is open."""
    arguments = {name: argument for name, argument in run.arguments.items() if name != "constant_microbatches"}
    facts: dict[str, Fact] = {}
    told: tuple[str, ...] = ()
    if arguments:
        try:
            setup = megatron_set_up(CommandLine(file=path, arguments=arguments), "megatron-log")
            facts, told = dict(setup.facts), setup.warnings
        except InputError as error:
            warnings.append(f"the arguments that the log prints are not read: {error.message}")
    devices = [Word(run.device, 0)] if run.device else []
    hints = hinted_devices(devices, path) | _named_degrees(path) | _degrees_of_parameters(run, path)
    hints.pop("hinted_world", None)
    sizes = [iteration.fields[_BATCH] for iteration in run.iterations if _BATCH in iteration.fields]
    if sizes:
        hints["global_batch"] = Fact(value=int(sizes[-1]), file=path, key=_BATCH)
    elif (batch := _batch_of_rates(run)) is not None:
        hints["global_batch"] = Fact(value=batch, file=path, key="samples/sec x iter time")
    elif (batch := run.summary.batch) is not None:
        hints["global_batch"] = Fact(value=batch, file=path, key="samples / steps per second")
    facts |= torchtitan_facts(arguments, facts)
    setup = SetUp(kind="training-log", files=(path,), facts=hints | facts, warnings=told)
    return _with_world(setup, path)


def _with_world(setup: SetUp, path: Path) -> SetUp:
    """With the processes that replicas, or batch, microbatch and accumulation imply where no line says their number."""
    if {"world", "nodes"} & setup.facts.keys():
        return setup
    try:
        replicas = setup.count("dp") or setup.implied_replicas()
        widths = [setup.count(name, most=100_000) or 1 for name in ("tp", "pp", "cp")]
    except InputError:
        return setup
    if replicas is None:
        return setup
    world = Fact(value=replicas * math.prod(widths), file=path, key="replicas x degrees")
    return replace(setup, facts={**setup.facts, "world": world})


def _batch_of_rates(run: Run) -> int | None:
    """Samples of a step where lines say both its seconds and samples per second."""
    said = [i for i in run.iterations if i.at_s is None and i.seconds is not None and SAMPLES in i.fields]
    batches = [i.seconds * i.fields[SAMPLES] for i in said[1:] or said if i.seconds is not None]
    batch = round(statistics.median(batches)) if batches else 0
    return batch if batch > 0 and abs(statistics.median(batches) / batch - 1) < 0.01 else None


def _named_degrees(path: Path) -> dict[str, Fact]:
    """`..._dp1_tp4_pp16-1809577.log`."""
    found = re.findall(r"(?:^|[_-])(dp|tp|pp|cp|ep)(\d{1,4})(?=[_.-]|$)", path.name.lower())
    return {name: Fact(value=int(size), file=path, key="the file's name") for name, size in found if int(size) > 0}


def _degrees_of_parameters(run: Run, path: Path) -> dict[str, Fact]:
    """tp and pp of the ranks that print their parameters, if all of them do and none speaks of other stages."""
    if not run.parameters:
        return {}
    tp, pp = (1 + max(rank[axis] for rank in run.parameters) for axis in (0, 1))
    if len(run.parameters) != tp * pp or run.stages not in (0, pp):
        return {}
    return {name: Fact(value=size, file=path, key="number of parameters") for name, size in (("tp", tp), ("pp", pp))}


def _step_values(steps: Steps, run: Run) -> dict[str, Any]:
    return {
        "median_s": round(steps.median_s, 6),
        "p10_s": round(steps.percentile_s(0.1), 6),
        "p90_s": round(steps.percentile_s(0.9), 6),
        "steps": len(steps.seconds),
        "first_step": steps.iterations[0].step,
        "last_step": steps.iterations[-1].step,
        "warm_up_steps": steps.warm_up,
        "skipped_or_nan_steps": steps.skipped,
        "outliers": len(steps.outliers),
    }


def _step_sentence(steps: Steps) -> str:
    span = f"P10 {format_seconds(steps.percentile_s(0.1))}, P90 {format_seconds(steps.percentile_s(0.9))}"
    left = [
        f"{count} {what}"
        for count, what in (
            (steps.warm_up, "of warm-up"),
            (steps.skipped, "skipped or NaN"),
            (steps.other_batch, "of another batch size"),
            (len(steps.outliers), "outliers" if len(steps.outliers) > 1 else "outlier"),
        )
        if count
    ]
    without = f", without {', '.join(left)}" if left else ""
    return f"a step takes {format_seconds(steps.median_s)} ({span}) over {counted(len(steps.seconds), 'line')}{without}"


def _step_warnings(steps: Steps, run: Run) -> list[str]:
    warnings = [f"{steps.doubt}: its time stands for a step"] if steps.doubt else []
    if steps.without_time:
        warnings.append(f"{counted(steps.without_time, 'line')} of iterations are cut before their time")
    for iteration, cause in steps.outliers[:5]:
        assert iteration.seconds is not None
        why = f"behind {cause}" if cause else "no checkpoint or evaluation is near"
        warnings.append(f"line {iteration.line}: step {iteration.step} took {format_seconds(iteration.seconds)}, {why}")
    if len(steps.outliers) > 5:
        warnings.append(f"{len(steps.outliers) - 5} more outliers")
    if run.repeated:
        warnings.append(f"{counted(run.repeated, 'line')} repeat an iteration (several ranks write into the file)")
    spacing = Counter(later.step - earlier.step for earlier, later in pairwise(run.iterations))
    if spacing and min(spacing) > 1:
        usual = spacing.most_common(1)[0][0]
        warnings.append(f"a line stands for {usual} steps: P10 and P90 are of means over so many")
    return warnings


def _memory_values(run: Run) -> dict[str, int]:
    """Largest over ranks."""
    names = ("allocated_bytes", "max_allocated_bytes", "reserved_bytes", "max_reserved_bytes")
    values = {name: max((getattr(memory, name) for memory in run.memory.values()), default=0) for name in names}
    return {name: value for name, value in values.items() if value}


def _configuration(setup: SetUp, steps: Steps | None) -> dict[str, Any]:
    values: dict[str, Any] = {name: _plain(setup.facts[name].value) for name in _FACTS if name in setup.facts}
    if steps is not None and steps.batch is not None:
        values["global_batch"] = steps.batch
    return values


def _plain(value: Any) -> Any:
    number = whole(value) if isinstance(value, str) else None
    return value if number is None else number


def _parameters(run: Run, setup: SetUp) -> int | None:
    """Of the whole model: printed, or the sum over all model-parallel ranks where each printed its own."""
    if run.total_parameters is not None:
        return run.total_parameters
    ranks = 1
    for name in ("tp", "pp"):
        ranks *= (whole(setup.facts[name].value) or 1) if name in setup.facts else 1
    return sum(run.parameters.values()) if run.parameters and len(run.parameters) == ranks else None


def _ignored(run: Run, steps: Steps | None) -> tuple[str, ...]:
    ignored = []
    if run.timers:
        ignored.append(f"timers of parts of a step: {listed(run.timers, 12)}")
    if run.parameters:
        ignored.append(f"parameters of {counted(len(run.parameters), 'model-parallel rank')}")
    return tuple(ignored)
