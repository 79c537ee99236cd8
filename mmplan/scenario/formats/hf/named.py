"""Checkpoints that files name in place of their sizes: those of Ultravox and of Phi-3-vision."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmplan.scenario.formats.hf_fields import Fields


def _whisper(width: int, layers: int, bins: int = 80) -> dict[str, Any]:
    return {
        "model_type": "whisper",
        "d_model": width,
        "encoder_layers": layers,
        "encoder_attention_heads": width // 64,
        "encoder_ffn_dim": 4 * width,
        "num_mel_bins": bins,
        "max_source_positions": 1500,
    }


def _llama(width: int, ffn: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "head_dim": 64 if width == 2048 else 128,
        "tie_word_embeddings": tied,
    }


# config.json of each checkpoint on the Hub, as far as sizes depend on it.
CHECKPOINTS: Mapping[str, Mapping[str, Any]] = {
    "openai/whisper-tiny": _whisper(384, 4),
    "openai/whisper-base": _whisper(512, 6),
    "openai/whisper-small": _whisper(768, 12),
    "openai/whisper-medium": _whisper(1024, 24),
    "openai/whisper-large-v2": _whisper(1280, 32),
    "openai/whisper-large-v3": _whisper(1280, 32, 128),
    "openai/whisper-large-v3-turbo": _whisper(1280, 32, 128),
    "meta-llama/Llama-3.2-1B": _llama(2048, 8192, 16, 32, True),
    "meta-llama/Llama-3.2-3B": _llama(3072, 8192, 28, 24, True),
    "meta-llama/Meta-Llama-3-8B": _llama(4096, 14336, 32, 32, False),
    "meta-llama/Meta-Llama-3.1-8B": _llama(4096, 14336, 32, 32, False),
    "meta-llama/Llama-3.1-8B": _llama(4096, 14336, 32, 32, False),
    "meta-llama/Llama-3.1-70B": _llama(8192, 28672, 80, 64, False),
    "meta-llama/Meta-Llama-3.1-70B": _llama(8192, 28672, 80, 64, False),
    "meta-llama/Llama-3.3-70B": _llama(8192, 28672, 80, 64, False),
}


def named(config: Fields, key: str, by_name: str) -> Fields:
    """The nested config, or where there is none that of the checkpoint which `by_name` names.

    Raises:
        InputError: a checkpoint whose sizes are not known here.
    """
    name = config.values.get(by_name)
    given = config.values.get(key)
    sized = isinstance(given, dict) and set(given) & {"hidden_size", "d_model", "num_hidden_layers"}
    if name is None or sized:
        return config.part(key)
    config.log.read.add(config.key(by_name))
    known = CHECKPOINTS.get(str(name).removesuffix("-Instruct"))
    if known is None:
        raise config.error(by_name, f"the sizes of {name!r:.80} are not known here: put its config.json under '{key}'")
    config.log.notes.append(f"{by_name} names '{name}' and does not describe it: its sizes were taken")
    inner = {**known, **(given if isinstance(given, dict) else {}), "model_type": known["model_type"]}
    return replace(config, values={**config.values, key: inner}).part(key)
