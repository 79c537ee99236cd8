"""Single lines of training logs: iterations, memory, parallel degrees, parameters. Times in seconds, sizes in bytes.

Formats: Megatron-LM since 2019, Megatron-DeepSpeed (BigScience), Megatron-Bridge, NeMo's progress bars, DeepSpeed's
pipeline; memory of torchtitan and ms-swift too (their steps: `other_steps.py`). Lines may carry a label of their rank
(`3: `, `[default3]:`) or a time, be glued together or cut.
"""

import datetime
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from mmplan.units import parse_bytes, seconds_of_milliseconds

MAX_FIELDS = 100
KEPT = ("global batch size", "number of skipped iterations", "number of nan iterations", "lm loss")
MOST_S = 1e7  # of one step: 115 days
_LABEL = re.compile(r"^\s*(?:\[(?:default|rank|Rank )?(\d{1,6})\]:?|(\d{1,6}):)(?:\s|(?=\[|20\d\d-))")
_CLOCK = re.compile(
    r"\b(?:(?P<y>20\d\d)[-/](?P<m>[01]\d)[-/](?P<d>[0-3]\d)|(?P<us_m>[01]\d)/(?P<us_d>[0-3]\d)/(?P<us_y>20\d\d))[ T]"
    r"(?P<time>[0-2]\d:[0-5]\d:[0-5]\d)(?:[.,](?P<part>\d{1,9}))?"
)
_ITERATION = re.compile(r"\biteration\s+(\d{1,12})\s*/\s*(\d{1,12})\s*\|")
_NUMBER = re.compile(r"[+-]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][+-]?\d{1,3})?")
_TIMING = re.compile(r"train_step_timing in s[:=]\s*([\d.]{1,20})")
_PROGRESS = re.compile(r"\b(\d{1,9})/(\d{1,9})\s*\[[^\]\n]{0,400}?\btrain_step_timing in s[:=]\s*([\d.]{1,20})")
_STEP_TIME = re.compile(
    r"\bStep Time\s*:\s*([\d.]{1,20})\s*s\b(?:[^|\n]{0,40}?GPU utilization:\s*([\d.]{1,20})\s*MODEL_TFLOP)?"
)
_DEEPSPEED = re.compile(
    r"\bsteps:\s*(\d{1,12})\s+loss:\s*(\S{1,30})\s+iter time \(s\):\s*([\d.]{1,20})"
    r"(?:\s+samples/sec:\s*([\d.]{1,20})(?=\s|$))?"
)
_MEMORY_START = re.compile(r"memory \((MB|GB|MiB|GiB)\)\s*\|")
_MEMORY_FIELD = re.compile(
    r"\|?\s*(?:mem-)?((?:max[ -])?(?:allocated|reserved))(?:-gigabytes)?:\s*([\d.]{1,30})(?=\s*(?:\||$))"
)
_ZERO_MEMORY = re.compile(r"\bMax_MA ([\d.]{1,20}) GB\s+CA ([\d.]{1,20}) GB\s+Max_CA ([\d.]{1,20}) GB")
_TIMER_MEMORY = re.compile(r"\bMemAllocated=([\d.]{1,20})GB, MaxMemAllocated=([\d.]{1,20})GB")
_TITAN_MEMORY = re.compile(r"\bmemory:\s*([\d.]{1,20})GiB\([\d.]{1,8}%\)")  # max_reserved_gib
_AUTOMODEL_MEMORY = re.compile(r"\| mem:? ([\d.]{1,20}) GiB \|")  # torch.cuda.max_memory_allocated
_SWIFT_MEMORY = re.compile(r"['\"]memory\(GiB\)['\"]:\s*['\"]?([\d.]{1,20})")
_MMENGINE_MEMORY = re.compile(r"Iter\(train\).{0,400}(?<![\w_])memory: (\d{1,12})(?=\s|$)")  # max_memory_allocated, MB
_XTUNER_MEMORY = re.compile(r"(?<![\w_])max_memory: ([\d.]{1,12}) GB\b.{0,60}\breserved_memory: ([\d.]{1,12}) GB")
_RANK = re.compile(r"\[[^\]]{0,60}?[Rr]ank (\d{1,7})\]")
_PARAMETERS = re.compile(
    r"number of parameters on \(tensor, pipeline\) model parallel rank \((\d{1,5}), (\d{1,5})\): (\d{1,18})\b"
)
_SHARED_PARAMETERS = re.compile(r"number of parameters on model parallel rank (\d{1,5})\s+([\d.]{1,12}) Billion")
_TOTAL_PARAMETERS = re.compile(r"Total number of parameters in billions: ([\d.]{1,12})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One line about one optimizer step (or the mean of the steps since the line before).

    Attributes:
        step, steps: its number, and how many the run has; None where the line counts otherwise.
        seconds: of a step; None where the line does not say it whole.
        fields: of its other numbers those of `KEPT` and TFLOP/s, by their words in lower case.
        label: of the rank that printed it, None without one.
        at_s: when it was printed, by a clock that lines of one run share; None where it does not say.
    """

    line: int
    step: int
    steps: int | None
    seconds: float | None
    fields: dict[str, float] = field(default_factory=dict)
    label: int | None = None
    at_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one rank as its allocator counts them; what the line does not hold is 0."""

    rank: int | None
    allocated_bytes: int = 0
    max_allocated_bytes: int = 0
    reserved_bytes: int = 0
    max_reserved_bytes: int = 0


def clock_s(text: str) -> float | None:
    """Seconds of the date and time that a line bears, since 1970."""
    found = _CLOCK.search(text)
    if found is None:
        return None
    year, month, day = (found[name] or found[f"us_{name}"] for name in "ymd")
    try:
        at = datetime.datetime.fromisoformat(f"{year}-{month}-{day}T{found['time']}+00:00")
    except ValueError:
        return None
    return at.timestamp() + (float(f"0.{found['part']}") if found["part"] else 0.0)


def iterations_in(text: str, line: int) -> Iterator[Iteration]:
    """The iterations that a line tells of; several where ranks wrote into one line."""
    if "iter" not in text and "train_step_timing" not in text:
        return
    starts = list(_ITERATION.finditer(text))
    label = label_of(text)
    for index, match in enumerate(starts[:MAX_FIELDS]):
        end = starts[index + 1].start() if index + 1 < len(starts) else len(text)
        at_s = clock_s(text[: match.start()])
        yield replace(_megatron(match, text[match.end() : end], line, label), at_s=at_s)
    if starts:
        return
    if (progress := _PROGRESS.search(text)) is not None:
        step, steps, seconds = int(progress[1]), int(progress[2]), _seconds(progress[3])
        yield Iteration(line=line, step=step, steps=steps, seconds=seconds, label=label)
    elif (own := _DEEPSPEED.search(text)) is not None:
        seconds, rate = _seconds(own[3]), _seconds(own[4] or "")
        fields = {"samples per second": rate} if rate is not None else {}
        yield Iteration(line=line, step=int(own[1]), steps=None, seconds=seconds, fields=fields, label=label)


def _megatron(match: re.Match[str], rest: str, line: int, label: int | None) -> Iteration:
    """`key: value |` fields; the last one counts only if its `|` stands, for a cut number looks like a number."""
    fields: dict[str, float] = {}
    seconds: float | None = None
    parts = rest.split("|")
    for part in parts[:-1][:MAX_FIELDS]:
        key, colon, value = part.rpartition(":")
        number = _NUMBER.fullmatch(value.strip())
        if not colon or number is None:
            continue
        key = " ".join(key.lower().replace("_", " ").replace("-", " ").split())
        if key.startswith("elapsed time per iteration") or key in ("iteration time", "train step timing in s"):
            seconds = _step_seconds(key, float(number[0]))
        elif key in KEPT or "tflop" in key:
            fields[key] = float(number[0])
    if seconds is None and (timing := _TIMING.search(rest)) is not None:
        seconds = _seconds(timing[1])
    return Iteration(line=line, step=int(match[1]), steps=int(match[2]), seconds=seconds, fields=fields, label=label)


def _step_seconds(key: str, value: float) -> float | None:
    """Seconds by the unit in the words: (ms) unless (s) or `in s` stands there."""
    in_seconds = "(s)" in key or key.endswith("in s") or "(sec" in key
    return _seconds(str(value)) if in_seconds else _seconds(str(seconds_of_milliseconds(value)))


def _seconds(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value <= MOST_S else None


def label_of(text: str) -> int | None:
    """The rank that a line is labelled with."""
    match = _LABEL.match(text)
    return None if match is None else int(match[1] or match[2])


def step_time_in(text: str) -> tuple[float | None, float | None] | None:
    """(seconds, TFLOP/s per GPU) of a `Step Time : 1.2s GPU utilization: 400MODEL_TFLOP/s/GPU` line."""
    match = _STEP_TIME.search(text) if "Step Time" in text else None
    if match is None:
        return None
    rate = _seconds(match[2]) if match[2] else None
    return _seconds(match[1]), rate


def memory_in(text: str) -> Memory | None:
    """What an allocator line says. Megatron's MB are MiB (bytes / 1024 / 1024); `-gigabytes` are 10^9 bytes."""
    if "memory (" not in text and "Max_MA" not in text:
        told = any(word in text for word in ("emAllocated=", "GiB", "Iter(train)", "max_memory:"))
        return _other_memory(text) if told else None
    start = _MEMORY_START.search(text)
    rank = _RANK.search(text)
    whose = int(rank[1]) if rank is not None else label_of(text)
    if start is None:
        zero = _ZERO_MEMORY.search(text)
        if zero is None:
            return None
        sizes = [_size(value, "GiB") for value in zero.groups()]
        return Memory(rank=whose, max_allocated_bytes=sizes[0], reserved_bytes=sizes[1], max_reserved_bytes=sizes[2])
    decimal = "gigabytes" in text
    unit = "GB" if decimal else {"MB": "MiB", "GB": "GiB"}.get(start[1], start[1])
    found: dict[str, int] = {}
    for match in _MEMORY_FIELD.finditer(text, start.end() - 1):
        found.setdefault(match[1].replace("-", " "), _size(match[2], unit))
    if not found:
        return None
    return Memory(
        rank=whose,
        allocated_bytes=found.get("allocated", 0),
        max_allocated_bytes=found.get("max allocated", 0),
        reserved_bytes=found.get("reserved", 0),
        max_reserved_bytes=found.get("max reserved", 0),
    )


def _other_memory(text: str) -> Memory | None:
    """Of DeepSpeed's throughput timer (bytes / 1024^3), torchtitan and ms-swift."""
    rank = _RANK.search(text)
    whose = int(rank[1]) if rank is not None else label_of(text)
    if (timer := _TIMER_MEMORY.search(text)) is not None:
        sizes = [_size(value, "GiB") for value in timer.groups()]
        return Memory(rank=whose, allocated_bytes=sizes[0], max_allocated_bytes=sizes[1])
    if (most := _AUTOMODEL_MEMORY.search(text)) is not None:
        return Memory(rank=whose, max_allocated_bytes=_size(most[1], "GiB"))
    if (most := _MMENGINE_MEMORY.search(text)) is not None:
        return Memory(rank=whose, max_allocated_bytes=_size(most[1], "MiB"))
    if (both := _XTUNER_MEMORY.search(text)) is not None:
        sizes = [_size(value, "GiB") for value in both.groups()]
        return Memory(rank=whose, max_allocated_bytes=sizes[0], max_reserved_bytes=sizes[1])
    reserved = _TITAN_MEMORY.search(text) or _SWIFT_MEMORY.search(text)
    return None if reserved is None else Memory(rank=whose, max_reserved_bytes=_size(reserved[1], "GiB"))


def _size(text: str, unit: str) -> int:
    try:
        return min(parse_bytes(f"{text} {unit}"), 1 << 50)
    except (ValueError, OverflowError):
        return 0


def parameters_in(text: str) -> Iterator[tuple[tuple[int, int], int]]:
    """((tensor rank, pipeline rank), parameters there); several where ranks wrote into one line."""
    if "number of parameters" not in text:
        return
    for match in _PARAMETERS.finditer(text):
        yield (int(match[1]), int(match[2])), int(match[3])
    for match in _SHARED_PARAMETERS.finditer(text):
        billions = _seconds(match[2])
        if billions is not None:
            yield (int(match[1]), 0), round(billions * 1e9)


def total_parameters_in(text: str) -> int | None:
    """Parameters of the whole model, where a line says them."""
    if "number of parameters" not in text:
        return None
    match = _TOTAL_PARAMETERS.search(text)
    if match is None and (each := _SHARED_PARAMETERS.search(text)) is not None:
        return round((_seconds(each[2]) or 0) * 1e9) or None  # times the ranks: get_parameters_in_billions of that fork
    billions = _seconds(match[1]) if match is not None else None
    return None if billions is None else round(billions * 1e9)
