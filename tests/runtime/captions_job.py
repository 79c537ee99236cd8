"""A job whose samples are rows of a manifest: a picture of a few bytes, and a text of letters."""

from pathlib import Path
from typing import Any

import torch
from ghost_models import IMAGE
from llava_job import PER_IMAGE, model

__all__ = ["collate", "model"]


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    (row,) = rows
    ids = [IMAGE] * PER_IMAGE + [3 + ord(letter) % 80 for letter in row["text"]]
    seed = Path(row["image"]).read_bytes()[0]
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    tokens = torch.tensor([ids])
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    return {"input_ids": tokens, "labels": labels, "pixel_values": pixels, "use_cache": False}
