"""Actions per second of lowering and timing: interleaved 1F1B with split backward, p ranks of v stages, m microbatches.

    python benchmarks/simulator.py            # prints a table and rewrites benchmarks/simulator.csv

An action is a compute (F, I, W), a transfer (its two ends count once) or an update. Seconds are those of the process on
one core, the best of the repeats: `lower_s` from the columns of a schedule to those of the program, `waves_s` what
depends on what, `price_s` one vector of durations, `price_32_s` 32 at once, `kahn_s` waves without known levels.
`all_in_actions_per_s` = actions / (lower_s + waves_s + price_s).
"""

import time
from collections.abc import Callable

import numpy as np
from measured import MACHINE, write_rows

from mmplan.planner.columns import RECV, F, I, ProgramColumns, W
from mmplan.planner.dry_run import ScheduleColumns
from mmplan.planner.place import Lowered, Pipeline, Transfer, place
from mmplan.planner.waves import column_waves, lowered_waves, price

REPEATS = 7
SIZES = ((8, 64, 1), (16, 128, 2), (32, 256, 2), (64, 128, 4), (64, 256, 4), (64, 512, 4), (64, 1024, 4), (64, 2048, 4))
DRAWS = 32


def interleaved(p: int, m: int, v: int) -> ScheduleColumns:
    """Megatron's order (Narayanan et al., SC 2021, section 2.2.2), every backward as I, W. p divides m."""
    slots = np.arange(m * v)
    group, inside = np.divmod(slots, p * v)
    chunk, microbatch = inside // p, group * p + inside % p
    stage, kind, index = [], [], []
    for rank in range(p):
        warm = min((p - rank - 1) * 2 + (v - 1) * p, m * v) if v > 1 else min(p - rank - 1, m * v)
        at = np.argsort(np.concatenate([slots, slots + warm + 0.5, slots + warm + 0.6]), kind="stable")
        kinds = np.repeat([F, I, W], m * v)[at]
        chunks = np.concatenate([chunk, v - 1 - chunk, v - 1 - chunk])[at]
        stage.append(chunks * p + rank)
        kind.append(kinds)
        index.append(np.tile(microbatch, 3)[at])
    return ScheduleColumns(
        first=np.arange(p + 1) * 3 * m * v,
        stage=np.concatenate(stage),
        kind=np.concatenate(kind),
        microbatch=np.concatenate(index),
        stages=p * v,
        microbatches=m,
    )


def pipeline(p: int, m: int, v: int) -> Pipeline:
    rng = np.random.default_rng(0)
    seconds = rng.uniform(0.9, 1.1, (p * v, 4))
    return Pipeline(
        schedule=interleaved(p, m, v),
        ranks=(tuple(range(p)),),
        transfers=tuple(
            Transfer(source=s, target=s + 1, activation=f"{s}>{s + 1}", gradient=f"{s}<{s + 1}")
            for s in range(p * v - 1)
        ),
        seconds=tuple((f, b, i, w) for f, b, i, w in seconds.tolist()),
        reduce_bytes=(0,) * (p * v),
    )


def durations(columns: ProgramColumns, draws: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    return rng.uniform(0.9, 1.1, (columns.size, draws)) * np.where(columns.kind < 4, 1.0, 0.02)[:, None]


def best_s(run: Callable[[], object]) -> float:
    walls = []
    for _ in range(REPEATS):
        started = time.process_time()
        run()
        walls.append(time.process_time() - started)
    return min(walls)


def measure(p: int, m: int, v: int) -> dict[str, object]:
    made = pipeline(p, m, v)
    sizes = np.ones((1, m, len(made.transfers)), dtype=np.int64)
    lowered: Lowered = place(made, sizes)
    waves = lowered_waves(lowered)
    columns = lowered.columns
    actions = int((columns.kind != RECV).sum())
    many = durations(columns, DRAWS)
    one = np.ascontiguousarray(many[:, 0])
    lower_s, waves_s = best_s(lambda: place(made, sizes)), best_s(lambda: lowered_waves(lowered))
    price_s = best_s(lambda: price(waves, one))
    return {
        "p": p,
        "m": m,
        "v": v,
        "actions": actions,
        "waves": len(waves.first) - 1,
        "lower_s": f"{lower_s:.4f}",
        "waves_s": f"{waves_s:.4f}",
        "price_s": f"{price_s:.4f}",
        "kahn_s": f"{best_s(lambda: column_waves(columns)):.4f}",
        "price_32_s": f"{best_s(lambda: price(waves, many)):.4f}" if actions < 1e6 else "",
        "all_in_actions_per_s": f"{actions / (lower_s + waves_s + price_s):.3g}",
        "machine": MACHINE,
    }


def main() -> None:
    rows = []
    for p, m, v in SIZES:
        rows.append(measure(p, m, v))
        print(*(f"{value}" for value in list(rows[-1].values())[:-1]), sep="\t", flush=True)
    write_rows("simulator.csv", rows)


if __name__ == "__main__":
    main()
