"""Starts a measurement: in this process, as one of torchrun's, or over processes of its own on this machine.

Processes share the forwards of each batch and sum every product over all of them, so all take the same Lanczos steps.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mmplan.errors import InputError, RunError
from mmplan.runtime.hessian.result import Measured
from mmplan.runtime.hessian.settings import Question
from mmplan.runtime.hessian.told import ASKED, FAILURE, MEASURED, QUESTION, RESULT, TOLD, TOLD_LINE, Listener
from mmplan.runtime.torchrun import under_torchrun

_POLL_S = 0.1
_GRACE_S = 5.0  # between asking processes to end and killing them


def sensitivity(question: Question, *, local: int | None, dry_run: bool, listener: Listener) -> Measured | None:
    """Measure and summarise.

    Args:
        local: processes to start here; None: this one, which may be one of torchrun's.
        dry_run: only estimate.

    Returns:
        None where it is a dry run, and on torchrun's processes other than the first.

    Raises:
        InputError: a file or an option is wrong; see `run.py`.
        RunError: a process that was started here failed.
    """
    if local is not None and under_torchrun():
        raise InputError("--local starts processes, and torchrun has started this one: leave --local out")
    if local is None:
        # Imported here so that a launcher, which computes nothing, does not load torch.
        from mmplan.runtime.hessian.worker import run

        return run(question, dry_run=dry_run, listener=listener)
    with tempfile.TemporaryDirectory(prefix="mmplan-sensitivity-") as folder:
        scratch = Path(folder)
        (scratch / ASKED).write_bytes(QUESTION.dump_json(question))
        _run_processes(scratch, local, dry_run, listener)
        result = scratch / RESULT
        return MEASURED.validate_json(result.read_bytes()) if result.exists() else None


def _run_processes(scratch: Path, count: int, dry_run: bool, listener: Listener) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    worker = ["-m", "mmplan.runtime.hessian.worker", str(scratch), *(["--dry-run"] if dry_run else [])]
    command = [sys.executable, *torchrun, "--nproc-per-node", str(count), *worker]
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **loopback}
    with (scratch / "log").open("wb") as log, _unwound(signal.SIGTERM):
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        told = 0
        try:
            while process.poll() is None:
                told = _tell(scratch, told, listener)
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
                process.kill()
                process.wait()
        _tell(scratch, told, listener)
    if process.returncode != 0:
        raise _failure(scratch)


@contextmanager
def _unwound(number: signal.Signals) -> Iterator[None]:
    """A termination request unwinds as Ctrl-C does, so that the processes end with this one."""

    def unwind(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(number, unwind)
    try:
        yield
    finally:
        signal.signal(number, before)


def _tell(scratch: Path, told: int, listener: Listener) -> int:
    """Hand on the lines behind the first `told`."""
    path = scratch / TOLD
    if not path.exists():
        return told
    lines = path.read_bytes().split(b"\n")[:-1]
    for line in lines[told:]:
        row = TOLD_LINE.validate_json(line)
        if row.note is not None:
            listener.note(row.note)
        if row.estimate is not None:
            listener.estimate(row.estimate)
        if row.value is not None:
            listener.value(*row.value)
    return len(lines)


def _failure(scratch: Path) -> Exception:
    """What the first process that failed has said."""
    path = scratch / FAILURE
    if path.exists():
        kind, _, message = path.read_text().partition("\n")
        return InputError(message) if kind == "InputError" else RunError(message)
    lines = (scratch / "log").read_text(errors="replace").strip().splitlines()
    return RunError(f"a process of the measurement ended: {(lines or ['it said nothing'])[-1]}")
