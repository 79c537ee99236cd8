"""Where the steps of a recording begin and end: the profiler's own marks, or ranges that repeat.

A step lasts from the beginning of one mark to that of the next, the last one as long as its mark. Device work lags
behind the host: what was launched in the last step and ran after it is a tail.
"""

import re
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from mmplan.cost_models.traces.intervals import Ints
from mmplan.cost_models.traces.recording import MARK, Recording

_PROFILER = re.compile(r"^ProfilerStep\s?[#*]?\s?(\d+)")
_STEP_WORDS = re.compile(
    r"(^|[^a-z])(train(ing)?_?)?(step|iter|iteration|minibatch|global_batch)([^a-z]|$)", re.IGNORECASE
)
_NOT_STEPS = re.compile(r"optimizer|scheduler|data|load|profiler|wait|zero_grad|lr_|nccl|gloo", re.IGNORECASE)
_OPTIMIZER = re.compile(r"^Optimizer\.step#")
_MOST_NAME = 200
_MOST_PATTERNS = 50
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """[begin, end) on the file's clock; `name` as marked."""

    name: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """`marked_by` is empty where nothing repeats; then there are no steps. `tail_ns`: end of the device's work for
    them."""

    marked_by: str
    steps: tuple[Step, ...]
    tail_ns: int = 0


def steps_of(recording: Recording, launch: Ints) -> Steps:
    """The steps; `launch` is the host row that launched each kernel."""
    found = _found(recording)
    return replace(found, tail_ns=_tail_ns(recording, launch, found.steps[-1].end_ns)) if found.steps else found


def _found(recording: Recording) -> Steps:
    """By the first of: ProfilerStep#, ranges whose name says step or iteration, the ends of optimizer steps."""
    names = recording.names
    profiler = {i: int(match[1][:18]) for i, name in enumerate(names) if (match := _PROFILER.match(name))}
    if profiler:
        steps = _stretched(recording, _marks(recording, set(profiler)), profiler)
        if steps:
            return Steps(marked_by="ProfilerStep#", steps=steps)
    by_pattern: dict[str, set[int]] = {}
    for i in np.unique(recording.host.name[recording.host.kind == MARK]).tolist():
        name = names[i]
        if _STEP_WORDS.search(name[:_MOST_NAME]) and not _NOT_STEPS.search(name[:_MOST_NAME]):
            by_pattern.setdefault(_DIGITS.sub("#", name[:_MOST_NAME]), set()).add(i)
    likely = sorted(by_pattern.items(), key=lambda item: -len(item[1]))[:_MOST_PATTERNS]
    choices = [(pattern, _marks(recording, rows)) for pattern, rows in likely]
    apart = [(pattern, marks) for pattern, marks in choices if len(marks) >= 2 and _are_apart(marks)]
    if apart:
        pattern, marks = max(apart, key=lambda choice: sum(end - begin for _, begin, end in choice[1]))
        steps = _stretched(recording, marks, {})
        if steps:
            return Steps(marked_by=pattern, steps=steps)
    ends = _marks(recording, {i for i, name in enumerate(names) if _OPTIMIZER.match(name)})
    if len(ends) >= 2 and _are_apart(ends):
        steps = tuple(
            Step(name=f"step {i + 1}", begin_ns=before[2], end_ns=after[2])
            for i, (before, after) in enumerate(pairwise(ends))
            if after[2] > before[2]
        )
        if steps:
            return Steps(marked_by="ends of Optimizer.step", steps=steps)
    return Steps(marked_by="", steps=())


def _marks(recording: Recording, names: set[int]) -> list[tuple[int, int, int]]:
    """(name, begin, end) of the host ranges with these names on the thread that has most of them, by begin."""
    host = recording.host
    rows = np.flatnonzero(host.kind == MARK)
    rows = rows[np.isin(host.name[rows], list(names))]
    if len(rows) == 0:
        return []
    threads, counts = np.unique(host.thread[rows], return_counts=True)
    rows = rows[host.thread[rows] == threads[counts.argmax()]]
    columns = (host.name[rows], host.start_ns[rows], host.end_ns[rows])
    return sorted(set(zip(*(column.tolist() for column in columns), strict=True)), key=lambda mark: mark[1:])


def _are_apart(marks: list[tuple[int, int, int]]) -> bool:
    return all(after[1] >= before[2] for before, after in pairwise(marks))


def _stretched(recording: Recording, marks: list[tuple[int, int, int]], numbers: dict[int, int]) -> tuple[Step, ...]:
    """Each mark up to the next, unless numbers are left out between them; the last one as long as its mark."""
    steps = []
    for i, (name, begin_ns, end_ns) in enumerate(marks):
        follows = i + 1 < len(marks) and numbers.get(marks[i + 1][0], 1) - numbers.get(name, 0) == 1
        if follows or (i + 1 < len(marks) and not numbers):
            end_ns = marks[i + 1][1]
        elif recording.span_ns is not None and begin_ns < recording.span_ns[1] < end_ns:
            end_ns = recording.span_ns[1]  # the profiler stopped before the mark ended
        if end_ns > begin_ns:
            steps.append(Step(name=recording.names[name], begin_ns=begin_ns, end_ns=end_ns))
    return tuple(steps)


def _tail_ns(recording: Recording, launch: Ints, end_ns: int) -> int:
    """When the device has done what was launched before `end_ns`."""
    work, host = recording.work, recording.host
    joined = np.flatnonzero(launch >= 0)
    late = joined[host.start_ns[launch[joined]] < end_ns]
    return max(end_ns, int(work.end_ns[late].max())) if len(late) else end_ns
