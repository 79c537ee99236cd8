"""Runs of every kind of state in which one step is no number; four processes run them."""

from dataclasses import replace
from pathlib import Path

import torch
from tiny_plans import AUDIO, TWO_STAGES, VISION, hand_plan, tiny_scenario
from worker_runs import WorkerRuns

from mmplan.planner.plan import Plan
from mmplan.runtime.checkpoint.options import Checkpoints
from mmplan.runtime.inject import parse_injection
from mmplan.runtime.run_options import RunOptions

PROCESSES = 4
ONE_STAGE = ((*VISION, *AUDIO, "llm.embed", "llm.0-5", "llm.head", "llm.loss"),)
FAULTS = {
    "two stages": "nan rank=0 step=1 action=B1",
    "ZeRO-1": "nan rank=1 step=1 action=F0",
    "ZeRO-2 on two stages": "nan rank=3 step=1 action=B0",
    "ZeRO-3": "nan rank=0 step=1 action=B0",
    "tensor parallel": "nan rank=1 step=1 action=STEP",
}


def plans() -> dict[str, Plan]:
    four = replace(tiny_scenario(), global_batch=4)
    two = hand_plan(four, ONE_STAGE, dp=2)
    return {
        "two stages": hand_plan(four, TWO_STAGES),
        "ZeRO-1": replace(two, sharding="optimizer"),
        "ZeRO-2 on two stages": replace(hand_plan(four, TWO_STAGES, dp=2), sharding="gradients"),
        "ZeRO-3": replace(two, sharding="parameters"),
        "tensor parallel": replace(two, tp=2),
    }


def run_nan_cases(rank: int, folder: str) -> None:
    """Two steps each, of which the second is no number; a checkpoint behind both."""
    runs, results = WorkerRuns(rank, Path(folder)), {}
    for name, plan in plans().items():
        saved = Path(folder) / name
        saved.mkdir(exist_ok=True)
        notes: list[str] = []
        options = RunOptions(
            steps=2,
            timeout_s=60.0,
            on_nan="skip",
            inject=(parse_injection(FAULTS[name]),),
            checkpoints=Checkpoints(folder=saved, every=1),
        )
        results[name] = (runs.run(plan, options, notes.append), notes)
    torch.save(results, Path(folder) / f"rank{rank}.pt")
