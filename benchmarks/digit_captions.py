"""A small vision-language model of transformers and its data: made pictures of digits with a sentence about each.

Also a job for `mmplan sensitivity --job`: `model` and `batches`. LLaVA's architecture; a picture has one digit
of a 5 x 7 font, about the middle, on noise. A sentence names the digit, whether it is even and small, and the next one.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

FONT = (
    *(
        "01110100011000110001100011000101110",
        "00100011000010000100001000010001110",
        "01110100010000100010001000100011111",
    ),
    *(
        "11111000100010000010000011000101110",
        "00010001100101010010111110001000010",
        "11111100001111000001000011000101110",
    ),
    *(
        "00110010001000011110100011000101110",
        "11111000010001000100010000100001000",
        "01110100011000101110100011000101110",
    ),
    "01110100011000101111000010001001100",
)  # ten glyphs, seven rows of five
SIDE, PATCH = 16, 4
IMAGE, BOS, EVEN, ODD, SMALL, LARGE, NEXT, PAD = 60, 1, 20, 21, 22, 23, 24, 0
TOKENS = (SIDE // PATCH) ** 2
TEST_SEED = 10**6  # samples from here on are never trained on


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=5,
            num_attention_heads=2,
            image_size=SIDE,
            patch_size=PATCH,
            projection_dim=16,
            initializer_factor=4.0,
        ),
        text_config=hf.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            max_position_embeddings=64,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=2,
            initializer_range=0.1,
        ),
        initializer_range=0.1,
        image_token_index=IMAGE,
        image_token_id=IMAGE,
        vision_feature_layer=-1,
    )
    return hf.LlavaForConditionalGeneration(config)


def samples(first: int, size: int) -> dict[str, Any]:
    """A batch of samples by their numbers."""
    drawn = [_sample(number) for number in range(first, first + size)]
    pixels, captions = torch.stack([one[0] for one in drawn]), torch.tensor([one[1] for one in drawn])
    image = torch.full((size, TOKENS), IMAGE)
    ids = torch.cat([torch.full((size, 1), BOS), image, captions], dim=1)
    labels = torch.cat([torch.full((size, 1 + TOKENS), -100), captions], dim=1)
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels, "use_cache": False}


def batches(size: int, start: int = 0) -> Iterator[dict[str, Any]]:
    for number in count(start):
        yield samples(TEST_SEED + number * size, size)


def _sample(number: int) -> tuple[Tensor, list[int]]:
    draw = torch.Generator().manual_seed(number)
    digit, down, right = (int(torch.randint(0, most, (), generator=draw)) for most in (10, 3, 3))
    picture = 0.4 * torch.randn(SIDE, SIDE, generator=draw)
    picture[down + 3 : down + 10, right + 4 : right + 9] += 2 * torch.tensor([float(bit) for bit in FONT[digit]]).view(
        7, 5
    )
    caption = [3 + digit, ODD if digit % 2 else EVEN, SMALL if digit < 5 else LARGE, NEXT, 3 + (digit + 1) % 10]
    return picture.expand(3, SIDE, SIDE), caption
