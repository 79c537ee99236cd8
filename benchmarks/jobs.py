"""A model of transformers under different plans: how far its loss curves are from those of one process.

    python benchmarks/jobs.py [--steps 50]      # rewrites the rows of the installed transformers in benchmarks/jobs.csv

LLaVA's architecture with small random weights and samples of no, one or two images (`tests/runtime/llava_job.py`), fp32
on CPU processes over gloo. `worst` is the largest relative difference of a step's loss.
"""

import argparse
import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import transformers
from measured import MACHINE, ROOT, write_rows

sys.path.insert(0, str(ROOT / "tests" / "runtime"))

from ghost_models import llava
from tiny_plans import hand_plan, tiny_scenario

from mmplan.planner.plan import Plan
from mmplan.runtime.launch import execute
from mmplan.scenario.formats.hf_config import read_hf_config

TOWER = ("vision.embed", "vision.0-2", "projector.0")
LLM = ("llm.embed", "llm.0-2", "llm.head", "llm.loss")
TWO = ((*TOWER, "llm.embed", "llm.0"), ("llm.1-2", "llm.head", "llm.loss"))
FOUR = (("vision.embed", "vision.0"), ("vision.1-2", "projector.0"), ("llm.embed",), LLM[1:])


def losses(plan: Plan, steps: int) -> list[float]:
    job = ROOT / "tests" / "runtime" / "llava_job.py"
    run = execute(plan, local=plan.rank_count, steps=steps, job=job)
    assert run is not None
    return [step.losses["llm"] for step in run.steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        # Before version 5 the library wrote a default at the top that its models did not follow.
        config.write_text(json.dumps(llava()[0]().config.to_dict() | {"tie_word_embeddings": False}))
        scenario = replace(tiny_scenario(), model=read_hf_config(config), global_batch=8)
    whole = losses(hand_plan(scenario, [(*TOWER, *LLM)]), steps)
    four = hand_plan(scenario, FOUR)
    plans = {
        "pp=2 x dp=2": hand_plan(scenario, TWO, dp=2),
        "pp=4, encoder and language model apart": four,
        "pp=4, all recomputed": replace(four, stages=tuple(replace(one, recompute="full") for one in four.stages)),
    }
    rows = []
    for name, plan in plans.items():
        pairs = zip(whole, losses(plan, steps), strict=True)
        worst = max(abs(found - alone) / alone for alone, found in pairs)
        row = {"transformers": transformers.__version__, "plan": name, "steps": steps, "worst": f"{worst:.1e}"}
        rows.append(row | {"first_loss": f"{whole[0]:.4f}", "last_loss": f"{whole[-1]:.4f}", "machine": MACHINE})
        print(*rows[-1].values(), sep="\t")
    kept = ROOT / "benchmarks" / "jobs.csv"
    if kept.is_file():
        with kept.open(newline="") as file:
            others = [row for row in csv.DictReader(file) if row["transformers"] != transformers.__version__]
        rows = sorted([*others, *rows], key=lambda row: row["transformers"])
    write_rows("jobs.csv", rows)


if __name__ == "__main__":
    main()
