"""A Hugging Face config.json for `mmplan import`: the model module by module, what was assumed, what was left out."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmplan.cost_models.formats.module_parameters import module_parameters
from mmplan.cost_models.loads import output_lengths, sequence_lengths
from mmplan.errors import InputError
from mmplan.scenario.document import counted, listed, shown
from mmplan.scenario.formats.hf.adapter import adapter_reading
from mmplan.scenario.formats.hf.class_defaults import defaults_of
from mmplan.scenario.formats.hf_config import HfConfig, read_config, read_object
from mmplan.scenario.formats.reading import Head, Reading
from mmplan.scenario.scenario import Model, ModelModule, Sample, Transformer
from mmplan.scenario.steps import Attend, Convolve, Scan, Usual, uses

PIXELS, SECONDS = 1024, 30.0  # of the image and clip whose tokens are told
MARKS = ('"model_type"', '"architectures"', '"peft_type"')
# Keys that no size depends on, by what they are for.
_GROUPS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "token ids and generation",
        re.compile(
            r"token_(id|index)|tokens?$|temperature|top_[kp]$|beam|sample|penalty|length|suppress|early_stopping|ngram|"
            r"bad_words|return_|output_|chat_template|prefix|diversity|typical_p|speaker|position_id_per|seconds_per|"
            r"image_placeholder|bos|eos"
        ),
    ),
    ("dropout, initialisation and losses", re.compile(r"drop|init|std$|coef|loss|label|problem_type|jitter|mask_")),
    ("rotary positions", re.compile(r"rope|rotary|mrope|original_max_position|max_position_embeddings|max_window")),
    (
        "numerics",
        re.compile(r"dtype|eps$|epsilon|softcap|multiplier|scal|attn_implementation|float|clip_qkv|precision"),
    ),
    (
        "bookkeeping of the library",
        re.compile(
            r"^_|architectures|version|model_type|use_cache|auto_map|name_or_path|commit|torchscript|pruned|chunk_size|"
            r"is_decoder|is_encoder|cross_attention|tie_encoder|task|tokenizer|tf_legacy|bfloat16|finetuning|pretraining_tp"
        ),
    ),
)
_PREDICTORS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")


def looks_like_hf_config(head: Head) -> bool:
    """A JSON object with a `model_type` or `architectures`, or an adapter's."""
    if not head.text.lstrip().startswith("{"):
        return False
    if not head.whole:
        return '"model_type"' in head.text
    try:
        values = json.loads(head.text)
    except (ValueError, RecursionError):
        return any(mark in head.text for mark in MARKS)
    return isinstance(values, dict) and not {"model_type", "architectures", "peft_type"}.isdisjoint(values)


def read_hf_configs(paths: Sequence[Path]) -> Reading:
    """The model of one config.json, or what one adapter_config.json trains.

    Raises:
        InputError: several files, or one that `read_config` or `adapter_reading` refuses.
    """
    if len(paths) > 1:
        raise InputError(f"a scenario has one model: expected one config.json, found {counted(len(paths), 'file')}")
    values = read_object(paths[0])
    if "peft_type" in values and "model_type" not in values:
        return adapter_reading(values, paths[0])
    config = read_config(paths[0])
    return Reading(
        kind="hf",
        fragment={"model": {"hf_config": str(paths[0])}},
        read=tuple(_read(config)),
        ignored=tuple(_ignored(config)),
        warnings=tuple(_warnings(config)),
    )


def _read(config: HfConfig) -> Iterator[str]:
    counts = module_parameters(config.model)
    yield f"{config.kind}: {sum(counts.values()):,} parameters in {counted(len(counts), 'module')}"
    tokens = _tokens(config.model)
    for module in config.model.modules:
        yield f"{module.name}: {_shape(module)}, {counts[module.name]:,} parameters{tokens.get(module.name, '')}"
    if config.log.defaulted:
        told = [f"{key} = {_short(value)}" for key, value in sorted(config.log.defaulted.items())]
        more = f" and {len(told) - 30} more" if len(told) > 30 else ""
        yield f"not in the file, so as the class of transformers assumes: {', '.join(told[:30])}{more}"


def _short(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(str(item) for item in value[:6]) + (", ...]" if len(value) > 6 else "]")
    return f"'{value}'" if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def _shape(module: ModelModule) -> str:
    if module.projector is not None and module.form is not None:
        return f"steps from width {module.projector.dims[0]} to {module.projector.dims[-1]}"
    if module.projector is not None:
        widths = " -> ".join(str(width) for width in module.projector.dims)
        joined = f", {module.projector.merge} tokens joined" if module.projector.merge > 1 else ""
        pooled = f", {module.projector.pool} tokens averaged" if module.projector.pool > 1 else ""
        return f"projector {widths}{pooled}{joined}"
    assert module.transformer is not None
    shapes = module.transformer.shapes()
    parts = [f"{module.kind.replace('_', ' ')} of {counted(module.transformer.layers, 'block')}"]
    parts.append(f"width {module.transformer.hidden}")
    form = module.form
    if form is not None and form.queries:
        parts.append(f"{form.queries} queries" + (f" for each {form.window} tokens" if form.window else ""))
    attends = form is None or not form.blocks or any(uses(steps, Attend, Usual, Scan) for _, steps in form.blocks)
    for shape in shapes if attends else ():
        here = [index for index in range(module.transformer.layers) if module.transformer.at(index) == shape]
        parts.append((f"in {len(here)} of them " if len(shapes) > 1 else "") + _block(shape, here))
    if form is not None and any(uses(steps, Convolve) for _, steps in form.blocks):
        parts.append("convolutions")
    if form is not None and form.scans:
        parts.append("state space (Mamba 2)")
    if module.vocabulary is not None:
        parts.append(f"vocabulary {module.vocabulary.size}" + (" (tied)" if module.vocabulary.tied else ""))
    return ", ".join(parts)


def _block(shape: Transformer, here: Sequence[int]) -> str:
    if shape.delta is not None:
        heads = f"linear attention with {shape.delta.key_heads} key and {shape.delta.value_heads} value heads"
    elif shape.mla is not None:
        heads = f"{shape.heads} heads of latent attention"
    else:
        groups = f" on {shape.kv_heads}" if shape.kv_heads != shape.heads else ""
        heads = f"{counted(shape.heads, 'head')}{groups} of {shape.head_dim}"
    if shape.window_tokens is not None:
        free = sum(index in shape.global_layers for index in here)
        heads += f" in windows of {shape.window_tokens} tokens" + (f" (all tokens in {free})" if free else "")
    experts = [index for index in here if shape.moe is not None and shape.moe.in_layer(index)]
    mlp = f"MLP {shape.ffn}" if len(experts) < len(here) and shape.ffn > 1 else ""
    if shape.moe is not None and experts:
        count = f"{len(experts)} x " if len(experts) < len(here) else ""
        routed = f"{count}{shape.moe.experts} experts of {shape.moe.expert_ffn}, {shape.moe.topk} of each token"
        mlp = ", ".join(part for part in (mlp, routed) if part)
        mlp += f", shared {shape.moe.shared_ffn}" if shape.moe.shared_ffn else ""
    return f"{heads}, {mlp}" if mlp else heads


def _tokens(model: Model) -> dict[str, str]:
    """Module -> tokens that it hands on of one image and of a second of sound."""
    told: dict[str, str] = {}
    image = sequence_lengths(model, Sample(text_tokens=0, images=((PIXELS, PIXELS),)))
    clip = sequence_lengths(model, Sample(text_tokens=0, audio_s=(SECONDS,)))
    for module in model.modules:
        if module.kind == "language_model":
            continue
        seen = sum(output_lengths(module, image[module.name]))
        heard = sum(output_lengths(module, clip[module.name]))
        if seen:
            of = "an image or tile of its own size" if _is_fixed(model) else f"an image of {PIXELS} x {PIXELS}"
            told[module.name] = f", {counted(seen, 'token')} of {of}"
        elif heard:
            told[module.name] = f", {heard / SECONDS:g} tokens of a second of sound"
    return told


def _is_fixed(model: Model) -> bool:
    return any(module.vision is not None and module.vision.image_size is not None for module in model.modules)


def _ignored(config: HfConfig) -> Iterator[str]:
    yield from config.log.notes
    for key, value in _walk(config.values):
        if key.rpartition(".")[2] in _PREDICTORS and isinstance(value, int) and value > 0:
            yield f"{key} = {value}: layers that predict further tokens are no part of the model of transformers"
    unread = [key for key, _ in _walk(config.values) if key not in config.log.read]
    rest: list[str] = []
    for key in unread:
        word = key.rpartition(".")[2]
        if word not in _PREDICTORS and not any(pattern.search(word) for _, pattern in _GROUPS):
            rest.append(key)
    for what, pattern in _GROUPS:
        count = sum(bool(pattern.search(key.rpartition(".")[2])) for key in unread)
        if count:
            yield f"{what}: {counted(count, 'key')}, on which no size depends"
    if rest:
        yield f"keys that the class does not use for sizes: {listed(sorted(rest), 20)}"


def _walk(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with a value that is no config of its own."""
    for key, value in values.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and (str(key).endswith("_config") and "quant" not in str(key)):
            yield from _walk(value, where)
        elif value is not None and value != {} and value != []:
            yield where, value


def _warnings(config: HfConfig) -> Iterator[str]:
    for key, value in _walk(config.values):
        word = key.rpartition(".")[2]
        if word in ("quantization_config", "compression_config") and isinstance(value, dict):
            method = value.get("quant_method") or value.get("quantization") or "an unnamed method"
            yield f"{key}: the checkpoint is quantised ({shown(method)}); parameters are those of the unquantised model"
        if word == "auto_map":
            yield f"{key}: the checkpoint brings code of its own; the structure read is that of transformers' class"
    said = [*_walk(config.values), *config.log.defaulted.items()]
    if config.log.defaulted.get("tie_word_embeddings") is True and ("text_config.tie_word_embeddings", False) in said:
        yield (
            "tie_word_embeddings: the class ties the head to the token table where the top of the file is silent, the "
            "text config's does not; a checkpoint with a head of its own (Mistral Small 3.1) has more parameters"
        )
    named = config.values.get("architectures")
    models = defaults_of(config.kind).models
    if isinstance(named, list) and named and models and named[0] not in models:
        yield f"architectures: {shown(named[0])} is no class of transformers; read as model_type '{config.kind}'"
