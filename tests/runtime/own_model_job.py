"""A model that no library has: convolutions over pictures, then transformer blocks over picture and text together."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS, LENGTH = 32, 60, 10
modalities = {"eye": "vision"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.down(F.silu(self.up(self.between(x))))


class Captioner(nn.Module):
    """The picture's parts stand in front of the words; the words are predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.eye = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GELU(), nn.Conv2d(8, 16, 3, 2, 1), nn.GELU())
        self.bridge = nn.Linear(16, WIDTH)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.zeros(1, 64, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.ending = nn.LayerNorm(WIDTH)
        self.says = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, picture: Tensor, ids: Tensor) -> dict[str, Tensor]:
        seen = self.bridge(self.eye(picture).flatten(2).transpose(1, 2))
        x = torch.cat([seen, self.words(ids)], dim=1)
        x = x + self.places[:, : x.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores = self.says(self.ending(x[:, seen.shape[1] - 1 : -1]))
        return {"loss": F.cross_entropy(scores.flatten(0, 1), ids.flatten())}


def model() -> nn.Module:
    return Captioner()


def batches(size: int) -> Iterator[dict[str, Any]]:
    for index in count():
        draw = torch.Generator().manual_seed(index % 8)
        ids = torch.randint(0, WORDS, (size, LENGTH), generator=draw)
        yield {"picture": torch.randn(size, 3, 16, 16, generator=draw), "ids": ids}
