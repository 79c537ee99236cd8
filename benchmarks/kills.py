"""Random faults in small runs with checkpoints: does each end in time, is its cause named, does it go on to the bit?

    python benchmarks/kills.py [--first 0] [--count 100]      # adds rows to benchmarks/kills.csv

A seed draws plan, fault, rank, step and action; `execute --inject` makes it. Two or three CPU processes over gloo train
six steps with a checkpoint behind every second. `lost`: checkpoints that were committed while the run went on and
are gone or damaged behind it. The run then goes on without a fault; `identical`: all its losses are those of the run
that nothing disturbed, bit by bit. `limit_s`: what the undisturbed run took, the time-out where the fault is (3 s in a
step, 30 s at its checkpoint and at both ends of the run), and 15 s to clean up.
"""

import argparse
import csv
import random
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from measured import MACHINE, ROOT

sys.path.insert(0, str(ROOT / "tests" / "runtime"))

from tiny_plans import AUDIO, TWO_STAGES, VISION, hand_plan, tiny_scenario

from mmplan.errors import RunError
from mmplan.planner.plan import Plan
from mmplan.runtime.checkpoint.folder import Damaged, committed, read_manifest, require_whole
from mmplan.runtime.checkpoint.options import Checkpoints
from mmplan.runtime.inject import parse_injection
from mmplan.runtime.launch import execute
from mmplan.runtime.limits import SHORTEST_SETUP_TIMEOUT_S
from mmplan.runtime.position import place_words

TARGET = ROOT / "benchmarks" / "kills.csv"
STEPS, EVERY, TIMEOUT_S, SPARE_S = 6, 2, 3.0, 15.0
FAULTS = ["kill"] * 5 + ["raise"] * 5 + ["stall"] * 4 + ["stop"] * 2 + [f"kill signal={s}" for s in ("TERM", "SEGV")]
COLUMNS = (
    *("seed", "plan", "fault", "seconds", "limit_s", "in_time", "named", "committed", "lost", "went_on_from"),
    *("identical", "message", "machine"),
)


def plans() -> dict[str, Plan]:
    tiny = replace(tiny_scenario(), global_batch=4)
    one = ((*VISION, *AUDIO, "llm.embed", "llm.0-5", "llm.head", "llm.loss"),)
    three = ((*VISION, *AUDIO), ("llm.embed", "llm.0-2"), ("llm.3-5", "llm.head", "llm.loss"))
    return {
        "pp=2": hand_plan(tiny, TWO_STAGES),
        "pp=3": hand_plan(tiny, three),
        "dp=2, optimizer sharded": replace(hand_plan(tiny, one, dp=2), sharding="optimizer"),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    plan: str
    fault: str
    rank: int
    place: str  # as the message has it
    timeout_s: float


def drawn(seed: int, named: dict[str, Plan]) -> Drawn:
    """The fault of a seed."""
    draw = random.Random(seed)
    name = draw.choice(list(named))
    plan = named[name]
    rank, kind = draw.randrange(plan.rank_count), draw.choice(FAULTS)
    part = draw.choice(["compute"] * 6 + ["begin", "update", "data", "save", "save", "start", "end"])
    step = draw.choice([1, 3]) if part == "save" else draw.choice([2, 4]) if part == "begin" else draw.randrange(STEPS)
    microbatch = 0 if part == "begin" else draw.randrange(plan.microbatches)
    action = {
        "compute": f"{draw.choice('FB')}{microbatch}",
        "begin": "F0",  # while the checkpoint before is written
        "update": draw.choice(["STEP", "REDUCE"] if plan.dp > 1 else ["STEP"]),
    }.get(part, part)
    stage = rank if plan.pp > 1 else 0
    place = place_words(action if part in ("data", "save", "start", "end") else f"{stage}{action}")
    at = "" if part in ("start", "end") else f" step={step}"
    return Drawn(
        plan=name,
        fault=f"{kind} rank={rank}{at} action={action}",
        rank=rank,
        place=place,
        timeout_s=SHORTEST_SETUP_TIMEOUT_S if part in ("save", "start", "end") else TIMEOUT_S,
    )


@contextmanager
def seen_commits(folder: Path) -> Iterator[set[Path]]:
    """The checkpoints that are there at some time."""
    found: set[Path] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            found.update(committed(folder))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
        found.update(committed(folder))


def is_whole(checkpoint: Path) -> bool:
    try:
        manifest = read_manifest(checkpoint)
        require_whole(checkpoint, manifest, manifest.files)
    except Damaged:
        return False
    return True


def losses(plan: Plan, checkpoints: Checkpoints, **options: object) -> list[dict[str, float]]:
    run = execute(plan, local=plan.rank_count, steps=STEPS, checkpoints=checkpoints, **options)  # type: ignore[arg-type]
    assert run is not None
    return [step.losses for step in run.steps]


Usual = tuple[list[dict[str, float]], float]  # losses by step, and seconds


def row_of(seed: int, named: dict[str, Plan], undisturbed: dict[str, Usual]) -> list[object]:
    fault = drawn(seed, named)
    plan, (expected, usual_s) = named[fault.plan], undisturbed[fault.plan]
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkpoints"
        folder.mkdir()
        options = Checkpoints(folder=folder, every=EVERY, keep=STEPS)
        started_s, message = time.monotonic(), "it did not fail"
        with seen_commits(folder) as seen:
            try:
                losses(plan, options, inject=[parse_injection(fault.fault)], timeout_s=TIMEOUT_S, step_timeout_s=20.0)
            except RunError as error:
                message = str(error)
        seconds, limit_s = time.monotonic() - started_s, usual_s + fault.timeout_s + SPARE_S
        lost = [path for path in seen if not is_whole(path)]
        went_on = max((read_manifest(path).step for path in committed(folder)), default=0)
        again = losses(plan, replace(options, resume=folder))
    is_named = re.search(rf"rank {fault.rank} \(", message) is not None and fault.place in message
    told = [fault.plan, fault.fault, round(seconds, 1), round(limit_s, 1), seconds <= limit_s, is_named, len(seen)]
    return [seed, *told, len(lost), went_on, again == expected, message.split("; tracebacks")[0], MACHINE]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    named, undisturbed = plans(), dict[str, Usual]()
    for name, plan in named.items():
        with TemporaryDirectory() as folder:
            runs = []
            for part in ("a", "b"):
                started_s = time.monotonic()
                checkpoints = Checkpoints(folder=Path(folder) / part, every=EVERY, keep=STEPS)
                assert checkpoints.folder is not None
                checkpoints.folder.mkdir()
                runs.append((losses(plan, checkpoints), time.monotonic() - started_s))
        assert runs[0][0] == runs[1][0], "two runs differ"
        undisturbed[name] = (runs[0][0], max(seconds for _, seconds in runs))
    if not TARGET.exists():
        TARGET.write_text(",".join(COLUMNS) + "\n")
    for seed in range(options.first, options.first + options.count):
        row = row_of(seed, named, undisturbed)
        with TARGET.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(row)
        print(row[:-2], flush=True)


if __name__ == "__main__":
    main()
