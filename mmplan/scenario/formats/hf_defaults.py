"""What the configuration classes of transformers 5.24 assume for absent keys, as far as sizes depend on them.

Key: `model_type` of the (sub-)config. Files on the Hub are sparse: LLaVA-1.5's text config names only its vocabulary.
"""

from collections.abc import Mapping
from typing import Any

_QWEN_VL_TEXT = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
_QWEN25_VISION = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_WHISPER_ENCODER = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "max_source_positions": 1500,
}

TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "qwen2_vl_text": _QWEN_VL_TEXT,
    "qwen2_5_vl_text": _QWEN_VL_TEXT,
    "mllama_text_model": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    },
    "qwen2_5_omni_text": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen2_5_omni_talker": {
        "vocab_size": 8448,
        "embedding_size": 3584,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}

VISION_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # The defaults that LlavaConfig gives its CLIP tower; a bare CLIPVisionConfig is a smaller model.
    "clip_vision_model": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_channels": 3,
        "image_size": 336,
        "patch_size": 14,
    },
    "qwen2_vl_vision": {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "qwen2_5_vl_vision": _QWEN25_VISION,
    "qwen2_5_omni_vision_encoder": _QWEN25_VISION,
    "mllama_vision_model": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_global_layers": 8,
        "attention_heads": 16,
        "num_channels": 3,
        "image_size": 448,
        "patch_size": 14,
        "max_num_tiles": 4,
    },
}

AUDIO_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_audio_encoder": _WHISPER_ENCODER,
    "qwen2_5_omni_audio_encoder": {**_WHISPER_ENCODER, "n_window": 100, "output_dim": 3584},
}
