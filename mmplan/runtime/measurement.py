"""run.json: what a run did, small enough to keep and complete enough to validate a plan against.

One step, the fastest after the first, is recorded action by action; of the others step time and losses are kept.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from mmplan.errors import InputError
from mmplan.files import write_file
from mmplan.planner.plan import Plan, plan_document
from mmplan.planner.prediction import TimedAction

SCHEMA_VERSION = 1

OnStep = Callable[[int, float, Mapping[str, float]], None]  # step, its seconds, losses by module


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeasurement:
    """`step_time_s`: from the common start to the end of the last rank's last action; losses by loss module."""

    index: int
    step_time_s: float
    losses: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionStatistics:
    """All actions of one kind on one rank, over all steps."""

    rank: int
    kind: str
    count: int
    total_s: float
    median_s: float
    min_s: float
    max_s: float


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
class Measurement:
    """A run of a plan. In a rehearsal computes were sleeps of the predicted times `time_scale`; else that is 1."""

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
    timeline: tuple[TimedAction, ...]  # computes, REDUCE and STEP of the recorded step, by rank
    schema_version: int = SCHEMA_VERSION

    @property
    def step_time_s(self) -> float:
        """Of the recorded step."""
        return self.steps[self.recorded_step].step_time_s


_MEASUREMENT = TypeAdapter(Measurement)


def plan_hash(plan: Plan) -> str:
    """First 16 hex digits of the SHA-256 of the plan's canonical JSON."""
    return hashlib.sha256(json.dumps(plan_document(plan), sort_keys=True).encode()).hexdigest()[:16]


def run_document(measurement: Measurement) -> dict[str, object]:
    """The measurement as JSON values."""
    document: dict[str, object] = _MEASUREMENT.dump_python(measurement, mode="json")
    return document


def save_run(measurement: Measurement, path: Path) -> None:
    """Write run.json; the file appears whole or not at all."""
    write_file(path, _MEASUREMENT.dump_json(measurement, indent=1) + b"\n")


def load_run(path: Path) -> Measurement:
    """Read run.json.

    Raises:
        InputError: the file is missing, is not a run, or has another schema version.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the run: {error}", file=path) from error
    try:
        run = _MEASUREMENT.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise InputError(f"not a run: {first['msg']} (of {error.error_count()})", file=path, key=key) from error
    if run.schema_version != SCHEMA_VERSION:
        raise InputError(f"schema version {run.schema_version}, this mmplan reads {SCHEMA_VERSION}", file=path)
    return run
