"""What this process is within torchrun, by the variables torchrun sets. Imports no torch at the start."""

import os
from datetime import timedelta

_STORE_TIMEOUT_S = 5.0


def under_torchrun() -> bool:
    return "RANK" in os.environ


def is_main_process() -> bool:
    """Rank 0, or the only process: the one that shows progress and writes results."""
    return os.environ.get("RANK", "0") == "0"


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
        attempt = f"mmplan-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        timeout = timedelta(seconds=_STORE_TIMEOUT_S)
        store = dist.TCPStore(*place, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        reports = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
        return int(reports.add("failures", 1)) == 1
    except (KeyError, ValueError, RuntimeError):  # not torchrun's own store
        return is_main_process()
