"""Starts a run: under torchrun in this process, or with processes of its own on this machine.

A local run cannot hang: every communication has a time-out, a failing rank ends all of them, and so does Ctrl-C.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from mmplan.errors import InputError, RunError
from mmplan.planner.plan import Plan, save_plan
from mmplan.runtime.measurement import Measurement, load_run

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_UNIT_S = 0.03  # bubbles of sleeps came within 2.8 points of simulation at 30 ms, 24 at 3 ms (2 busy cores)
_POLL_S = 0.1
_GRACE_S = 5.0  # between asking the processes to end and killing them

_ERROR_LINE = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b")  # how a traceback ends

OnStep = Callable[[int, float, Mapping[str, float]], None]  # step, its seconds on rank 0, losses by module so far known


def process_count(plan: Plan, *, rehearse: bool) -> int:
    """Processes that a run of the plan takes; in a rehearsal one stands for each tensor-parallel group.

    Raises:
        InputError: the plan shards tensors, or splits a tied vocabulary, and is to be run for real.
    """
    if rehearse:
        return plan.pp * plan.dp
    _refuse_split_vocabulary(plan)
    if plan.tp > 1:
        raise InputError(
            f"the plan has tp={plan.tp} and this release executes tp=1 only: "
            "set `constraints.tp: [1]` in the scenario and optimize again, or rehearse the plan"
        )
    return plan.rank_count


def _refuse_split_vocabulary(plan: Plan) -> None:
    stage_of = plan.stage_of_layer()
    for module in plan.scenario.model.modules:
        if module.vocabulary is None or not module.vocabulary.tied or f"{module.name}.head" not in stage_of:
            continue
        table, head = stage_of[f"{module.name}.embed"], stage_of[f"{module.name}.head"]
        if table != head:
            raise InputError(
                f"'{module.name}' shares one matrix between token table (stage {table}) and head (stage {head}); "
                "this release executes such a module within one stage only: set `constraints.pp: [1]`, or rehearse"
            )


def execute(
    plan: Plan,
    *,
    steps: int,
    local: int,
    rehearse: bool = False,
    unit_s: float = DEFAULT_UNIT_S,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_step: OnStep | None = None,
) -> Measurement:
    """Run the plan for `steps` optimizer steps with `local` processes on this machine.

    Args:
        rehearse: replace computes by sleeps of at least `unit_s` (see `rehearse.py`).
        timeout_s: of any communication; a rank that hangs ends the run after it.
        on_step: is told each finished step while the run goes on.

    Raises:
        InputError: the plan needs another number of processes, or cannot be executed by this release.
        RunError: a rank failed; names it and its error.
    """
    if steps < 1:
        raise InputError(f"a run needs at least 1 step, found {steps}")
    expected = process_count(plan, rehearse=rehearse)
    if local != expected:
        product = f"pp={plan.pp} x dp={plan.dp}" + ("" if rehearse else f" x tp={plan.tp}")
        raise InputError(f"{local} local processes, the plan needs {product} = {expected}")
    with tempfile.TemporaryDirectory(prefix="mmplan-run-") as folder:
        scratch = Path(folder)
        save_plan(plan, scratch / "plan.json")
        options = ["--steps", str(steps), "--unit-s", str(unit_s), "--timeout-s", str(timeout_s)]
        options += ["--rehearse"] if rehearse else []
        _run_processes(scratch, local, options, on_step)
        return load_run(scratch / "run.json")


def _run_processes(scratch: Path, count: int, options: list[str], on_step: OnStep | None) -> None:
    # --standalone finds a free port itself; the loopback address spares look-ups of this machine's name.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    worker = ["-m", "mmplan.runtime.worker", str(scratch / "plan.json"), "--out", str(scratch / "run.json")]
    command = [sys.executable, *torchrun, "--nproc-per-node", str(count), *worker, "--scratch", str(scratch), *options]
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **loopback}
    with (scratch / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            told = 0
            while process.poll() is None and not list(scratch.glob("failure-*.json")):
                told = _tell(scratch, told, on_step)
                time.sleep(_POLL_S)
            failed = process.poll() != 0
            if failed:
                time.sleep(_POLL_S)  # the first failure makes others fail: let those write theirs, the earliest is told
            else:
                _tell(scratch, told, on_step)
        finally:
            _end(process, scratch)
    if failed:
        raise RunError(_cause(scratch, process.returncode))


def _tell(scratch: Path, told: int, on_step: OnStep | None) -> int:
    """Report the steps that rank 0 has written since `told`; losses are summed over the ranks that have them."""
    paths = sorted(scratch.glob("progress-*.jsonl"))
    if on_step is None or not paths:
        return told
    rows = [[json.loads(line) for line in path.read_text().split("\n")[:-1]] for path in paths]
    for index in range(told, min(len(row) for row in rows)):
        losses: dict[str, float] = {}
        for row in rows:
            for module, loss in row[index]["losses"].items():
                losses[module] = losses.get(module, 0.0) + loss
        on_step(index, max(row[index]["step_time_s"] for row in rows), losses)
        told = index + 1
    return told


def _end(process: subprocess.Popen[bytes], scratch: Path) -> None:
    """Stop torchrun and whatever it started; torchrun gives each worker a session of its own."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.returncode != 0:
        for path in scratch.glob("pid-*"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGKILL)


def _cause(scratch: Path, returncode: int) -> str:
    """The earliest failure that a rank wrote, else the end of the log."""
    failures = [json.loads(path.read_text()) for path in scratch.glob("failure-*.json")]
    if failures:
        first = min(failures, key=lambda failure: failure["at_s"])
        message = str(first["message"])
        return message if message.startswith("rank ") else f"rank {first['rank']}: {message}"
    lines = (scratch / "log").read_text(errors="replace").strip().splitlines()
    errors = [line.strip() for line in lines if _ERROR_LINE.match(line.strip())]
    said = errors[0] if errors else " | ".join(lines[-3:])
    return f"the processes ended with code {returncode} before any rank could report; their log says: {said}"
