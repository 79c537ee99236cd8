"""run.json: what a run did, small enough to keep and complete enough to validate a plan against.

One step, the fastest after the first, is recorded action by action, in columns (`timeline.py`); of the others step
time, losses and statistics by rank, stage and kind are kept. All steps go to a trace where one is asked for.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mmplan.errors import InputError, RunError
from mmplan.files import write_file
from mmplan.planner.plan import Plan, plan_document
from mmplan.planner.prediction import TimedAction
from mmplan.runtime.timeline import RankTimeline, rank_timelines

SCHEMA_VERSION = 2

OnStep = Callable[[int, float, Mapping[str, float]], None]  # step, its seconds, losses by module
OnNote = Callable[[str], None]  # what a user has to know while the run goes on


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """Bytes of one step: sent between stages, given to collectives among replicas, and by ranks that share layers to
    each other."""

    sent_bytes: int
    reduce_bytes: int
    tensor_bytes: int

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(
            sent_bytes=self.sent_bytes + other.sent_bytes,
            reduce_bytes=self.reduce_bytes + other.reduce_bytes,
            tensor_bytes=self.tensor_bytes + other.tensor_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeasurement:
    """`step_time_s`: from the common start to the end of the last rank's last action; losses by loss module, none that
    is no number. `skipped`: the weights were not updated, because of such a one or such a gradient. `loss_scales`: by
    which losses were multiplied, by modality; empty where they were not (they are in fp16). `moved`: by all listed
    ranks; `foreseen`: what it had to be by the step's programs and recordings, where its data are a job's own."""

    index: int
    step_time_s: float
    losses: dict[str, float]
    skipped: bool = False
    loss_scales: dict[str, float] = field(default_factory=dict)
    moved: Moved | None = None
    foreseen: Moved | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionStatistics:
    """All actions of one kind of one stage on one rank, over all steps."""

    rank: int
    stage: int
    kind: str
    count: int
    total_s: float
    median_s: float
    min_s: float
    max_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferMeasurement:
    """Messages of one size from one rank to another: how many in the recorded step, and the seconds that one of them
    took alone between these ranks after the run. Ranks count as in `RankMeasurement`."""

    source: int
    target: int
    bytes: int
    count: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMeasurement:
    """One rank in the recorded step; one stands for the ranks that share its layers, and `rank` counts without others.

    `busy_s` and `bubble` as in a prediction. Bytes are those of the tensors handed to the network. `transfer_s`: its
    sends and receives, each at the time a transfer of that size took alone between these ranks after the run;
    `wait_s`: host time in which computes waited for tensors. `reduce_s` counts from the arrival of the last replica.
    `tensor_bytes` were given to sums over the ranks that share layers.
    `peak_memory_bytes`: on CUDA the allocator's peak; on CPU weights, gradients, optimizer state and the bytes that
    autograd kept, at their worst moment.
    """

    rank: int
    stage: int
    replica: int
    busy_s: float
    bubble: float
    activation_bytes: int
    gradient_bytes: int
    reduce_bytes: int
    transfer_s: float
    wait_s: float
    reduce_s: float
    peak_memory_bytes: int
    tensor_bytes: int = 0

    @property
    def sent_bytes(self) -> int:
        return self.activation_bytes + self.gradient_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCheckpoint:
    """A checkpoint behind `step` steps. `stall_s`: training stood still for it, first for the copy, then where it came
    to the next one or to its end before this one was written; `write_s`: of the slowest rank. `problem`: why it was
    left out, None where it is there.
    """

    step: int
    bytes: int
    stall_s: float
    write_s: float
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """What a run went on from. `damaged`: newer checkpoints that could not be used, and why; `read_bytes`: of weights
    and moments, by all ranks; `moved_bytes` of them from parts that other ranks had written."""

    checkpoint: str
    step: int
    plan_hash: str
    damaged: tuple[str, ...]
    read_bytes: int
    moved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """A run of a plan. In a rehearsal computes were sleeps of the predicted times `time_scale`; else that is 1.

    `steps` begin with those before the checkpoint that the run went on from.
    """

    plan_hash: str
    mmplan_version: str
    torch_version: str
    python_version: str
    device: str
    backend: str
    hosts: tuple[str, ...]
    processes_per_core: float  # on the host where it is highest
    rehearsed: bool
    time_scale: float
    steps: tuple[StepMeasurement, ...]
    recorded_step: int
    pipeline_s: float
    bubble: float
    ranks: tuple[RankMeasurement, ...]
    actions: tuple[ActionStatistics, ...]
    timeline: tuple[TimedAction, ...]  # computes, REDUCE and STEP of the recorded step, by rank; bare (`timeline.py`)
    asked_s: tuple[float, ...] = ()  # of each of them, when its rank was ready for it; empty: as it started
    transfers: tuple[TransferMeasurement, ...] = ()
    own_data: bool = False  # a job's, not the samples of the scenario
    resumed: Resumed | None = None
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def step_time_s(self) -> float:
        """Of the recorded step."""
        return self.steps[self.recorded_step].step_time_s


_MEASUREMENT = TypeAdapter(Measurement)
_TIMELINES = TypeAdapter(tuple[RankTimeline, ...])


def require_last_checkpoint(run: Measurement) -> None:
    """Raise RunError where the checkpoint at the end of the run is missing."""
    if run.checkpoints and run.checkpoints[-1].problem is not None:
        raise RunError(f"the checkpoint at the end of the run is missing: {run.checkpoints[-1].problem}")


def plan_hash(plan: Plan) -> str:
    """First 16 hex digits of the SHA-256 of the plan's canonical JSON."""
    return hashlib.sha256(json.dumps(plan_document(plan), sort_keys=True).encode()).hexdigest()[:16]


def run_document(measurement: Measurement) -> dict[str, Any]:
    """The measurement as JSON values."""
    document: dict[str, Any] = _MEASUREMENT.dump_python(measurement, mode="json", exclude={"timeline", "asked_s"})
    rows = rank_timelines(measurement.timeline, measurement.asked_s)
    return {**document, "timeline": _TIMELINES.dump_python(rows, mode="json")}


def save_run(measurement: Measurement, path: Path) -> None:
    """Write run.json, an entry of a list on each line; the file appears whole or not at all."""
    lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in run_document(measurement).items()]
    write_file(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _lines(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f" {json.dumps(item)}" for item in value) + "\n]"
    return json.dumps(value)


def load_run(path: Path) -> Measurement:
    """Read run.json.

    Raises:
        InputError: the file is missing, is not a run, or has another schema version.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the run: {error}", file=path) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"not a run: {error}", file=path) from error
    if not isinstance(document, dict):
        raise InputError(f"not a run: expected an object, found a {type(document).__name__}", file=path)
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        known = "no schema version" if version is None else f"schema version {version}"
        raise InputError(f"not a run: {known}, this mmplan reads {SCHEMA_VERSION}", file=path, key="schema_version")
    try:
        rows = _TIMELINES.validate_python(document.get("timeline"))
        timeline = [item for row in rows for item in row.timed()]
        asked_s = [asked_s for row in rows for asked_s in row.asked_s]
        values = {field.name: document[field.name] for field in fields(Measurement) if field.name in document}
        return _MEASUREMENT.validate_python({**values, "timeline": timeline, "asked_s": asked_s})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise InputError(f"not a run: {first['msg']} (of {error.error_count()})", file=path, key=key) from error
    except ValueError as error:
        raise InputError(f"not a run: {error}", file=path, key="timeline") from error
