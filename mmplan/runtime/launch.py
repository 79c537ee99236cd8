"""Starts a run: under torchrun in this process, or with processes of its own on this machine.

A local run cannot hang: every communication has a time-out, a failing rank ends all of them, and so do Ctrl-C, a
termination request and a closed terminal.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mmplan.errors import InputError, RunError
from mmplan.files import require_folder
from mmplan.planner.check import require_structure
from mmplan.planner.plan import Plan, save_plan
from mmplan.runtime.checkpoint.before_run import check_checkpoints
from mmplan.runtime.checkpoint.options import Checkpoints
from mmplan.runtime.ghost.manifest import read_rows
from mmplan.runtime.health.run_interval import DEFAULT_HEALTH_INTERVAL
from mmplan.runtime.inject import Injection, check_injections
from mmplan.runtime.limits import Limits, limits
from mmplan.runtime.local_failure import cause_of_failure, keep_failure, read_positions, stands_still
from mmplan.runtime.measurement import Measurement, OnNote, OnStep, load_run
from mmplan.runtime.on_nan import DEFAULT_MAX_SKIPS, OnNan
from mmplan.runtime.places import one_process_each
from mmplan.runtime.position import process_lives
from mmplan.runtime.requirements import check_local_run, process_count, refuse_forms
from mmplan.runtime.run_options import DEFAULT_UNIT_S, RunOptions, save_options
from mmplan.runtime.torchrun import OnFailure, is_main_process, show_failure

_POLL_S = 0.1
_REPORT_S = 2.0  # from the first failure, for torchrun to say which rank was killed and for other ranks to speak
_GRACE_S = 5.0  # between asking the processes to end and killing them


def execute(
    plan: Plan,
    *,
    steps: int,
    local: int | None,
    rehearse: bool = False,
    unit_s: float = DEFAULT_UNIT_S,
    timeout_s: float | None = None,
    job: Path | None = None,
    data: Path | None = None,
    weights: Path | None = None,
    save_weights: Path | None = None,
    checkpoints: Checkpoints | None = None,
    trace: Path | None = None,
    health: Path | None = None,
    health_interval: int = DEFAULT_HEALTH_INTERVAL,
    share_devices: bool = False,
    on_nan: OnNan = "stop",
    max_skips: int = DEFAULT_MAX_SKIPS,
    step_timeout_s: float | None = None,
    inject: Sequence[Injection] = (),
    failure_file: Path | None = None,
    gradients: Path | None = None,
    on_step: OnStep | None = None,
    on_note: OnNote | None = None,
    on_failure: OnFailure = show_failure,
) -> Measurement | None:
    """Run the plan for `steps` optimizer steps, on synthetic data or on a job's own.

    Args:
        local: processes to start on this machine; None: this process is one of torchrun's.
        rehearse: replace computes by sleeps, a mean forward of at least `unit_s` (see `rehearse.py`).
        timeout_s: of any communication; a rank that hangs ends the run after it. None: see `default_timeout_s`.
        on_nan: what a step does whose loss or gradients are no numbers: end the run, or leave the update out on all
            ranks, at most `max_skips` times in a row.
        step_timeout_s: of a whole step, whether or not a rank waits for another; None: ten times the other.
        inject: faults to rehearse what happens then.
        failure_file: where a failed run leaves tracebacks; None: nowhere.
        gradients: a folder for what each rank's steps took from its weights (`first_gradients.py`).
        job: a file with the user's own model and data (see `ghost/job.py`); None: the scenario's model, built here.
        data: a manifest, of whose rows the job makes batches; None: it has data of its own.
        weights: a folder of safetensors files with the weights of the job's model; None: they are drawn.
        save_weights: a folder that is made at the end, with the weights of the job's model.
        checkpoints: what is saved while the run goes on, and what it goes on from; None: nothing.
        trace: a file for all steps of all ranks, in the form of Chrome's traces (`trace.py`), written by rank 0.
        health: a file for readings of all monitors that apply (`health/readings.py`), written by rank 0.
        health_interval: steps between those in which more is read than losses and numbers that are none.
        share_devices: several processes may compute on one GPU, and talk over gloo.
        on_note: hears what a user has to know meanwhile, as `on_step` does.
        on_step: is told each finished step while the run goes on; under torchrun on rank 0 only.
        on_failure: under torchrun, is told why this process ends where it cannot raise because it is stuck.

    Returns:
        The measurement; None on torchrun's ranks other than 0, and where the checkpoint leaves no steps.

    Raises:
        CheckError: the plan's stages or degrees are not sound.
        InputError: the plan needs another number of processes, or cannot be executed by this release.
        RunError: a rank failed; names it and its error.
    """
    if steps < 1:
        raise InputError(f"a run needs at least 1 step, found {steps}")
    _check_job(job, weights, data, rehearse=rehearse)
    _check_save_weights(save_weights, job)
    require_structure(plan)
    job, weights = job and job.resolve(), weights and weights.resolve()
    options = RunOptions(
        steps=steps,
        rehearse=rehearse,
        unit_s=unit_s,
        timeout_s=timeout_s,
        job=job,
        data=data and data.resolve(),
        weights=weights,
        trace=trace and trace.resolve(),
        health=health and health.resolve(),
        health_interval=health_interval,
        share_devices=share_devices,
        save_weights=save_weights and save_weights.resolve(),
        checkpoints=checkpoints.resolved() if checkpoints is not None else Checkpoints(),
        on_nan=on_nan,
        max_skips=max_skips,
        step_timeout_s=step_timeout_s,
        inject=tuple(inject),
        failure_file=failure_file if local is None else None,
        gradients=gradients,
        launcher=os.getpid() if local is not None else None,
    )
    if is_main_process():
        _check_run(plan, options)
        if failure_file is not None:
            failure_file.unlink(missing_ok=True)  # of a run before
    if local is not None:
        return _run_here(plan, options, local, failure_file, on_step, on_note)
    # Imported here so that a launcher, which computes nothing, does not load torch.
    from mmplan.runtime.worker import run_worker

    return run_worker(plan, options, on_step, on_note, on_failure)


def _check_run(plan: Plan, options: RunOptions) -> None:
    """What can be said of checkpoints and injected faults before any process starts."""
    check_checkpoints(plan, options)
    started = one_process_each(plan) if options.rehearse else plan
    processes = process_count(plan, rehearse=options.rehearse, own_model=options.job is not None)
    check_injections(options.inject, started, options.steps, processes)


def _run_here(
    plan: Plan,
    options: RunOptions,
    count: int,
    failure_file: Path | None,
    on_step: OnStep | None,
    on_note: OnNote | None,
) -> Measurement | None:
    """The run with processes of its own on this machine."""
    check_local_run(plan, count, rehearse=options.rehearse, own_model=options.job is not None)
    if options.job is None and not options.rehearse:
        refuse_forms(plan.scenario)
    with _unwound_by_signals(), tempfile.TemporaryDirectory(prefix="mmplan-run-") as folder:
        scratch = Path(folder)
        save_plan(plan, scratch / "plan.json")
        save_options(options, scratch / "options.json")
        _run_processes(scratch, count, limits(plan, options), failure_file, on_step, on_note)
        measured = scratch / "run.json"
        return load_run(measured) if measured.exists() else None


def _check_job(job: Path | None, weights: Path | None, data: Path | None, *, rehearse: bool) -> None:
    """What can be said of a job before any process starts."""
    if data is not None and job is None:
        raise InputError("a manifest holds the data of a job's model: name the job too", file=data)
    if data is not None and is_main_process():
        read_rows(data)
    if job is not None and rehearse:
        raise InputError("a rehearsal sleeps instead of computing: it takes no job")
    if job is not None and not job.is_file():
        raise InputError("no such file", file=job)
    if weights is not None and job is None:
        raise InputError("weights are those of a job's model: name the job too")
    if weights is not None and not weights.is_dir():
        raise InputError("expected a folder of safetensors files", file=weights)


def _check_save_weights(folder: Path | None, job: Path | None) -> None:
    if folder is not None and job is None:
        raise InputError(
            "weights are saved of a job's model, under its names; those of a scenario's are in checkpoints"
        )
    if folder is not None and is_main_process():
        if folder.exists():
            raise InputError("it is there already; weights are saved in a new folder", file=folder)
        require_folder(folder)


@contextmanager
def _unwound_by_signals() -> Iterator[None]:
    """A termination request and a closed terminal end this process as Ctrl-C does: by unwinding, which cleans up."""

    def unwind(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    # One that is ignored (nohup) stays so; only the main thread may set handlers, and only it gets signals.
    caught = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    caught = caught if threading.current_thread() is threading.main_thread() else []
    for number in caught:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


def _run_processes(
    scratch: Path,
    count: int,
    limit: Limits,
    failure_file: Path | None,
    on_step: OnStep | None,
    on_note: OnNote | None,
) -> None:
    # --standalone finds a free port itself; the loopback address spares look-ups of this machine's name.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    worker = ["-m", "mmplan.runtime.worker", str(scratch)]
    command = [sys.executable, *torchrun, "--nproc-per-node", str(count), *worker]
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **loopback}
    with (scratch / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            told, overdue = 0, False
            while process.poll() is None and not list(scratch.glob("failure-*.json")) and not overdue:
                told = _tell(scratch, told, on_step, on_note)
                overdue = stands_still(scratch, limit)
                time.sleep(_POLL_S)
            failed = process.poll() != 0
            if failed and not overdue:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_REPORT_S)
            elif not failed:
                _tell(scratch, told, on_step, on_note)
            positions = read_positions(scratch, count) if failed else {}  # before they are killed
        finally:
            _end(process, scratch)
    if failed:
        cause = cause_of_failure(scratch, process.returncode, positions, overdue=overdue)
        raise RunError(cause + keep_failure(failure_file, scratch, cause))


def _tell(scratch: Path, told: int, on_step: OnStep | None, on_note: OnNote | None) -> int:
    """Report the steps and notes that rank 0 has written since `told`."""
    path = scratch / "progress.jsonl"
    if not path.exists():
        return told
    lines = path.read_text().split("\n")[:-1]
    for line in lines[told:]:
        row = json.loads(line)
        if "note" in row and on_note is not None:
            on_note(row["note"])
        elif "step" in row and on_step is not None:
            on_step(row["step"], row["step_time_s"], row["losses"])
    return len(lines)


def _end(process: subprocess.Popen[bytes], scratch: Path) -> None:
    """Stop torchrun and whatever it started; torchrun gives each worker a session of its own."""
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
    finally:  # also when a second Ctrl-C ends the wait
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.returncode != 0:
            _kill_ranks(scratch)


def _kill_ranks(scratch: Path) -> None:
    """And wait for their end, so that a run behind this one finds their files and ports free."""
    ranks = []
    for path in scratch.glob("pid-*"):
        with suppress(ProcessLookupError, ValueError):
            ranks.append(int(path.read_text()))
            os.kill(ranks[-1], signal.SIGKILL)
    deadline_s = time.monotonic() + _GRACE_S
    while any(map(process_lives, ranks)) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
