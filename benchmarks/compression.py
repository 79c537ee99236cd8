"""What compressed gradients cost in loss and save in bytes, on pictures of digits with captions.

    python benchmarks/compression.py      # writes benchmarks/compression.csv

Two processes train a vision and a text tower to find the caption of a picture, "a seven in white", among all 20.
Pictures are drawn with fonts that matplotlib brings; those of the test are drawn anew. Every method starts from the
same weights and sees the same batches as `none`, seed by seed: differences are of pairs, with the half width of their
95 % confidence interval (Student, 4 degrees of freedom). Of a compressed step `payload` is what a rank hands to
collectives, `sent` what it sends, `sockets` what arrives at its sockets, gloo's headers and its all-reduces included.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from measured import MACHINE, write_rows
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from mmplan.runtime.compression.ddp_hooks import (
    LowRankState,
    TopKState,
    TwoLevelState,
    low_rank_hook,
    top_k_hook,
    two_level_hook,
)
from mmplan.runtime.compression.socket_bytes import received_bytes

RANKS, SEEDS, STEPS, BATCH = 2, 5, 1000, 64  # of each rank
SIDE, TEST = 16, 1800
FONTS = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono-Bold", "DejaVuSans-Oblique", "STIXGeneral", "cmr10")
SIZE, COLOURS = 13, (0, 1)
CAPTIONS = list(product(range(10), COLOURS))
WORDS = torch.tensor([(digit, 10 + colour) for digit, colour in CAPTIONS])
T_95 = 2.776  # Student's t, 4 degrees of freedom, two-sided


class Towers(nn.Module):
    """Logits of every caption for each picture."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 48)
        self.vision, self.text = tower(SIDE * SIDE), tower(2 * 48)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, pictures: Tensor) -> Tensor:
        seen = nn.functional.normalize(self.vision(pictures), dim=1)
        read = nn.functional.normalize(self.text(self.words(WORDS).flatten(1)), dim=1)
        logits: Tensor = self.scale.exp() * seen @ read.T
        return logits


def tower(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 48, bias=False))


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """[count, SIDE * SIDE] and the number of each one's caption."""
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    loaded = [ImageFont.truetype(str(fonts / f"{font}.ttf"), SIZE) for font in FONTS]
    generator = torch.Generator().manual_seed(seed)
    captions = torch.randint(len(CAPTIONS), (count,), generator=generator)
    drawn = []
    for caption in captions.tolist():
        digit, colour = CAPTIONS[caption]
        font, dx, dy, turn = torch.randint(1000, (4,), generator=generator).tolist()
        picture = Image.new("L", (SIDE, SIDE))
        text = ImageDraw.Draw(picture)
        place = (SIDE / 2 + dx % 3 - 1, SIDE / 2 + dy % 3 - 1)
        text.text(place, str(digit), fill=255, font=loaded[font % len(FONTS)], anchor="mm")
        picture = picture.rotate(turn % 21 - 10, resample=Image.Resampling.BILINEAR)
        pixels = torch.tensor(list(picture.tobytes()), dtype=torch.float32) / 255
        drawn.append((1 - 2 * pixels) if colour else (2 * pixels - 1))
    noisy = torch.stack(drawn) + 0.15 * torch.randn(count, SIDE * SIDE, generator=generator)
    return noisy, captions


def plain(model: Towers, wrapped: DistributedDataParallel) -> Callable[[], tuple[int, int]]:
    moved = 4 * sum(p.numel() for p in model.parameters()) * STEPS
    return lambda: (moved, 2 * (RANKS - 1) * moved // RANKS)


def top_k(model: Towers, wrapped: DistributedDataParallel) -> Callable[[], tuple[int, int]]:
    state = TopKState(model)
    wrapped.register_comm_hook(state, top_k_hook)
    return lambda: (state.feedback.wire.payload_bytes, state.feedback.wire.sent_bytes)


def two_levels(model: Towers, wrapped: DistributedDataParallel) -> Callable[[], tuple[int, int]]:
    """Each process is a node, so that all there is crosses nodes."""
    alone = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
    assert dist.group.WORLD is not None
    state = TwoLevelState(model, alone, dist.group.WORLD)
    wrapped.register_comm_hook(state, two_level_hook)
    wire = state.levels.feedback.wire
    return lambda: (wire.payload_bytes, wire.sent_bytes)


def low_rank(model: Towers, wrapped: DistributedDataParallel) -> Callable[[], tuple[int, int]]:
    state = LowRankState(model, {"vision": "vision.", "text": "text."}, rank=4)
    wrapped.register_comm_hook(state, low_rank_hook)
    return lambda: (state.low_rank.wire.payload_bytes, state.low_rank.wire.sent_bytes)


# Each with the step from which on it compresses: a hook may be registered between any two steps.
METHODS = {
    "none": (plain, 0),
    "top 5 %, sign and 4 bits": (top_k, 0),
    "top 5 %, sign and 4 bits, from step 250": (top_k, 250),
    "top 20 %, fp8": (two_levels, 0),
    "rank 4, fused": (low_rank, 0),
}


def train(method: str, seed: int, rank: int, data: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Any:
    torch.manual_seed(seed)
    model = Towers()
    wrapped = DistributedDataParallel(model)
    register, first = METHODS[method]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    order = torch.randint(len(data[0]), (STEPS, RANKS, BATCH), generator=torch.Generator().manual_seed(seed))
    dist.barrier()
    started = time.perf_counter()
    for step in range(STEPS):
        if step == first:
            counted, before = register(model, wrapped), received_bytes()
        chosen = order[step, rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(data[0][chosen]), data[1][chosen]).backward()
        optimizer.step()
        schedule.step()
    dist.barrier()
    step_s, arrived = (time.perf_counter() - started) / STEPS, received_bytes() - before
    with torch.no_grad():
        logits = model(test[0])
    loss = nn.functional.cross_entropy(logits, test[1]).item()
    hits = (logits.argmax(1) == test[1]).float().mean().item()
    return loss, 100 * hits, step_s, *(count // (STEPS - first) for count in (*counted(), arrived))


def one_process(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    data, test = pictures(6000, 0), pictures(TEST, 1)
    runs = {method: [train(method, seed, rank, data, test) for seed in range(SEEDS)] for method in METHODS}
    torch.save(runs, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def paired(runs: list[Any], base: list[Any], index: int) -> tuple[float, float]:
    """Mean difference and the half width of its confidence interval."""
    differences = [run[index] - other[index] for run, other in zip(runs, base, strict=True)]
    return mean(differences), T_95 * stdev(differences) / SEEDS**0.5


def main() -> None:
    with TemporaryDirectory() as folder:
        multiprocessing.spawn(one_process, args=(folder,), nprocs=RANKS)
        runs = torch.load(f"{folder}/rank0.pt")
    base = runs["none"]
    rows = []
    for method, own in runs.items():
        (loss, loss_half), (hits, hits_half) = paired(own, base, 0), paired(own, base, 1)
        *_, payload, sent, sockets = own[0]
        rows.append(
            {
                "method": method,
                "ranks": RANKS,
                "parameters": sum(p.numel() for p in Towers().parameters()),
                "steps": STEPS,
                "seeds": SEEDS,
                "test_loss": f"{mean(run[0] for run in own):.4f}",
                "loss_difference": f"{loss:+.4f}",
                "loss_half_width": f"{loss_half:.4f}",
                "top1_percent": f"{mean(run[1] for run in own):.2f}",
                "top1_difference": f"{hits:+.2f}",
                "top1_half_width": f"{hits_half:.2f}",
                "payload_bytes": payload,
                "sent_bytes": sent,
                "socket_bytes": sockets,
                "smaller": f"{base[0][4] / sent:.1f}",
                "cpu_step_s": f"{mean(run[2] for run in own):.4f}",
                "gpu_step_s": "not measured",
                "machine": MACHINE,
            }
        )
    write_rows("compression.csv", rows)


if __name__ == "__main__":
    main()
