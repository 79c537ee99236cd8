"""A job as a user writes it: a Mixtral with small random weights."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from expert_families import mixtral
from torch import nn


def model() -> nn.Module:
    return mixtral()[0]()


def batches(size: int) -> Iterator[dict[str, Any]]:
    for index in count():
        draw = torch.Generator().manual_seed(index % 8)
        ids = torch.randint(3, 90, (size, 20 + 4 * (index % 3)), generator=draw)
        yield {"input_ids": ids, "labels": ids, "use_cache": False}
