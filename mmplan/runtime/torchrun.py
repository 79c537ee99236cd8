"""What this process is within torchrun, by the variables torchrun sets. Imports no torch at the start."""

import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

_STORE_TIMEOUT_S = 5.0

OnFailure = Callable[[str], None]  # told by a thread that ends the process afterwards


def show_failure(message: str) -> None:
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()


def under_torchrun() -> bool:
    return "RANK" in os.environ


def is_main_process() -> bool:
    """Rank 0, or the only process: the one that shows progress and writes results."""
    return os.environ.get("RANK", "0") == "0"


def is_local_zero() -> bool:
    """The first process of its host."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def attempt() -> int:
    """How often this run was started before: by torchrun, or by Slurm, which puts a job back into its queue."""
    return sum(int(os.environ.get(name) or 0) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def host_folder() -> Path:
    """A temporary folder that the processes of this run on this host share, and nobody else enters."""
    run = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}-{os.environ.get('MASTER_PORT', '')}-{attempt()}"
    folder = Path(tempfile.gettempdir()) / f"mmplan-{os.getuid()}-{run.replace(os.sep, '_')[:100]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder if folder.stat().st_uid == os.getuid() else Path(tempfile.mkdtemp(prefix="mmplan-"))


def first_to_report() -> bool:
    """Whether this process is to write the document of a failure: the first of a run's processes that asks.

    Rank 0 need not get that far, because torchrun ends all processes as soon as one has failed.
    """
    if not under_torchrun():
        return True
    # Imported here because only a failed run needs it.
    import torch.distributed as dist

    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = timedelta(seconds=_STORE_TIMEOUT_S)
        store = dist.TCPStore(*place, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        reports = dist.PrefixStore(f"mmplan-{attempt()}", store)  # type: ignore[attr-defined]
        return int(reports.add("failures", 1)) == 1
    except (KeyError, ValueError, RuntimeError):  # not torchrun's own store
        return is_main_process()
