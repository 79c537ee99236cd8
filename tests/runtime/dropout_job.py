"""A job whose model drops attention weights at random and counts its calls, and whose data can begin behind its first
batches."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import llava_job
import torch
from torch import nn


def model() -> nn.Module:
    built = llava_job.model()
    for module in built.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    block = built.get_submodule("model.language_model.layers.1")
    block.register_buffer("calls", torch.tensor(0))
    block.register_forward_pre_hook(count)
    return built


def count(block: nn.Module, _: object) -> None:
    block.get_buffer("calls").add_(1)


def batches(size: int, start: int = 0) -> Iterator[dict[str, Any]]:
    return islice(llava_job.batches(size), start, None)
