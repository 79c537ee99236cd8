"""What watching costs a training loop: processor seconds of a step with hooks over those of a bare step.

    python benchmarks/health.py      # writes benchmarks/health.csv

A bare step, a watched one between two readings and a sampled one follow each other in one process and on one model, 15
times; the least process time of each counts, because what disturbs only adds. `overhead` is that of the default
interval: what a watched step has more, and a hundredth of what a sampled one has more. No GPU: not measured.
"""

import time
from typing import Any

import torch
from measured import MACHINE, write_rows
from torch import Tensor, nn
from torch.nn import functional

from mmplan.runtime.health.hooks import attach
from mmplan.runtime.health.settings import DEFAULT_INTERVAL

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


def row(name: str, width: int) -> dict[str, object]:
    torch.manual_seed(0)
    model = Captioner(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = {"pixels": torch.randn(BATCH, PATCHES, 48), "ids": torch.randint(WORDS, (BATCH, TOKENS))}
    times: dict[str, list[float]] = {"bare": [], "watched": [], "sampled": []}
    for repeat in range(REPEATS + 2):
        for kind, seconds in times.items():
            if kind == "bare":
                taken = step_s(model, optimizer, batch)
            else:
                first = 10**9 if kind == "watched" else 0
                with attach(model, **WATCH, warmup_steps=first, interval=1):
                    taken = step_s(model, optimizer, batch)
            if repeat >= 2:
                seconds.append(taken)
    bare, watched, sampled = (min(values) for values in times.values())
    overhead = (watched - bare) / bare + (sampled - watched) / bare / DEFAULT_INTERVAL
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "bare_s": f"{bare:.4f}",
        "watched_of_bare": f"{watched / bare:.4f}",
        "sampled_of_bare": f"{sampled / bare:.4f}",
        "interval": DEFAULT_INTERVAL,
        "overhead": f"{overhead:.4f}",
        "gpu": "not measured",
        "machine": MACHINE,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_rows("health.csv", [row(name, width) for name, width in WIDTHS.items()])
