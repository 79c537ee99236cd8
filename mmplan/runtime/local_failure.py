"""Why a run on this machine has failed: what the launcher finds in its folder. Imports no torch.

torchrun knows which rank a signal has killed, and the rank's position where that was; a rank that fails of itself, or
notices that another one is silent, has written why.
"""

import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path

from mmplan.runtime.limits import Limits
from mmplan.runtime.position import NO_STEP, Seen, read_position, where
from mmplan.runtime.wait_chain import lasted, named

_SPARE_S = 15.0  # for ranks to notice themselves that they are late

_ERROR_LINE = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b|.*Watchdog caught")  # a traceback's end; NCCL's
_SUMMARY = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: -(\d+) ")  # of torchrun on failures
_FIRST = "Root Cause (first observed failure)"


def read_positions(scratch: Path, count: int) -> dict[int, Seen]:
    """What each rank last wrote."""
    found = {rank: read_position(scratch, rank) for rank in range(count)}
    return {rank: seen for rank, seen in found.items() if seen is not None}


def stands_still(scratch: Path, limit: Limits) -> bool:
    """Whether the first rank is long past the limit at which it should have ended itself: all processes are halted."""
    seen = read_position(scratch, 0)
    return seen is not None and seen.step_age_s > _SPARE_S + (limit.step_s if seen.step != NO_STEP else limit.start_s)


def cause_of_failure(scratch: Path, returncode: int, positions: Mapping[int, Seen], *, overdue: bool) -> str:
    """The rank that was killed, else the first failure that a rank wrote, else the end of the log."""
    log = (scratch / "log").read_text(errors="replace")
    lines = log.strip().splitlines()
    errors = [line.strip() for line in lines if _ERROR_LINE.match(line.strip())]
    failures = [json.loads(path.read_text()) for path in sorted(scratch.glob("failure-*.json"))]
    first = [failure for failure in failures if failure["first"]]
    before, _, root = log.rpartition(_FIRST)
    for summary, number in (*_SUMMARY.findall(root), *_SUMMARY.findall(before)):
        rank, by = int(summary), int(number)
        # By SIGTERM torchrun ends the others; the first it saw may have been ended by someone else.
        if by != signal.SIGTERM or (not failures and _SUMMARY.search(root)):
            said = f"; the log says: {errors[0]}" if by == signal.SIGABRT and errors else ""
            seen = positions.get(rank)
            at = f" in {where(seen)}" if seen is not None else ""
            return f"{named(rank, seen)} was killed by {_signal_name(by)}{at}{_hint(by)}{said}"
    if failures:
        return str((first or failures)[0]["message"])
    if overdue:
        told = "; ".join(f"{named(r, s)} was in {where(s)} for {lasted(s.age_s)}" for r, s in positions.items())
        return f"all processes stand still: {told}"
    if returncode < 0:
        return f"torchrun, which started the ranks, was killed by {_signal_name(-returncode)}"
    said = errors[0] if errors else " | ".join(lines[-3:])
    return f"the processes ended with code {returncode} before any rank could report; their log says: {said}"


def keep_failure(file: Path | None, scratch: Path, cause: str) -> str:
    """Write the cause, the tracebacks of all ranks and their log; returns what to say of it."""
    if file is None:
        return ""
    failures = [json.loads(path.read_text()) for path in sorted(scratch.glob("failure-*.json"))]
    traces = [f"rank {failure['rank']}: {failure['message']}\n\n{failure['trace']}" for failure in failures]
    log = (scratch / "log").read_text(errors="replace")
    try:
        file.write_text("\n\n".join([cause, *traces, "What the processes wrote:", log]))
    except OSError:
        return ""
    return f"; tracebacks and log are in {file}"


def _signal_name(number: int) -> str:
    return f"signal {number} ({signal.Signals(number).name})"


def _hint(number: int) -> str:
    return ", which the kernel sends when memory runs out" if number == signal.SIGKILL else ""
