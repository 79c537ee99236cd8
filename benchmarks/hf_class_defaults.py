"""Writes what the configuration classes of the installed transformers assume for absent keys, for `mmplan import`.

    python benchmarks/hf_class_defaults.py

Only the classes of the families that mmplan reads, and only what sizes depend on: no token ids, dropout, rope.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mmplan.scenario.formats.hf.class_defaults import FILE
from mmplan.scenario.formats.hf.conformers import CONFORMERS
from mmplan.scenario.formats.hf.decoders import DECODERS
from mmplan.scenario.formats.hf.ears import EARS
from mmplan.scenario.formats.hf.encoders_alone import ENCODERS
from mmplan.scenario.formats.hf.families import FAMILIES
from mmplan.scenario.formats.hf.stacks import STACKS
from mmplan.scenario.formats.hf.towers import TOWERS

SKIPPED = re.compile(
    r"(^|_)(token|tokens?_id|token_index|token_ids|ids?|dropout|drop|std|init|eps|rope|epsilon|initializer|range|loss|"
    r"coef|label2id|id2label|dtype|theta|prob|layerdrop|softcapping|mask|output|cache|return|problem|architectures|"
    r"transformers|chunk_size_feed_forward|tasks|suppress|resolutions|pinpoints|hidden_act|act_fn)(_|$)"
)
KEPT = {
    "attn_resolutions",
    "init_codebook",
    "mask_downsampler_embed_dim",
    "mask_downsampler_kernel_size",
    "mask_downsampler_stride",
    "mask_downsampler_total_stride",
    "mask_input_channels",
    "mask_token",
    "memory_encoder_output_channels",
    "num_group_tokens",
    "num_output_groups",
    "num_register_tokens",
    "use_cls_token",
    "use_mask_token",
    "conv_L_cache",
    "norm_topk_prob",
    "qk_rope_head_dim",
    "no_rope_layer_interval",
    "output_dim",
    "insert_layer_id",
    "layer_scale_init_value",
    "output_channels",
    "output_proj_dims",
    "output_size",
    "output_vocab_size",
    "max_text_tokens",
    "vision_output_dim",
    "projector_output_dim",
    "word_embed_proj_dim",
    "adapter_output_dim",
    "mm_tokens_per_image",
    "num_query_tokens",
    "max_position_embeddings",
    "tie_word_embeddings",
    "visual_attr_loss",
    "visual_feat_loss",
    "visual_obj_loss",
    "hidden_act",
}
BASE = {field.name for field in dataclasses.fields(PreTrainedConfig)}

# What constructors of the library's configurations raise where a nested config does not suit them.
REFUSALS = (AttributeError, ImportError, KeyError, TypeError, ValueError, StrictDataclassError)


def keys_of(config: type[PreTrainedConfig]) -> dict[str, Any]:
    """Defaults of a class that are numbers, flags, words or short lists of numbers."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if (field.name in BASE or SKIPPED.search(field.name)) and field.name not in KEPT:
            continue
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value is dataclasses.MISSING:
            continue
        if isinstance(value, tuple):
            value = list(value)
        if isinstance(value, list) and not all(isinstance(item, int | float) for item in value):
            continue
        if not isinstance(value, dict):
            found[field.name] = value
    return found


def part_of(config: type[PreTrainedConfig], name: str) -> dict[str, Any] | None:
    """What a nested config is when the key is absent: its class, and its values where they differ from the class's."""
    try:
        absent = getattr(config(), name, None)
    except REFUSALS:
        return None
    if not isinstance(absent, PreTrainedConfig):
        spec = (getattr(config, "sub_configs_defaults", None) or {}).get(name) or config.sub_configs[name]
        kind = getattr(spec, "model_type", "") or getattr(getattr(spec, "config_class", spec), "model_type", "")
        return {"type": kind, "absent": {}, "fixed": True} if kind else None
    inner = type(absent)
    differing = set_by(absent)
    merged = bool(differing) and _present(config, name, inner.model_type) == differing
    spec = (getattr(config, "sub_configs_defaults", None) or {}).get(name) or config.sub_configs[name]
    by_type = AutoConfig in (spec, getattr(spec, "config_class", None))
    return {
        "type": inner.model_type,
        "absent": differing,
        **({} if by_type else {"fixed": True}),
        **({"merged": True} if merged else {}),
    }


def set_by(config: PreTrainedConfig) -> dict[str, Any]:
    """Keys that somebody set, and not the class by itself or from other keys."""
    inner = type(config)
    nested = getattr(inner, "sub_configs", None) or {}
    usual = {key: value for key, value in keys_of(inner).items() if key not in nested}
    plain = inner()
    free = [key for key, value in usual.items() if _value(plain, key) == value]
    first = {key: _value(config, key) for key in free if _value(config, key) != usual[key]}
    again = inner(**first)
    return first | {key: _value(config, key) for key in usual if _value(config, key) != _value(again, key)}


def _present(config: type[PreTrainedConfig], name: str, kind: str) -> dict[str, Any]:
    """The same of a nested config that stands in the file with its `model_type` alone."""
    try:
        return set_by(getattr(config(**{name: {"model_type": kind}}), name))
    except REFUSALS:
        return {}


def _value(config: PreTrainedConfig, key: str) -> Any:
    """Of a key; None where it differs between layers."""
    try:
        value = getattr(config, key, None)
    except (ValueError, RuntimeError):
        return None
    return list(value) if isinstance(value, tuple) else value


def tie_of(config: type[PreTrainedConfig], parts: dict[str, Any]) -> bool:
    """Whether the text config's `tie_word_embeddings: true` wins over the outer config's `false`."""
    if "text_config" not in parts:
        return False
    try:
        text = {"model_type": parts["text_config"]["type"], "tie_word_embeddings": True}
        built = config(text_config=text, tie_word_embeddings=False)
    except REFUSALS:
        return False
    return bool(getattr(built, "tie_word_embeddings", False))


def models_of(kind: str) -> list[str]:
    """Names of the model classes of a configuration class, as `architectures` names them."""
    mappings = [getattr(modeling_auto, name) for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES")]
    found = [mapping[kind] for mapping in mappings if kind in mapping]
    names = {name for entry in found for name in ([entry] if isinstance(entry, str) else entry)}
    return sorted(name for name in names if "For" in name or name.endswith("Model"))


def inner_classes(config: type[PreTrainedConfig]) -> dict[str, type[PreTrainedConfig]]:
    """Classes of nested configs that are registered under no name."""
    found = [getattr(spec, "config_class", spec) for spec in (getattr(config, "sub_configs", None) or {}).values()]
    return {inner.model_type: inner for inner in found if inner is not AutoConfig and inner.model_type}


def row(kind: str, config: type[PreTrainedConfig]) -> dict[str, Any]:
    inner = sorted(getattr(config, "sub_configs", None) or {})
    parts = {name: part for name in inner if (part := part_of(config, name)) is not None}
    result: dict[str, Any] = {"keys": {key: value for key, value in keys_of(config).items() if key not in inner}}
    pairs = (config.attribute_map or {}).items()
    aliases = {new: old for new, old in pairs if old in result["keys"]}
    # A class that takes one name and stores another writes files with the other.
    aliases |= {old: new for new, old in pairs if new in result["keys"] and old not in result["keys"]}
    if aliases:
        result["aliases"] = aliases
    if parts:
        result["parts"] = parts
    if tie_of(config, parts):
        result["tie_from_text"] = True
    if models := models_of(kind):
        result["models"] = models
    return result


def main() -> None:
    kinds = {*FAMILIES, *STACKS, *TOWERS, *EARS, *ENCODERS, *CONFORMERS, *DECODERS}
    wanted, done = sorted(kinds), dict[str, Any]()
    unnamed: dict[str, type[PreTrainedConfig]] = {}
    while wanted:
        kind = wanted.pop()
        if kind in done or (kind not in CONFIG_MAPPING and kind not in unnamed):
            continue
        config = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else unnamed[kind]
        unnamed |= inner_classes(config)
        done[kind] = row(kind, config)
        wanted += [part["type"] for part in done[kind].get("parts", {}).values()]
    lines = [f'"transformers": {json.dumps(transformers.__version__)}']
    lines += [f"{json.dumps(kind)}: {json.dumps(done[kind])}" for kind in sorted(done)]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(done)} classes, {Path(FILE).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
