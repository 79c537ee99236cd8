"""How often the monitors of `mmplan.runtime.health` are wrong: false alarms and misses over 100 seeds.

    python benchmarks/health_rates.py      # writes benchmarks/health_rates.csv, three minutes

`training`: the image-caption model of `tests/runtime/health/health_toys.py`, trained on for 10 steps with a reading
at every second one, healthy or with the monitor's own fault from the first step; a miss is a run in which the monitor
stays silent, and `first` says how often the doctor named it before all else. `scores`: the drift detector on numbers:
independent ones (where the bound holds), a following reference over independent and over slowly learning batches, and
shifted ones. `law`: the variance of gradients of independent tokens, against the number of shards and the length.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from measured import MACHINE, ROOT, write_rows

from mmplan.runtime.health.diagnosis import diagnose
from mmplan.runtime.health.drift import RULE, DriftDetector, EmbeddingDrift
from mmplan.runtime.health.rules import RULES
from mmplan.runtime.health.variance import contribution_variance

sys.path.insert(0, str(ROOT / "tests" / "runtime" / "health"))
from health_toys import PLANTS, run_toy

SEEDS, STEPS = 100, 10
READINGS = 1000  # of the drift detector
SHIFT_AT, AFTER = 100, 50


def row(part: str, monitor: str, case: str, **numbers: object) -> dict[str, object]:
    empty = dict.fromkeys(("runs", "false_alarms", "misses", "first", "bound", "value"), "")
    return {"part": part, "monitor": monitor, "case": case, **empty, **numbers, "machine": MACHINE}


def healthy_rows() -> list[dict[str, object]]:
    alarms: Counter[str] = Counter()
    for seed in range(SEEDS):
        fired = {r.monitor for r in run_toy(None, seed=seed, steps=STEPS).readings if r.fired}
        alarms.update(fired)
    skipped = {"feature_jitter", "drift"}  # of runs of mmplan; below
    return [
        row("training", name, "healthy", runs=SEEDS, false_alarms=alarms[name]) for name in RULES if name not in skipped
    ]


def broken_rows() -> list[dict[str, object]]:
    rows = []
    for name, plant in PLANTS.items():
        if plant.monitor == "drift":
            continue
        missed = first = 0
        for seed in range(SEEDS):
            readings = run_toy(None, replace(plant, at=0, steps=STEPS), seed=seed).readings
            missed += not any(r.fired and r.monitor == plant.monitor for r in readings)
            found = diagnose(readings, RULES)
            first += bool(found) and found[0].monitor == plant.monitor
        rows.append(row("training", plant.monitor, name, runs=SEEDS, misses=missed, first=first))
        print(rows[-1], flush=True)
    return rows


def score_rows() -> list[dict[str, object]]:
    """Alarms of the detector within so many readings; the bound is on their probability."""
    rows = []

    def alarms(draw: Callable[[random.Random, int], float], count: int) -> int:
        fired = 0
        for seed in range(SEEDS):
            generator, detector = random.Random(seed), DriftDetector(seed)
            fired += any(detector.update(draw(generator, at)) >= RULE.limit for at in range(count))
        return fired

    # A tenth of the limit's readings: at most so many hundredths of runs may alarm.
    count = READINGS // 10
    found = alarms(lambda g, _: g.gauss(0, 1), count)
    rows.append(row("scores", "drift", f"independent, {count} readings", runs=SEEDS, false_alarms=found, bound=10))
    found = alarms(lambda g, _: g.gauss(0, 1), READINGS)
    rows.append(row("scores", "drift", f"independent, {READINGS} readings", runs=SEEDS, false_alarms=found, bound=100))
    for shift in (1.0, 2.0, 3.0):
        fired = alarms(lambda g, at, s=shift: g.gauss(s if at >= SHIFT_AT else 0, 1), SHIFT_AT + AFTER)  # type: ignore[misc]
        case = f"shift by {shift:g} standard deviations, {AFTER} readings"
        rows.append(row("scores", "drift", case, runs=SEEDS, misses=SEEDS - fired))
    for case, step, sliding in (
        ("following reference, independent batches", 0.0, True),
        ("following reference, mean moves by 0.02 deviations a reading", 0.02, True),
        ("fixed reference, mean moves by 0.02 deviations a reading", 0.02, False),
    ):
        fired = 0
        for seed in range(SEEDS):
            draw, drift = torch.Generator().manual_seed(seed), EmbeddingDrift(sliding=sliding, seed=seed)
            for at in range(count * 2):
                found_drift = drift.update(torch.randn(8, generator=draw) + step * at)
                if found_drift is not None and found_drift.statistic >= RULE.limit:
                    fired += 1
                    break
        rows.append(row("scores", "drift", f"{case}, {count * 2} readings", runs=SEEDS, false_alarms=fired))
    return rows


def law_rows() -> list[dict[str, object]]:
    """Shards of independent tokens, each with a gradient of unit variance in 64 coordinates."""
    rows = []
    for shards, length in ((2, 256), (4, 1024), (8, 4096)):
        for kind in ("sum", "mean"):
            values = []
            for seed in range(20):
                tokens = torch.randn(shards, length, 64, generator=torch.Generator().manual_seed(seed))
                parts = tokens.sum(1) if kind == "sum" else tokens.mean(1)
                total = float(parts.sum(0).square().sum())
                values.append(contribution_variance(float(parts.square().sum()), total, shards))
            mean = f"{sum(values) / len(values):.4g}"
            rows.append(row("law", "gradient_variance", f"{kind} over {shards} x {length} tokens", runs=20, value=mean))
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_rows("health_rates.csv", [*score_rows(), *law_rows(), *healthy_rows(), *broken_rows()])
