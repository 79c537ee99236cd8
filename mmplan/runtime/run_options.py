"""How a plan is run: what `execute` was asked for, as every process of the run gets it. Imports no torch."""

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from mmplan.runtime.checkpoint.options import Checkpoints
from mmplan.runtime.health.run_interval import DEFAULT_HEALTH_INTERVAL
from mmplan.runtime.inject import Injection
from mmplan.runtime.on_nan import DEFAULT_MAX_SKIPS, OnNan

DEFAULT_UNIT_S = 0.03  # bubbles of sleeps came within 2.8 points of simulation at 30 ms, 24 at 3 ms (2 busy cores)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Meanings are those of `launch.execute`."""

    steps: int
    rehearse: bool = False
    unit_s: float = DEFAULT_UNIT_S
    timeout_s: float | None = None
    job: Path | None = None
    data: Path | None = None
    weights: Path | None = None
    trace: Path | None = None
    health: Path | None = None
    health_interval: int = DEFAULT_HEALTH_INTERVAL
    share_devices: bool = False
    save_weights: Path | None = None
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    on_nan: OnNan = "stop"
    max_skips: int = DEFAULT_MAX_SKIPS
    step_timeout_s: float | None = None
    inject: tuple[Injection, ...] = ()
    failure_file: Path | None = None
    gradients: Path | None = None
    launcher: int | None = None  # the process that started the others on this machine


_OPTIONS = TypeAdapter(RunOptions)


def save_options(options: RunOptions, path: Path) -> None:
    path.write_bytes(_OPTIONS.dump_json(options))


def load_options(path: Path) -> RunOptions:
    return _OPTIONS.validate_json(path.read_bytes())
