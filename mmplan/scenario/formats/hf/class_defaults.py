"""What configuration classes of transformers assume for absent keys: `class_defaults.json`, written by
`benchmarks/hf_class_defaults.py` from the classes themselves. Files on the Hub are sparse."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("class_defaults.json")


# Names of the Hub for classes that transformers has under another name.
READ_AS = {"kimi_k2": "deepseek_v3", "moonvit": "kimi_k25_vision"}
# Classes that stand beside the weights and not in transformers: configuration_intern_vit.py and
# configuration_internvl_chat.py of OpenGVLab/InternVL2_5-8B.
OWN: Mapping[str, Mapping[str, Any]] = {
    "intern_vit_6b": {
        "keys": {
            "hidden_size": 3200,
            "intermediate_size": 12800,
            "num_hidden_layers": 48,
            "num_attention_heads": 25,
            "num_channels": 3,
            "image_size": 224,
            "patch_size": 14,
            "norm_type": "rms_norm",
            "qk_normalization": True,
            "qkv_bias": False,
            "use_mean_pooling": True,
        }
    },
    "fun_asr_nano_adaptor": {  # of transformers, without a model_type
        "keys": {
            "hidden_size": 1024,
            "num_attention_heads": 8,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "projector_hidden_size": 2048,
        }
    },
    # of transformers, without a model_type
    "dbrx_attention": {"keys": {"kv_n_heads": 1}},
    "dbrx_ffn": {"keys": {"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1}},
    "nemotron3_diarization_head": {
        "keys": {"hidden_size": 192, "num_speakers": 8, "audio_hidden_size": 512, "subsampling_factor": 8}
    },
    "nemotron3_diarization_streaming": {"keys": {"speaker_cache_length": 264}},
    "internlm2": {
        "keys": {
            "vocab_size": 103168,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "bias": True,
            "tie_word_embeddings": False,
        }
    },
    "molmo": {"keys": {"weight_tying": False, "qkv_bias": False, "layer_norm_type": "rms"}},
    "minicpmo": {"keys": {"query_num": 64, "audio_pool_step": 2}},
    "qwen": {"keys": {"no_bias": True, "kv_channels": 128, "tie_word_embeddings": False}},
    "ultravox": {
        "keys": {"hidden_size": 4096, "stack_factor": 8, "projector_act": "swiglu", "projector_ln_mid": False},
        "parts": {
            "text_config": {"type": "llama", "absent": {}},
            "audio_config": {"type": "whisper", "absent": {}},
        },
    },
    "internvl_chat": {"keys": {"downsample_ratio": 0.5}},
    "minicpmv": {"keys": {"query_num": 64}},
    "kimi_vl": {
        "keys": {"tie_word_embeddings": False},
        "parts": {"text_config": {"type": "deepseek_v3", "absent": {}}},
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PartDefaults:
    """A nested config: `model_type` of its class, and what differs from that class when the key is absent as a whole.

    fixed: the class is the same whatever `model_type` the nested config names; merged: what differs also stands in for
    keys that a nested config leaves out.
    """

    kind: str
    absent: Mapping[str, Any]
    fixed: bool = False
    merged: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassDefaults:
    """Of one `model_type`.

    Attributes:
        keys: key -> value that the class assumes.
        aliases: key of the class -> other names that it reads the key by; one of them wins where both stand.
        parts: nested configs.
        models: names of its model classes, as `architectures` names them.
        tie_from_text: `tie_word_embeddings: true` in the text config wins over the outer config's `false`.
    """

    keys: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    parts: Mapping[str, PartDefaults] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    tie_from_text: bool = False

    def name_of(self, key: str) -> str:
        """The class's own name of a key that is given by another one."""
        return next((own for own, others in self.aliases.items() if key in others), key)


@cache
def defaults_of(kind: str) -> ClassDefaults:
    """Defaults of a `model_type`; none where transformers has no class of that name."""
    if kind in READ_AS:
        return defaults_of(READ_AS[kind])
    row = OWN.get(kind) or _table().get(kind)
    if not isinstance(row, dict):
        return ClassDefaults()
    aliases: dict[str, tuple[str, ...]] = {}
    for new, old in row.get("aliases", {}).items():
        aliases[old] = (*aliases.get(old, ()), new)
    parts = {
        name: PartDefaults(
            kind=part["type"], absent=part["absent"], fixed=part.get("fixed", False), merged=part.get("merged", False)
        )
        for name, part in row.get("parts", {}).items()
    }
    return ClassDefaults(
        keys=row["keys"],
        aliases=aliases,
        parts=parts,
        models=tuple(row.get("models", ())),
        tie_from_text=row.get("tie_from_text", False),
    )


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(FILE.read_text())
    return table


@cache
def kinds_of_model(model: str) -> tuple[str, ...]:
    """The `model_type`s that have a model class of that name."""
    rows = ((kind, row) for kind, row in _table().items() if isinstance(row, dict))
    return tuple(kind for kind, row in rows if model in row.get("models", ()))
