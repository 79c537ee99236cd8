"""DeepSpeed's JSON settings (deepspeed.ai/docs/config-json): ZeRO stage, offload, batch, precision, degrees.

Most values are "auto": the trainer fills them in, so that the file beside it says them.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmplan.errors import InputError
from mmplan.scenario.document import listed, read_text, shown
from mmplan.scenario.formats.launch.facts import Fact, SetUp, is_unresolved, truth
from mmplan.scenario.formats.launch.relaxed_json import line_of, relaxed_json
from mmplan.scenario.formats.reading import Head

STAGES = ("none", "optimizer", "gradients", "parameters")
# Top-level keys that DeepSpeed knows and that say nothing of the price of a step.
_KNOWN = {
    "optimizer",
    "scheduler",
    "gradient_clipping",
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "sparse_gradients",
    "amp",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "flops_profiler",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "monitor_config",
    "elasticity",
    "autotuning",
    "curriculum_learning",
    "data_efficiency",
    "progressive_layer_drop",
    "compression_training",
    "aio",
    "checkpoint",
    "data_types",
    "comms_logger",
    "seq_parallel_communication_data_type",
    "memory_breakdown",
    "disable_allgather",
    "use_data_before_expert_parallelism",
    "nebula",
    "hybrid_engine",
    "timers",
    "torch_autocast",
    "compile",
    "dataloader_drop_last",
    "train_steps",
    "eigenvalue",
    "quantize_training",
    "graph_harvesting",
    "load_universal_checkpoint",
    "zero_force_ds_cpu_initialization",
    "sparse_attention",
}
_MARKS = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer"}
_OTHERS = {
    "fp16",
    "bf16",
    "bfloat16",
    "activation_checkpointing",
    "pipeline",
    "tensor_parallel",
    "autotp_size",
    "sequence_parallel_size",
}


def looks_like_deepspeed(head: Head) -> bool:
    """A JSON object with one of DeepSpeed's own top-level keys; templates need not be valid JSON."""
    text = re.sub(r"\A(?:\s*(?://|#(?!!))[^\n]*\n|\s*/\*.*?\*/)*\s*", "", head.text, count=1, flags=re.DOTALL)
    other = '"model_type"' in head.text or '"log_history"' in head.text  # a config, a state of the Hugging Face Trainer
    return text.startswith("{") and any(f'"{mark}"' in head.text for mark in _MARKS) and not other


def read_deepspeed(path: Path) -> SetUp:
    """What the settings say.

    Raises:
        InputError: not JSON, no settings of DeepSpeed or few among others, an impossible ZeRO stage, or batch sizes
            that contradict.
    """
    values, placeholders = relaxed_json(path, "DeepSpeed file")
    if not isinstance(values, dict):
        raise InputError(f"expected a JSON object, found {shown(values)}", file=path)
    if not (_MARKS | _OTHERS) & values.keys():
        known = listed(sorted(_MARKS))
        raise InputError(f"no settings of DeepSpeed: expected keys such as {known}", file=path)
    text = read_text(path, "DeepSpeed file")
    facts: dict[str, Fact] = {}
    warnings: list[str] = []
    auto: list[str] = []

    def take(name: str, key: str, value: Any) -> None:
        """A fact, unless the value is open."""
        if value is None:
            return
        if isinstance(value, list | dict):
            at = line_of(text, key.rsplit(".", 1)[-1])
            raise InputError(f"expected one value, found {shown(value)}", file=path, line=at, key=key)
        if isinstance(value, str) and value.strip().lower() == "auto":
            auto.append(key)
        elif not is_unresolved(value) and isinstance(value, bool | int | float | str):
            facts[name] = Fact(value=value, file=path, line=line_of(text, key.rsplit(".", 1)[-1]), key=key)

    _take_settings(values, take, warnings, path)
    if "cp" in facts:
        take("context_parallel", "sequence_parallel_size", "all-to-all")
    _check_batch(facts)
    unknown = sorted(
        key
        for key in values
        if key not in _KNOWN | _MARKS | _OTHERS | {"gradient_accumulation_steps"} and not key.startswith("_")
    )
    if 2 * len(unknown) > len(values):
        found = f"{len(unknown)} of {len(values)} keys are none of DeepSpeed ({listed(unknown, 3)})"
        raise InputError(f"no settings of DeepSpeed: {found}", file=path)
    if unknown:
        warnings.append(f"keys that DeepSpeed does not know: {listed(unknown)}")
    if placeholders:
        warnings.append(f"a template: another script fills in {listed(placeholders, 20)}; these are not read")
    told = _ignored(values)
    told += [f"left to the trainer (auto): {listed(auto, 40)}"] if auto else []
    return SetUp(
        kind="deepspeed",
        files=(path,),
        facts=facts,
        read=_read(facts),
        ignored=tuple(told),
        warnings=tuple(warnings),
    )


def _read(facts: Mapping[str, Fact]) -> tuple[str, ...]:
    stage, kept = facts.get("sharding"), facts.get("offload")
    read = [f"ZeRO stage {STAGES.index(str(stage.value))} ({stage.value} sharded), from {stage.place}"] if stage else []
    return (*read, *([f"{kept.value} in host memory, from {kept.place}"] if kept else []))


def _ignored(values: Mapping[str, Any]) -> list[str]:
    ignored = [key for key in values if key in _KNOWN or key.startswith("_")]
    return [f"keys that say nothing of sizes, degrees or precision: {listed(ignored, 40)}"] if ignored else []


def _take_settings(values: Mapping[str, Any], take: Any, warnings: list[str], path: Path) -> None:
    """Batch, sharding, precision, degrees and recomputation, as far as they are said."""
    take("microbatch", "train_micro_batch_size_per_gpu", values.get("train_micro_batch_size_per_gpu"))
    take("global_batch", "train_batch_size", values.get("train_batch_size"))
    take("accumulation", "gradient_accumulation_steps", values.get("gradient_accumulation_steps"))
    _zero(_mapping(values, "zero_optimization", path), take, warnings, path)
    on = {key for key in ("bf16", "bfloat16", "fp16") if truth(_mapping(values, key, path).get("enabled") or False)}
    if "fp16" in on and len(on) > 1:  # deepspeed/runtime/engine.py refuses to start
        raise InputError("fp16 and bf16 are both enabled, DeepSpeed takes one of them", file=path, key="fp16.enabled")
    for key, word in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        enabled = _mapping(values, key, path).get("enabled")
        open_ = isinstance(enabled, str) and enabled.lower() == "auto"
        if open_ or (enabled is not None and truth(enabled)):
            take("precision", f"{key}.enabled", enabled if open_ else word)
    kept = values.get("communication_data_type") or _mapping(values, "data_types", path).get("grad_accum_dtype")
    if kept in ("fp32", "bf16", "fp16"):
        take("gradient_dtype", "data_types.grad_accum_dtype", kept)
    tensor = _mapping(values, "tensor_parallel", path)
    take(
        "tp", "tensor_parallel.autotp_size", tensor.get("autotp_size", tensor.get("tp_size", values.get("autotp_size")))
    )
    take("cp", "sequence_parallel_size", values.get("sequence_parallel_size"))
    stages = _mapping(values, "pipeline", path).get("stages")
    take("pp", "pipeline.stages", stages)
    _checkpointing(_mapping(values, "activation_checkpointing", path), take, warnings)
    take("stack", "zero_optimization", "deepspeed-2024")


def _mapping(values: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    found = values.get(key)
    if found is None or isinstance(found, str | bool):  # "auto", a placeholder, the old `"zero_optimization": true`
        return {"stage": 1} if found is True and key == "zero_optimization" else {}
    if not isinstance(found, dict):
        raise InputError(f"expected a mapping, found {shown(found)}", file=path, key=key)
    return found


def _zero(zero: Mapping[str, Any], take: Any, warnings: list[str], path: Path) -> None:
    stage = zero.get("stage", 0)
    if isinstance(stage, str) and stage in ("0", "1", "2", "3"):
        stage = int(stage)
    if isinstance(stage, str):
        take("sharding", "zero_optimization.stage", stage if stage.lower() == "auto" else f"${{{stage}}}")
        stage = 0
    elif isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        message = f"expected a ZeRO stage from 0 to 3, found {shown(stage)}"
        raise InputError(message, file=path, key="zero_optimization.stage")
    else:
        take("sharding", "zero_optimization.stage", STAGES[int(stage)])
    device = {key: _device(zero.get(key)) for key in ("offload_optimizer", "offload_param")}
    if zero.get("cpu_offload") is True:
        device["offload_optimizer"] = "cpu"
    for key, place in device.items():
        if place == "nvme":
            warnings.append(f"zero_optimization.{key}: states on NVMe are priced as in host memory")
    if device["offload_param"] in ("cpu", "nvme"):
        take("offload", "zero_optimization.offload_param", "parameters")
    elif device["offload_optimizer"] in ("cpu", "nvme"):
        take("offload", "zero_optimization.offload_optimizer", "optimizer")
    take("overlap_dp", "zero_optimization.overlap_comm", zero.get("overlap_comm"))
    for key in ("zero_hpz_partition_size", "mics_shard_size"):
        size = zero.get(key)
        if isinstance(size, int) and not isinstance(size, bool) and size > 1:
            warnings.append(f"zero_optimization.{key} = {size}: shards inside groups are priced as over all replicas")
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        if zero.get(key) is True:
            warnings.append(f"zero_optimization.{key}: communication of fewer bits is not priced")


def _device(value: Any) -> str:
    return str(value.get("device", "none")).lower() if isinstance(value, dict) else "none"


def _checkpointing(values: Mapping[str, Any], take: Any, warnings: list[str]) -> None:
    if values.get("number_checkpoints") or values.get("partition_activations") is True:
        take("recompute", "activation_checkpointing", "full")
    if values.get("cpu_checkpointing") is True:
        warnings.append("activation_checkpointing.cpu_checkpointing: priced by `technique.offload: activations` alone")


def _check_batch(facts: dict[str, Fact]) -> None:
    """train_batch_size = micro x accumulation x replicas: what the file itself says of it must divide."""
    numbers = {name: facts[name].value for name in ("global_batch", "microbatch", "accumulation") if name in facts}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise facts[name].error(f"expected a whole number from 1 on, found {shown(value)}")
    whole = {name: int(value) for name, value in numbers.items()}
    if "global_batch" in whole:
        micro, steps, batch = whole.get("microbatch", 1), whole.get("accumulation", 1), whole["global_batch"]
        inner = micro * steps
        if batch % inner:
            message = f"train_batch_size {batch} / (micro {micro} x accumulation {steps}) = {batch / inner:g} replicas"
            raise facts["global_batch"].error(f"{message}: no whole number")
        if {"microbatch", "accumulation"} <= whole.keys():
            facts["replicas"] = replace(facts["global_batch"], value=batch // inner)
