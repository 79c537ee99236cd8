"""torchtitan's TOML configuration, with the keys of its releases from 2024 on (torchtitan/config/job_config.py)."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmplan.errors import InputError
from mmplan.scenario.document import listed, read_text, shown
from mmplan.scenario.formats.launch.comments import hinted_devices
from mmplan.scenario.formats.launch.facts import Fact, SetUp, truth, whole
from mmplan.scenario.formats.launch.shell_text import Word
from mmplan.scenario.formats.reading import Head

MAX_TOML_BYTES = 100_000

# Fact -> keys, newest first.
_VALUES: Mapping[str, tuple[str, ...]] = {
    "tp": ("parallelism.tensor_parallel_degree", "training.tensor_parallel_degree"),
    "pp": ("parallelism.pipeline_parallel_degree", "training.pipeline_parallel_degree"),
    "cp": ("parallelism.context_parallel_degree",),
    "ep": ("parallelism.expert_parallel_degree",),
    "etp": ("parallelism.expert_tensor_parallel_degree",),
    "local_batch": ("training.local_batch_size", "training.batch_size"),
    "global_batch": ("training.global_batch_size",),
    "sequence": ("training.seq_len",),
}
# Sections whose keys matter: what stands there and is not known is told.
_KNOWN_KEYS: Mapping[str, set[str]] = {
    "model": {
        "name",
        "flavor",
        "hf_assets_path",
        "tokenizer_path",
        "tokenizer_name",
        "converters",
        "norm_type",
        "print_after_conversion",
    },
    "optimizer": {
        "name",
        "lr",
        "eps",
        "beta1",
        "beta2",
        "weight_decay",
        "implementation",
        "fused",
        "early_step_in_backward",
        "moe_router_lr",
        "mup",
    },
    "training": {
        "batch_size",
        "local_batch_size",
        "global_batch_size",
        "seq_len",
        "max_norm",
        "steps",
        "dataset",
        "dataset_path",
        "warmup_steps",
        "compile",
        "dtype",
        "mixed_precision_param",
        "mixed_precision_reduce",
        "enable_cpu_offload",
        "gc_freq",
        "gc_debug",
        "seed",
        "deterministic",
        "data_parallel_degree",
        "data_parallel_type",
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "enable_loss_parallel",
        "fp8_linear",
        "max_patches_per_image",
        "max_images_per_batch",
        "packing_buffer_size",
        "debug_moe_force_load_balance",
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "enable_fp8_linear",
        "dataset_name",
        "classifier_free_guidance_prob",
        "img_size",
    },
    "parallelism": {
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "fsdp_reshard_after_forward",
        "tensor_parallel_degree",
        "enable_async_tensor_parallel",
        "disable_loss_parallel",
        "pipeline_parallel_degree",
        "pipeline_parallel_split_points",
        "module_fqns_per_model_part",
        "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers",
        "pipeline_parallel_layers_per_stage",
        "pipeline_parallel_schedule",
        "pipeline_parallel_schedule_csv",
        "pipeline_parallel_microbatch_size",
        "pipeline_parallel_microbatches",
        "context_parallel_degree",
        "context_parallel_rotate_method",
        "context_parallel_load_balancer",
        "expert_parallel_degree",
        "expert_tensor_parallel_degree",
        "expert_parallel_comm_backend",
        "enable_compiled_autograd",
        "pipeline_parallel_expert_parallel_overlap",
        "fsdp_reshard_after_forward_policy",
        "enable_sequence_parallel",
        "spmd_backend",
    },
    "activation_checkpoint": {
        "mode",
        "selective_ac_option",
        "per_op_sac_force_recompute_mm_shapes_by_fqns",
        "early_stop",
        "memory_budget",
        "visualize_memory_budget_pareto",
        "preserve_rng_state",
        "determinism_check",
        "debug",
    },
}
_SECTIONS = {
    *_KNOWN_KEYS,
    "job",
    "profiling",
    "metrics",
    "lr_scheduler",
    "checkpoint",
    "compile",
    "float8",
    "mx",
    "comm",
    "debug",
    "memory_estimation",
    "fault_tolerance",
    "experimental",
    "validation",
    "quantize",
    "encoder",
    "training_dataset",
    "inference",
    "deepep",
    "graph_trainer",
    "dataloader",
    "tokenizer",
    "loss",
}
_LOOPED = {"interleaved1f1b": 2, "loopedbfs": 2, "interleavedzerobubble": 2, "zbvzerobubble": 2, "dualpipev": 2}


def looks_like_torchtitan(head: Head) -> bool:
    """Tables in brackets, one of them [parallelism], or [training] beside [model] or [job]."""
    tables = set(re.findall(r"(?m)^\s*\[([A-Za-z_.]+)\]\s*(?:#.*)?$", head.text))
    return "parallelism" in tables or (
        "training" in tables and bool(tables & {"model", "job", "activation_checkpoint"})
    )


def read_torchtitan(path: Path) -> SetUp:
    """What the configuration says.

    Raises:
        InputError: not TOML, or a value that is none of its kind.
    """
    text = read_text(path, "torchtitan configuration", MAX_TOML_BYTES)
    if path.suffix == ".py":  # since 0.3
        raise InputError("torchtitan's Python configurations are not executed: give the log of the run", file=path)
    values = _toml(text, path)
    lines = _lines(text)
    flat = {
        f"{section}.{key}": value
        for section, keys in values.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
    }
    older = {key: f"parallelism.{key.removeprefix('experimental.')}" for key in flat if key.startswith("experimental.")}
    older = {old: new for old, new in older.items() if new.partition(".")[2] in _KNOWN_KEYS["parallelism"]}
    flat |= {new: flat[old] for old, new in older.items() if new not in flat}  # until 2025
    warnings: list[str] = []

    def fact(key: str, value: Any) -> Fact:
        written = next((old for old, new in older.items() if new == key and key not in lines), key)
        return Fact(value=value, file=path, line=lines.get(written), key=written)

    facts: dict[str, Fact] = {}
    for name, keys in _VALUES.items():
        found = next((key for key in keys if key in flat), None)
        if found is not None and flat[found] != -1:
            value = flat[found]
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise fact(found, "").error(f"expected a number, found {shown(value)}")
            facts[name] = fact(found, value)
    if "training" in values:  # torchtitan/config/job_config.py: local_batch_size = 8, seq_len = 2048
        facts.setdefault("local_batch", fact("training.local_batch_size", 8))
        facts.setdefault("sequence", fact("training.seq_len", 2048))
    model, flavor = flat.get("model.name"), flat.get("model.flavor")
    if isinstance(model, str):
        facts["model_name"] = fact("model.flavor", f"{model}-{flavor}" if isinstance(flavor, str) else model)
    facts["stack"] = Fact(value="torch-2025", file=path, key="torchtitan")
    _replicas(flat, facts, fact, warnings)
    _batch(flat, facts, fact, warnings)
    _technique(flat, facts, fact, warnings)
    comments = [
        Word(line.strip(), number) for number, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("#")
    ]
    facts |= hinted_devices(comments, path)
    unknown = sorted(
        key
        for key in flat
        if (known := _KNOWN_KEYS.get(key.partition(".")[0])) is not None and key.partition(".")[2] not in known
    )
    sections = sorted(section for section in values if section not in _SECTIONS)
    if unknown:
        warnings.append(f"keys that torchtitan does not know and that are not read: {listed(unknown, 20)}")
    if sections:
        warnings.append(f"tables that torchtitan does not know and that are not read: {listed(sections, 20)}")
    if not facts.keys() & {"tp", "pp", "microbatch", "sequence", "model_name"}:
        raise InputError("no degrees, batch or model: not a configuration of torchtitan", file=path)
    rest = sorted({key.partition(".")[0] for key in flat if key not in older} - set(_KNOWN_KEYS) & _SECTIONS)
    ignored = (f"tables that say nothing of sizes, degrees or precision: {listed(rest, 30)}",) if rest else ()
    return SetUp(kind="torchtitan", files=(path,), facts=facts, ignored=ignored, warnings=tuple(warnings))


def _toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+)", str(error))
        message = re.sub(r"\s*\(at .*\)$", "", str(error))
        raise InputError(f"not valid TOML: {message}", file=path, line=int(found[1]) if found else None) from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"not valid TOML: {error or 'nested too deep'}", file=path) from error


def _lines(text: str) -> dict[str, int]:
    """`section.key` -> line."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([\w.\-]+)\]", line):
            section = header[1]
        elif key := re.match(r"\s*([\w\-]+)\s*=", line):
            lines.setdefault(f"{section}.{key[1]}", number)
    return lines


def _whole(flat: Mapping[str, Any], key: str, fact: Any, *, least: int = 1) -> int | None:
    value = flat.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not (least <= value <= 1_000_000):
        raise fact(key, "").error(f"expected a whole number from {least} to 1,000,000, found {shown(value)}")
    return value


def _replicas(flat: Mapping[str, Any], facts: dict[str, Fact], fact: Any, warnings: list[str]) -> None:
    """dp = replicate x shard, -1 the rest; FSDP2 gathers again in backward unless a pipeline runs."""
    shard_key = next(
        (
            key
            for key in (
                "parallelism.data_parallel_shard_degree",
                "training.data_parallel_shard_degree",
                "training.data_parallel_degree",
            )
            if key in flat
        ),
        None,
    )
    copies_key = next(
        (
            key
            for key in ("parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree")
            if key in flat
        ),
        None,
    )
    shard = _whole(flat, shard_key, fact, least=-1) if shard_key else None
    copies = _whole(flat, copies_key, fact, least=-1) if copies_key else 1
    if shard is not None and shard_key is not None and shard > 0 and copies is not None and copies > 0:
        facts["dp"] = fact(shard_key, shard * copies)
    if copies is not None and copies_key is not None and copies > 1 and shard in (None, -1):
        facts["dp_multiple"] = fact(copies_key, copies)  # the rest is a multiple of it
    if copies is not None and copies > 1 and shard != 1:
        warnings.append(f"{copies_key} = {copies}: shards inside groups are priced as over all replicas")
    again = flat.get("parallelism.fsdp_reshard_after_forward", "default")
    pp = facts["pp"].value if "pp" in facts else 1
    kept = again == "never" or (again == "default" and isinstance(pp, int) and pp > 1)
    ddp = shard == 1 or flat.get("training.data_parallel_type") == "ddp"
    key = shard_key or "parallelism.fsdp_reshard_after_forward"
    facts["sharding"] = fact(key, "none" if ddp else "gradients" if kept else "parameters")
    if flat.get("training.enable_cpu_offload") is True:
        facts["offload"] = fact("training.enable_cpu_offload", "parameters")


def _batch(flat: Mapping[str, Any], facts: dict[str, Fact], fact: Any, warnings: list[str]) -> None:
    """Without a pipeline a rank runs its whole local batch at once; with one, in microbatches."""
    local = facts.pop("local_batch", None)
    if local is None:
        return
    size = _whole(flat, local.key, fact) or 1
    pp = facts["pp"].value if "pp" in facts else 1
    count = _whole(flat, "parallelism.pipeline_parallel_microbatches", fact)
    micro = _whole(flat, "parallelism.pipeline_parallel_microbatch_size", fact) or 1
    if isinstance(pp, int) and pp > 1:
        micro = size // count if count and size % count == 0 else micro
        if size % micro:
            raise local.error(f"{size} samples / {micro} of a microbatch = {size / micro:g}: no whole number")
        facts["microbatch"] = fact(local.key, micro)
        facts["flush"] = fact(local.key, size // micro)
        if "global_batch" not in facts:
            facts["accumulation"] = fact(local.key, size // micro)
    else:
        facts["microbatch"] = local


def _technique(flat: Mapping[str, Any], facts: dict[str, Fact], fact: Any, warnings: list[str]) -> None:
    key = "training.mixed_precision_param"
    words = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    facts["precision"] = fact(key, words.get(str(flat.get(key, "bfloat16")), "bf16"))
    reduced = str(flat.get("training.mixed_precision_reduce", "float32"))
    facts["gradient_dtype"] = fact("training.mixed_precision_reduce", words.get(reduced, "fp32"))
    if str(flat.get("training.dtype", "float32")) == "bfloat16":
        warnings.append(
            "training.dtype = bfloat16: weights and moments in bf16 are priced as in fp32: memory is less than priced"
        )
    mode = str(flat.get("activation_checkpoint.mode", "selective")).lower()  # the default of job_config.py
    if mode in ("none", "selective", "full"):
        facts["recompute"] = fact("activation_checkpoint.mode", mode)
        option = str(flat.get("activation_checkpoint.selective_ac_option", "op"))
        if mode == "selective" and (every := whole(option)) is not None:
            if every <= 1:
                facts["recompute"] = fact("activation_checkpoint.selective_ac_option", "full")
            else:
                warnings.append(
                    f"activation_checkpoint.selective_ac_option = {option}: one layer in {option} recomputes all; "
                    "priced as selective recomputation of all"
                )
    elif mode:
        warnings.append(f"activation_checkpoint.mode = {mode} is not read")
    converters = flat.get("model.converters") or []
    converted = " ".join(map(str, converters)) if isinstance(converters, list) else str(converters)
    if "mx" in converted:
        facts["fp8"] = fact("model.converters", "mx")
    elif "float8" in converted or flat.get("training.fp8_linear"):
        facts["fp8"] = fact("model.converters", "tensor")
    schedule = str(flat.get("parallelism.pipeline_parallel_schedule", "")).lower().replace("_", "")
    pp = facts["pp"].value if "pp" in facts else 1
    if isinstance(pp, int) and pp > 1 and schedule in _LOOPED:
        layers = _whole(flat, "parallelism.pipeline_parallel_layers_per_stage", fact)
        facts["layers_per_chunk" if layers else "vp"] = fact(
            "parallelism.pipeline_parallel_schedule", layers or _LOOPED[schedule]
        )
        if schedule != "interleaved1f1b":
            warnings.append(f"pipeline_parallel_schedule {schedule} is priced as interleaved 1F1B")
    for key, why in (
        ("optimizer.early_step_in_backward", "steps inside backward free gradients early, which is not priced"),
        ("parallelism.enable_async_tensor_parallel", "overlap of tensor-parallel communication is that of the stack"),
        ("parallelism.pipeline_parallel_first_stage_less_layers", "stages are priced as cut as is best, not so"),
        ("parallelism.pipeline_parallel_split_points", "stages are priced as cut as is best, not so"),
    ):
        if flat.get(key) not in (None, False, [], 0):
            warnings.append(f"{key}: {why}")
    if "tp" in facts:
        facts["sequence_parallel"] = fact(
            facts["tp"].key, truth(flat.get("parallelism.enable_sequence_parallel", True)) is not False
        )
    name = str(flat.get("optimizer.name", "AdamW")).lower()
    if "adam" not in name:
        warnings.append(f"optimizer.name = {name} is priced as AdamW, with two moments per weight")
