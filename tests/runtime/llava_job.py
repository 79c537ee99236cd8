"""A job as a user writes it: the LLaVA architecture with small random weights, samples with no, one or two images."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from ghost_models import IMAGE, llava
from torch import nn

PER_IMAGE = 16


def model() -> nn.Module:
    return llava()[0]()


def batches(size: int) -> Iterator[dict[str, Any]]:
    assert size == 1
    for index in count():
        draw = torch.Generator().manual_seed(index % 8)  # eight samples again and again: they can be learned
        images = index % 3
        length = 40 + 4 * (index % 5)
        ids = torch.randint(3, 90, (1, length), generator=draw)
        ids[0, 2 : 2 + PER_IMAGE * images] = IMAGE
        pixels = torch.randn(images, 3, 16, 16, generator=draw)
        batch = {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), "use_cache": False}
        yield batch | ({"pixel_values": pixels} if images else {})
