"""What watching costs a training loop: processor seconds of a step with hooks over those of a bare step.

    python benchmarks/health.py      # writes benchmarks/health.csv

`hooks_of_step`: the share of a watched step, between two readings, that passes inside the hooks, so that what else the
machine does cancels out. `sampled_of_bare`: a step with a reading over a bare one, in turn,
the least of 15 each. `overhead` is that of the default interval: the hooks, and a hundredth of what a sampled step has
more. No GPU: not measured.
"""

import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from measured import MACHINE, write_rows
from torch import Tensor, nn
from torch.nn import functional

from mmplan.runtime.health.hooks import Health, attach
from mmplan.runtime.health.settings import DEFAULT_INTERVAL
from mmplan.runtime.health.staleness import Ledger

REPEATS = 15
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_rows("health.csv", [row(name, width) for name, width in WIDTHS.items()])
