"""A model of blocks that keep running statistics, and one norm in eval mode."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.norm(self.up(x))))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.blocks[2].eval()
        self.ending = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": self.ending(x).square().mean()}


def model() -> nn.Module:
    return Normed()


def batches(size: int) -> Iterator[dict[str, Any]]:
    for index in count():
        draw = torch.Generator().manual_seed(index)
        yield {"x": torch.randn(6 * size, WIDTH, generator=draw) + index}
