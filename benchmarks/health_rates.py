"""How often the monitors of `mmplan.runtime.health` are wrong: false alarms and misses over 100 seeds.

    python benchmarks/health_rates.py      # writes benchmarks/health_rates.csv, three minutes

`training`: the image-caption model of `tests/runtime/health/health_toys.py`, trained on for 10 steps with a reading
at every second one, healthy or with the monitor's own fault from the first step; a miss is a run in which the monitor
stays silent, and `first` says how often the doctor named it before all else. `scores`: the drift detector on numbers:
independent and shifted ones. `course`: the detector of encoders that learn, on means that move in several ways.
`losses`: the rule of the loss on numbers: log-normal about a level, one in thirty five times as large. `timing`: the
jitter of delays. `law`: the variance of gradients of independent tokens, against the number of shards
and the length.
"""

import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from measured import MACHINE, ROOT, write_rows

from mmplan.runtime.health.diagnosis import diagnose
from mmplan.runtime.health.drift import RULE, DriftDetector, EmbeddingDrift
from mmplan.runtime.health.loss import RULE as LOSS
from mmplan.runtime.health.loss import LossWatch
from mmplan.runtime.health.rules import RULES
from mmplan.runtime.health.staleness import JITTER, jitter_s
from mmplan.runtime.health.variance import contribution_variance

sys.path.insert(0, str(ROOT / "tests" / "runtime" / "health"))
from health_toys import PLANTS, Toy, run_toy

SEEDS, STEPS = 100, 10
READINGS = 1000  # of the drift detector
SHIFT_AT, AFTER = 100, 50
LEARNING_SEEDS, LEARNING_STEPS = 20, 400


def row(part: str, monitor: str, case: str, **numbers: object) -> dict[str, object]:
    empty = dict.fromkeys(("runs", "false_alarms", "misses", "first", "bound", "value"), "")
    return {"part": part, "monitor": monitor, "case": case, **empty, **numbers, "machine": MACHINE}


def healthy_rows() -> list[dict[str, object]]:
    alarms: Counter[str] = Counter()
    for seed in range(SEEDS):
        fired = {r.monitor for r in run_toy(None, seed=seed, steps=STEPS).readings if r.fired}
        alarms.update(fired)
    skipped = {"feature_jitter", "drift", "loss"}  # of runs of mmplan; below; needs more steps
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

    # A hundredth of the limit: at most one run in a hundred may alarm.
    count = READINGS // 10
    found = alarms(lambda g, _: g.gauss(0, 1), count)
    rows.append(row("scores", "drift", f"independent, {count} readings", runs=SEEDS, false_alarms=found, bound=1))
    found = alarms(lambda g, _: g.gauss(0, 1), READINGS)
    rows.append(row("scores", "drift", f"independent, {READINGS} readings", runs=SEEDS, false_alarms=found, bound=10))
    for shift in (1.0, 2.0, 3.0):
        fired = alarms(lambda g, at, s=shift: g.gauss(s if at >= SHIFT_AT else 0, 1), SHIFT_AT + AFTER)  # type: ignore[misc]
        case = f"shift by {shift:g} standard deviations, {AFTER} readings"
        rows.append(row("scores", "drift", case, runs=SEEDS, misses=SEEDS - fired))
    for case, course in COURSES.items():
        found = sum(drifts(course, seed, count * 2) for seed in range(SEEDS))
        rows.append(row("course", "drift", f"{case}, {count * 2} readings", runs=SEEDS, false_alarms=found, bound=2))
    for shift in (2.0, 3.0, 5.0):
        found = sum(drifts(COURSES["it slows down"], seed, SHIFT_AT + AFTER, shift) for seed in range(SEEDS))
        case = f"it slows down, and jumps by {shift:g} standard deviations of a reading, {AFTER} readings"
        rows.append(row("course", "drift", case, runs=SEEDS, misses=SEEDS - found))
    return rows


COURSES: dict[str, Callable[[int], float]] = {  # of the mean, in standard deviations of one coordinate
    "the encoder stands still": lambda at: 0.0,
    "it moves along a line": lambda at: 0.1 * at,
    "it slows down": lambda at: 50 * (1 - math.exp(-at / 50)),
    "it slows down fast": lambda at: 50 * (1 - math.exp(-at / 20)),
    "it speeds up": lambda at: 0.005 * at**2,
    "it swings": lambda at: 20 * math.sin(at / 30),
}


def drifts(course: Callable[[int], float], seed: int, count: int, shift: float = 0.0) -> bool:
    """Whether it fires; with a shift, behind it."""
    draw, drift = torch.Generator().manual_seed(seed), EmbeddingDrift(learns=True, seed=seed)
    along = torch.ones(8) / 8**0.5
    for at in range(count):
        moved = course(at) + (shift * 8**0.5 if at >= SHIFT_AT else 0.0)
        found = drift.update(torch.randn(8, generator=draw) + moved * along)
        if found is not None and found.statistic >= RULE.limit and (not shift or at >= SHIFT_AT):
            return True
    return False


def learning_rows() -> list[dict[str, object]]:
    """The toy trained from random weights, a reading at every second step: drift, and what judges a course of losses
    and embeddings that have not learned yet."""
    fired: Counter[str] = Counter()
    for seed in range(LEARNING_SEEDS):
        torch.manual_seed(seed)
        watched = run_toy(None, seed=seed, steps=LEARNING_STEPS, model=Toy(), learning_rate=3e-3)
        fired.update({r.monitor for r in watched.readings if r.fired})
    case = f"trained from random weights, {LEARNING_STEPS // 2} readings of two encoders"
    bounds = {"drift": LEARNING_SEEDS * 0.04, "loss": LEARNING_SEEDS * LEARNING_STEPS / LOSS.limit, "cmrc": ""}
    return [
        row("training", name, case, runs=LEARNING_SEEDS, false_alarms=fired[name], bound=bound)
        for name, bound in bounds.items()
    ]


def loss_rows() -> list[dict[str, object]]:
    """Healthy losses stand or fall; broken ones jump by a multiple of their spread, of logarithms."""
    rows = []
    for spread in (0.05, 0.3, 0.8):
        for case, level in LEVELS.items():
            fired = sum(rises(level, spread, seed, READINGS) for seed in range(SEEDS))
            bound = SEEDS * READINGS / LOSS.limit
            case = f"noise of {spread:g}, {case}, {READINGS} steps"
            rows.append(row("losses", "loss", case, runs=SEEDS, false_alarms=fired, bound=bound))
        for up in sorted({max(math.exp(jump * spread), 1.25) for jump in (2, 3, 4)}):
            fired = sum(rises(lambda at, up=up: up if at >= 200 else 1.0, spread, seed, 250) for seed in range(SEEDS))  # type: ignore[misc]
            case = f"noise of {spread:g}, jumps to {up:.3g} times, {AFTER} steps"
            rows.append(row("losses", "loss", case, runs=SEEDS, misses=SEEDS - fired))
    return rows


LEVELS: dict[str, Callable[[int], float]] = {
    "level": lambda at: 2.0,
    "falling": lambda at: 0.1 + 3 * math.exp(-at / 100),
}


def rises(level: Callable[[int], float], spread: float, seed: int, count: int) -> bool:
    """Whether the rule of the loss fires."""
    draw, watch = random.Random(seed), LossWatch()
    for at in range(count):
        rise = watch.update(level(at) * math.exp(draw.gauss(0, spread)) * (5 if draw.random() < 1 / 30 else 1))
        if rise is not None and rise.counts and LOSS.beyond(rise.evidence):
            return True
    return False


def jitter_rows() -> list[dict[str, object]]:
    """Delays of 16 consumers of a step behind their features, normal, three steps; the spread of the healthy ones is
    the largest that was seen on two busy cores."""
    rows = []
    for spread_s, case in ((3e-3, "delays spread by 3 ms"), (15e-3, "by 15 ms"), (25e-3, "by 25 ms")):
        fired = 0
        for seed in range(SEEDS):
            draw = random.Random(seed)
            steps = [[abs(draw.gauss(0.05, spread_s)) for _ in range(16)] for _ in range(3)]
            fired += any(JITTER.beyond(jitter_s([0.0] * 16, step)) for step in steps)
        healthy = spread_s < JITTER.limit
        counts = {"false_alarms": fired} if healthy else {"misses": SEEDS - fired}
        rows.append(row("timing", JITTER.monitor, case, runs=SEEDS, **counts))
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
    write_rows(
        "health_rates.csv",
        [*score_rows(), *jitter_rows(), *loss_rows(), *learning_rows(), *law_rows(), *healthy_rows(), *broken_rows()],
    )
