"""Configurations a second that `StepEstimator` prices, of a model with 100 blocks; one CSV row on stdout.

python benchmarks/cost_models.py [--append benchmarks/cost_models.csv]
"""

import argparse
import csv
import itertools
import os
import platform
import sys
import time
from pathlib import Path

from mmplan.planner.degrees import Degrees, ScheduleKind
from mmplan.planner.estimate import StepEstimator
from mmplan.planner.measured import MeasuredRow
from mmplan.planner.row_job import RowJob, row_job

GPUS, BATCH, BLOCKS = 2048, 2048, 100


def hundred_blocks() -> RowJob:
    """A dense model of 100 blocks of width 8,192 on 2,048 H100."""
    numbers = {
        "layers": BLOCKS, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "gated": 1, "sequence": 8192,
        "gpus": GPUS, "global_batch": BATCH, "step_s": 1.0, "gpus_per_node": 8,
    }  # fmt: skip
    texts = {"gpu": "h100-sxm", "stack": "nemo-2025", "vocabulary": "131072", "precision": "bf16", "recompute": "none"}
    job = row_job(MeasuredRow("benchmark", 1, texts, {name: float(value) for name, value in numbers.items()}))
    assert isinstance(job, RowJob)
    return job


def configurations() -> list[Degrees]:
    """Every way to spread 2,048 devices with tp, cp, pp, chunks and microbatch sizes that divide."""
    found: list[Degrees] = []
    pipelines = (1, 2, 4, 5, 10, 20, 25, 50)
    for tp, cp, pp, vp, size in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), pipelines, (1, 2, 4, 5), (1, 2, 4, 8)):
        if vp > 1 and (pp == 1 or BLOCKS % (pp * vp)):
            continue
        dp = GPUS // (tp * cp * pp)
        microbatches = BATCH // max(1, dp * size)
        if dp == 0 or microbatches == 0:
            continue
        schedules: tuple[ScheduleKind, ...] = ("interleaved",) if vp > 1 else ("1f1b", "gpipe", "zb-1p", "zb-2p")
        for schedule in schedules:
            for extra in range(4):  # numbers of microbatches, as batch ramps have
                found.append(
                    Degrees(
                        tp=tp, cp=cp, pp=pp, vp=vp, dp=dp, microbatch_size=size, microbatches=microbatches + extra,
                        schedule=schedule,
                    )
                )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--append", type=Path)
    arguments = parser.parse_args()
    job, degrees = hundred_blocks(), configurations()
    start = time.perf_counter()
    estimator = StepEstimator(job.scenario)
    best_s = min(estimator.estimate(one).step_s for one in degrees)
    wall_s = time.perf_counter() - start
    row = {
        "blocks": BLOCKS,
        "configurations": len(degrees),
        "wall_s": f"{wall_s:.3f}",
        "configurations_per_s": f"{len(degrees) / wall_s:.0f}",
        "best_step_s": f"{best_s:.4f}",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    writer = csv.DictWriter(sys.stdout, row)
    writer.writeheader()
    writer.writerow(row)
    if arguments.append is not None:
        fresh = not arguments.append.exists()
        with arguments.append.open("a", newline="", encoding="utf-8") as stream:
            appended = csv.DictWriter(stream, row, lineterminator="\n")
            if fresh:
                appended.writeheader()
            appended.writerow(row)


if __name__ == "__main__":
    main()
