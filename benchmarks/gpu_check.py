"""One CUDA device, less than 8 minutes: calibrates, trains a tiny and a 1-3 B model, holds predictions against it.

    make gpu-check                                  # or: python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --part tiny      # some parts only
    python benchmarks/gpu_check.py --device cpu     # tries the script on a CPU, writes no rows

Rows replace those of the same device, torch and part in benchmarks/gpu_check.csv. Without a GPU nothing is measured and
the exit code is 0; it is 1 when a part failed or found something wrong (`ok` is False). Each part has a budget in
seconds, and runs in processes of its own: a part that fails or takes too long does not end the others.
"""

import argparse
import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

# Also where mmplan is not installed, here and in the processes that are started.
REPOSITORY = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, REPOSITORY)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (REPOSITORY, os.environ.get("PYTHONPATH", ""))))

from gpu_parts import PARTS, Here, NotMeasuredError, Row, facts  # noqa: E402
from measured import ROOT, write_rows  # noqa: E402

FILE = "gpu_check.csv"
BUDGET_S = 450  # of all parts: with the start of Python and torch less than 8 minutes
FIRST_CAPABILITY = (8, 0)  # with bf16 matrix units
NOT_MEASURED = "not measured"

Table = list[dict[str, object]]


def done_part(name: str, here: Here, seconds: int) -> tuple[Sequence[Row], str]:
    """Rows and status of a part that is ended after `seconds`."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took more than its {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        rows = PARTS[name][0](here)
        return rows, "wrong" if any(row.ok is False for row in rows) else "done"
    except NotMeasuredError as error:
        return (), f"{NOT_MEASURED}: {error}"
    except Exception as error:  # whatever it is, the other parts go on
        return (), f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(here: Here, found: dict[str, object], names: Sequence[str], budget_s: float = BUDGET_S) -> Table:
    """Rows of the parts, in order; later ones have what earlier ones left."""
    until_s, table = time.monotonic() + budget_s, Table()
    for name in names:
        left_s, started_s = int(until_s - time.monotonic()), time.monotonic()
        if left_s < 1:
            rows, status = (), f"{NOT_MEASURED}: the {budget_s:.0f} s were over"
        else:
            rows, status = done_part(name, here, min(PARTS[name][1], left_s))
        took_s = time.monotonic() - started_s
        print(f"{name}: {status}, {took_s:.0f} s", file=sys.stderr, flush=True)
        table.append(_row(here, found, name, Row(quantity="seconds", measured=took_s), status))
        table += [_row(here, found, name, row, "wrong" if row.ok is False else "done") for row in rows]
    return table


def _row(here: Here, found: dict[str, object], part: str, row: Row, status: str) -> dict[str, object]:
    ratio = row.measured / row.predicted if row.predicted else None
    return {
        "device": here.name,
        "torch": found["torch"],
        "cuda": found["cuda"],
        "triton": found["triton"],
        "part": part,
        "quantity": row.quantity,
        "measured": f"{row.measured:.6g}",
        "predicted": "" if row.predicted is None else f"{row.predicted:.6g}",
        "ratio": "" if ratio is None else f"{ratio:.3f}",
        "ok": "" if row.ok is None else row.ok,
        "status": status,
    }


def nothing(found: dict[str, object], reason: str) -> Table:
    """A row per part where none can be measured."""
    here = Here(kind="cuda", name="none", capability=(0, 0), free_bytes=0, folder=Path())
    row = Row(quantity="seconds", measured=0.0)
    return [{**_row(here, found, name, row, f"{NOT_MEASURED}: {reason}"), "measured": ""} for name in PARTS]


def merged(known: Sequence[dict[str, object]], table: Table) -> Table:
    """`table` in place of known rows of the same device, torch and part; `none` only where nothing else is known."""
    new = {(row["device"], row["torch"], row["part"]) for row in table}
    kept = [row for row in known if (row["device"], row["torch"], row["part"]) not in new]
    rows = [*kept, *table]
    measured = [row for row in rows if row["device"] != "none"]
    return measured or table


def _known() -> list[dict[str, object]]:
    path = ROOT / "benchmarks" / FILE
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="default: all; calibrate is added")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave plans, runs and profiles there")
    options = parser.parse_args(arguments)
    try:
        found = facts()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"nothing was measured: torch fails here: {error}")
        return 1
    reason = _refusal(found) if options.device == "cuda" else ""
    if reason:
        print(f"nothing was measured: {reason}")
        write_rows(FILE, merged(_known(), nothing(found, reason)))
        return 0
    names = [name for name in PARTS if not options.part or name in options.part or name == "calibrate"]
    with TemporaryDirectory(prefix="mmplan-gpu-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        here = _here(options.device, found, folder)
        table = check(here, found, names, options.budget)
    for row in table:
        print(", ".join(str(row[key]) for key in ("part", "quantity", "measured", "predicted", "ratio", "status")))
    if options.device == "cuda":
        write_rows(FILE, merged(_known(), table))
    return int(any(str(row["status"]).startswith(("failed", "wrong")) for row in table))


def _here(kind: str, found: dict[str, object], folder: Path) -> Here:
    if kind == "cpu":
        return Here(kind="cpu", name="cpu", capability=(0, 0), free_bytes=2**34, folder=folder)
    major, minor = found["capability"]  # type: ignore[misc]
    free_bytes = int(str(found["free"]))
    return Here(kind="cuda", name=str(found["name"]), capability=(major, minor), free_bytes=free_bytes, folder=folder)


def _refusal(found: dict[str, object]) -> str:
    """Why this device cannot be checked; empty where it can."""
    if not found["name"]:
        return "torch sees no CUDA device here"
    if tuple(found["capability"]) < FIRST_CAPABILITY:  # type: ignore[arg-type]
        had = ".".join(map(str, found["capability"]))  # type: ignore[call-overload]
        return f"{found['name']} has compute capability {had}, bf16 needs 8.0"
    return ""


if __name__ == "__main__":
    sys.exit(main())
