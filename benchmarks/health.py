"""What watching costs a training loop: processor seconds of a step with hooks over those of a bare step.

    python benchmarks/health.py              # writes benchmarks/health.csv
    python benchmarks/health.py --execute    # its rows of `mmplan execute --health`

`hooks_of_step`: the share of a watched step, between two readings, that passes inside the hooks, so that what else the
machine does cancels out. `sampled_of_bare`: a step with a reading over a bare one, in turn,
the least of 15 each. `overhead` is that of the default interval: the hooks, and a hundredth of what a sampled step has
more. Rows `execute`: whole runs of the tiny scenario on one process and on two stages, with `--health` and without in
turn; a step between two readings and one with a reading, medians over those of bare runs, on the clock of the wall.
No GPU: not measured.
"""

import argparse
import csv
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from measured import MACHINE, ROOT, write_rows
from torch import Tensor, nn
from torch.nn import functional

from mmplan.planner.plan import Plan
from mmplan.runtime.health.hooks import Health, attach
from mmplan.runtime.health.run_interval import DEFAULT_HEALTH_INTERVAL
from mmplan.runtime.health.settings import DEFAULT_INTERVAL
from mmplan.runtime.health.staleness import Ledger
from mmplan.runtime.launch import execute

sys.path.insert(0, str(ROOT / "tests" / "runtime"))

from tiny_plans import AUDIO, TWO_STAGES, VISION, hand_plan, tiny_scenario

REPEATS = 15
ROUNDS, STEPS = 4, 41  # of whole runs
PATCHES, TOKENS, WORDS, BATCH = 64, 64, 1000, 16
WIDTHS = {"narrow": 128, "middle": 256}


class Captioner(nn.Module):
    """Two towers of three transformer layers, a cross-attention, and the loss of the next word."""

    def __init__(self, width: int) -> None:
        super().__init__()
        heads = width // 32

        def tower() -> nn.Module:
            layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

        self.patch, self.words = nn.Linear(48, width), nn.Embedding(WORDS, width)
        self.vision, self.text = tower(), tower()
        self.cross = nn.MultiheadAttention(width, heads, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, pixels: Tensor, ids: Tensor) -> dict[str, Tensor]:
        image, text = self.vision(self.patch(pixels)), self.text(self.words(ids))
        logits = self.head(text + self.cross(text, image, image, need_weights=False)[0])
        return {"loss": functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), "logits": logits}


WATCH: dict[str, Any] = {
    "modalities": {"vision": "vision", "text": "text"},
    "embeddings": {"vision": "vision", "text": "text"},
    "cross_attention": ["cross"],
    "keys": {"vision": "vision.layers.2.linear1"},
}


def step_s(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> float:
    start = time.process_time()
    optimizer.zero_grad()
    model(**batch)["loss"].backward()
    optimizer.step()
    return time.process_time() - start


class Inside:
    """Processor seconds that pass inside the functions that are wrapped by it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, owner: type, name: str) -> Any:
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = function(*args, **kwargs)
            self.seconds += time.process_time() - start
            return result

        return patch.object(owner, name, timed)


def hooks_share(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> float:
    inside = Inside()
    names = [(Health, "_begin"), (Health, "_end"), (Health, "_before_update"), (Ledger, "made")]
    with ExitStack() as stack:
        for owner, name in names:
            stack.enter_context(inside.wrap(owner, name))
        watched = stack.enter_context(attach(model, **WATCH, warmup_steps=10**9))
        for _ in range(100):  # so many that the rule of the loss compares
            watched._loss.update(1.0)
        step_s(model, optimizer, batch)
        inside.seconds = 0.0
        whole_s = sum(step_s(model, optimizer, batch) for _ in range(REPEATS))
    return inside.seconds / whole_s


def row(name: str, width: int) -> dict[str, object]:
    torch.manual_seed(0)
    model = Captioner(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = {"pixels": torch.randn(BATCH, PATCHES, 48), "ids": torch.randint(WORDS, (BATCH, TOKENS))}
    share = hooks_share(model, optimizer, batch)
    bare_s, sampled_s = list[float](), list[float]()
    for _ in range(REPEATS):
        bare_s.append(step_s(model, optimizer, batch))
        with attach(model, **WATCH, interval=1):
            sampled_s.append(step_s(model, optimizer, batch))
    bare, sampled = min(bare_s), min(sampled_s)
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "bare_s": f"{bare:.4f}",
        "hooks_of_step": f"{share:.4f}",
        "sampled_of_bare": f"{sampled / bare:.4f}",
        "interval": DEFAULT_INTERVAL,
        "overhead": f"{share + (sampled - bare) / bare / DEFAULT_INTERVAL:.4f}",
        "gpu": "not measured",
        "machine": MACHINE,
    }


def run_row(name: str, plan: Plan) -> dict[str, object]:
    bare_s, between_s, sampled_s = list[float](), list[float](), list[float]()
    with TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            bare_s += [seconds for _, seconds in steps_of(plan, None)]
            for index, seconds in steps_of(plan, Path(folder) / "health.jsonl"):
                (between_s if index % DEFAULT_HEALTH_INTERVAL else sampled_s).append(seconds)
    bare = median(bare_s)
    share, sampled = median(between_s) / bare - 1, median(sampled_s) / bare
    return {
        "model": name,
        "parameters": "",
        "bare_s": f"{bare:.4f}",
        "hooks_of_step": f"{share:.4f}",
        "sampled_of_bare": f"{sampled:.4f}",
        "interval": DEFAULT_HEALTH_INTERVAL,
        "overhead": f"{share + (sampled - 1 - share) / DEFAULT_HEALTH_INTERVAL:.4f}",
        "gpu": "not measured",
        "machine": MACHINE,
    }


def steps_of(plan: Plan, health: Path | None) -> list[tuple[int, float]]:
    """Index and seconds of each step of a run but the first."""
    run = execute(plan, steps=STEPS, local=plan.rank_count, health=health)
    assert run is not None
    return [(step.index, step.step_time_s) for step in run.steps if step.index > 0]


def execute_rows() -> list[dict[str, object]]:
    one = ((*VISION, *AUDIO, "llm.embed", "llm.0-5", "llm.head", "llm.loss"),)
    return [
        run_row("execute, one process", hand_plan(tiny_scenario(), one)),
        run_row("execute, two stages", hand_plan(tiny_scenario(), TWO_STAGES)),
    ]


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--execute", action="store_true")
    runs_alone = options.parse_args().execute
    torch.set_num_threads(1)
    kept = list(csv.DictReader((ROOT / "benchmarks" / "health.csv").open()))
    if runs_alone:
        loops: list[dict[str, object]] = [dict(old) for old in kept if not old["model"].startswith("execute")]
    else:
        loops = [row(name, width) for name, width in WIDTHS.items()]
    write_rows("health.csv", [*loops, *execute_rows()])
