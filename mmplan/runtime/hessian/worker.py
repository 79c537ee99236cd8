"""One process of a measurement: `python -m mmplan.runtime.hessian.worker FOLDER` under torchrun, or this one alone."""

import argparse
import os
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mmplan.errors import InputError, MmplanError
from mmplan.runtime.hessian.result import Measured
from mmplan.runtime.hessian.run import estimate, finish, prepare
from mmplan.runtime.hessian.settings import Question
from mmplan.runtime.hessian.told import (
    ASKED,
    FAILURE,
    MEASURED,
    QUESTION,
    RESULT,
    TOLD,
    TOLD_LINE,
    Estimate,
    Listener,
    Told,
)
from mmplan.runtime.hessian.values import Key, Value
from mmplan.runtime.torchrun import is_main_process, under_torchrun

_TIMEOUT_S = 1800.0  # of a collective: the slowest share of one product, or reading the weights


def run(question: Question, *, dry_run: bool, listener: Listener) -> Measured | None:
    """See `processes.sensitivity`. Collective under torchrun."""
    device = _device(question)
    joins = under_torchrun()
    if joins:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=_TIMEOUT_S))
    heard = listener if is_main_process() else _Nobody()
    try:
        prepared = prepare(question, device, heard.note)
        heard.estimate(estimate(prepared))
        if dry_run:
            return None
        result = finish(prepared, lambda key, value: heard.value(key, value, prepared.left()))
        if joins:
            dist.barrier()
        return result if is_main_process() else None
    finally:
        if joins:
            dist.destroy_process_group()


def _device(question: Question) -> torch.device:
    kind = question.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise InputError(f"--device: expected 'cpu' or 'cuda', found '{kind}'")
    if kind == "cpu":
        return torch.device("cpu")
    place, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= count:
        raise InputError(f"process {place} of this machine has no CUDA device, there are {count}")
    device = torch.device("cuda", place)
    torch.cuda.set_device(device)
    return device


class _Nobody:
    """Hears for processes that are not to speak."""

    def note(self, text: str) -> None:
        pass

    def estimate(self, estimate: Estimate) -> None:
        pass

    def value(self, key: Key, value: Value, left: int) -> None:
        pass


class _Writer:
    """Hears for the process that has started this one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, text: str) -> None:
        self._write(Told(note=text))

    def estimate(self, estimate: Estimate) -> None:
        self._write(Told(estimate=estimate))

    def value(self, key: Key, value: Value, left: int) -> None:
        self._write(Told(value=(key, value, left)))

    def _write(self, told: Told) -> None:
        with self._path.open("ab") as file:
            file.write(TOLD_LINE.dump_json(told) + b"\n")


def _ended(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main(arguments: list[str] | None = None) -> int:
    """Command line of one process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="mmplan.runtime.hessian.worker", description="one process, under torchrun")
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    scratch: Path = options.scratch
    signal.signal(signal.SIGTERM, _ended)  # unwinds, which writes what was measured
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        question = QUESTION.validate_json((scratch / ASKED).read_bytes())
        result = run(question, dry_run=options.dry_run, listener=_Writer(scratch / TOLD))
        if result is not None:
            (scratch / RESULT).write_bytes(MEASURED.dump_json(result))
    except Exception as error:
        kind = "InputError" if isinstance(error, InputError) else "RunError"
        text = str(error) if isinstance(error, MmplanError) else f"{type(error).__name__}: {error}"
        partial = scratch / f"failure-{os.environ.get('RANK', '0')}"
        partial.write_text(f"{kind}\n{text}")
        if not (scratch / FAILURE).exists():
            partial.replace(scratch / FAILURE)
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    # Straight out: threads of a communication library must not keep a failed process alive.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
