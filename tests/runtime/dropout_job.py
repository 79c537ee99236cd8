"""A job whose model drops attention weights at random and whose data can begin behind its first batches."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import llava_job
from torch import nn


def model() -> nn.Module:
    built = llava_job.model()
    for module in built.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    return built


def batches(size: int, start: int = 0) -> Iterator[dict[str, Any]]:
    return islice(llava_job.batches(size), start, None)
