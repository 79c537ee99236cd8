"""Tiny random models of real classes of transformers, each with one batch whose lengths all differ."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

Case = tuple[Callable[[], nn.Module], dict[str, Any]]

IMAGE = 100  # the token that stands for an image or a clip; text is drawn below it
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 120,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
IMAGES = {"image_size": 16, "patch_size": 4}
QWEN_TOWER = {
    "depth": 3,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "intermediate_size": 48,
}
MROPE = {"rope_type": "default", "type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
QWEN_TEXT = TEXT | {"head_dim": 8, "rope_parameters": MROPE, "rope_scaling": MROPE}
QWEN_TOKENS = {"image_token_id": IMAGE, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}


def _text(*runs: tuple[int, int], length: int = 40) -> dict[str, Any]:
    """One sequence per run of image tokens (first, count), with labels on the text."""
    ids = torch.randint(3, 90, (len(runs), length))
    for row, (first, count) in enumerate(runs):
        ids[row, first : first + count] = IMAGE
    labels = ids.masked_fill(ids >= IMAGE, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids), "use_cache": False}


def llava() -> Case:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**TOWER, **IMAGES, projection_dim=16),
        text_config=hf.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        image_token_id=IMAGE,
        vision_feature_layer=-2,
    )
    batch = _text((2, 16), (5, 16)) | {"pixel_values": torch.randn(2, 3, 16, 16)}
    return lambda: hf.LlavaForConditionalGeneration(config), batch


def _qwen_batch() -> dict[str, Any]:
    batch = _text((3, 4), (3, 8), length=30)
    batch["input_ids"][:, 2] = QWEN_TOKENS["vision_start_token_id"]
    batch["labels"][:, 2] = -100
    grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
    kinds = (batch["input_ids"] == IMAGE).int()
    return batch | {"pixel_values": torch.randn(48, 96), "image_grid_thw": grid, "mm_token_type_ids": kinds}


def qwen2_vl() -> Case:
    tower = QWEN_TOWER | {"embed_dim": 24, "hidden_size": 32, "in_channels": 3, "mlp_ratio": 2}
    config = hf.Qwen2VLConfig(vision_config=tower, text_config=QWEN_TEXT, **QWEN_TOKENS)
    return lambda: hf.Qwen2VLForConditionalGeneration(config), _qwen_batch()


def qwen2_5_vl() -> Case:
    tower = QWEN_TOWER | {"hidden_size": 24, "out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 16}
    config = hf.Qwen2_5_VLConfig(vision_config=tower, text_config=QWEN_TEXT, **QWEN_TOKENS)
    return lambda: hf.Qwen2_5_VLForConditionalGeneration(config), _qwen_batch()


QWEN3_TOWER = QWEN_TOWER | {
    "hidden_size": 24,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 64,
}


def qwen3_vl() -> Case:
    config = hf.Qwen3VLConfig(vision_config=QWEN3_TOWER, text_config=QWEN_TEXT, **QWEN_TOKENS)
    return lambda: hf.Qwen3VLForConditionalGeneration(config), _qwen_batch()


def qwen3_vl_moe() -> Case:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = hf.Qwen3VLMoeConfig(vision_config=QWEN3_TOWER, text_config=QWEN_TEXT | experts, **QWEN_TOKENS)
    return lambda: hf.Qwen3VLMoeForConditionalGeneration(config), _qwen_batch()


def qwen2_audio() -> Case:
    tower = {
        "d_model": 24,
        "encoder_layers": 3,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "num_mel_bins": 8,
        "max_source_positions": 20,
    }
    config = hf.Qwen2AudioConfig(
        audio_config=tower, text_config=TEXT | {"model_type": "qwen2"}, audio_token_index=IMAGE, audio_token_id=IMAGE
    )
    batch = _text((2, 10), (4, 10)) | {"input_features": torch.randn(2, 8, 40)}
    batch.pop("use_cache")
    mask = torch.ones(2, 40, dtype=torch.long)
    return lambda: hf.Qwen2AudioForConditionalGeneration(config), batch | {"feature_attention_mask": mask}


def mllama() -> Case:
    tower = TOWER | IMAGES
    tower |= {"num_global_layers": 1, "attention_heads": 2, "max_num_tiles": 2, "intermediate_layers_indices": [0, 1]}
    tower |= {"supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]], "vision_output_dim": 72}
    text = TEXT | {"num_hidden_layers": 4, "cross_attention_layers": [1, 3], "rope_scaling": {"rope_type": "default"}}
    config = hf.MllamaConfig(vision_config=tower, text_config=text, image_token_index=IMAGE)
    batch = _text((0, 0), (0, 0), length=20) | {
        "pixel_values": torch.randn(2, 1, 2, 3, 16, 16),
        "aspect_ratio_ids": torch.tensor([[1], [2]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0]], [[1, 1]]]),
        "cross_attention_mask": torch.ones(2, 20, 1, 2, dtype=torch.long),
    }
    return lambda: hf.MllamaForConditionalGeneration(config), batch


def gemma3() -> Case:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    text = hf.Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=8, layer_types=layers)
    config = hf.Gemma3Config(
        vision_config=TOWER | IMAGES,
        text_config=text.to_dict(),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        image_token_id=IMAGE,
    )
    batch = _text((2, 4), (7, 4), length=24) | {"pixel_values": torch.randn(2, 3, 16, 16)}
    kinds = (batch["input_ids"] == IMAGE).long()
    return lambda: hf.Gemma3ForConditionalGeneration(config), batch | {"token_type_ids": kinds}


def whisper() -> Case:
    config = hf.WhisperConfig(
        d_model=24,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        vocab_size=120,
        max_source_positions=20,
        max_target_positions=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    features, labels = torch.randn(2, 8, 40), torch.randint(3, 90, (2, 12))
    batch = {"input_features": features, "labels": labels, "use_cache": False}
    return lambda: hf.WhisperForConditionalGeneration(config), batch


FAMILIES: dict[str, Callable[[], Case]] = {
    case.__name__: case
    for case in (
        *(llava, qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe),
        *(qwen2_audio, mllama, gemma3, whisper),
    )
}


class Joined(nn.Module):
    """A module of one's own: two encoders, one of them called twice, and a trunk that reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 8)
        self.right = nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.trunk = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 1)

    def forward(self, left: Tensor, right: Tensor, target: Tensor) -> dict[str, Tensor]:
        x = self.left(left) * self.scale + self.right(right) + self.right(right.flip(0))
        for block in self.trunk:
            x = x + torch.tanh(block(x))
        return {"loss": (self.head(x).squeeze(-1) - target).square().mean()}


def saved_config(model: nn.Module, folder: Path) -> Path:
    """The file that the library writes beside the weights of a model. A dict of all values that a configuration object
    has may say of older releases that a head is tied which is not."""
    assert isinstance(model, hf.PreTrainedModel)
    model.config.save_pretrained(folder)
    return folder / "config.json"


def joined() -> Case:
    return Joined, {"left": torch.randn(5, 6), "right": torch.randn(5, 4), "target": torch.randn(5)}
