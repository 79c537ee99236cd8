"""How frameworks call what Megatron's and the Trainer's arguments say, key by key."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

Translation = Callable[[Any], list[tuple[str, str | None]]]

REFUSED_RECIPES = (
    (r"eagle|vispec|medusa|dflash|speculative|draft", "trains a draft model for speculative decoding"),
    (r"biencoder|crossencoder|retrieval|rerank", "trains encoders for retrieval"),
    (r"diffusion|wan|flux", "trains a diffusion model"),
    (r"knowledgedistill|\bkd\b", "distils one model into another"),
)

RENAMED: Mapping[str, Mapping[str, str]] = {
    "nemo": {
        "trainer.devices": "nproc_per_node",
        "trainer.num_nodes": "nnodes",
        "model.qkv_bias": "add_qkv_bias",
        "model.use_flash_attention": "use_flash_attn",
        "model.activations_checkpoint_granularity": "recompute_granularity",
        "model.activations_checkpoint_method": "recompute_method",
        "model.activations_checkpoint_num_layers": "recompute_num_layers",
        "model.tokenizer.type": "tokenizer_type",
        "model.tokenizer.model": "tokenizer_model",
        "model.mm_cfg.llm.model_type": "language_model_type",
        "model.mm_cfg.llm.freeze": "freeze_lm",
        "model.mm_cfg.vision_encoder.freeze": "freeze_vit",
        "model.mm_cfg.vision_encoder.patch_dim": "patch_dim",
        "model.data.seq_length": "seq_length",
        "dataset.sequence_length": "seq_length",
        "model.peft.lora_tuning.adapter_dim": "lora_rank",
        "model.peft.lora_tuning.target_modules": "target_modules",
        "model.megatron_amp_O2": "megatron_amp_o2",
        "train.micro_batch_size": "micro_batch_size",
        "train.global_batch_size": "global_batch_size",
    },
    "automodel": {
        "model.pretrained_model_name_or_path": "model",
        "model.config.pretrained_model_name_or_path": "model",
        "step_scheduler.global_batch_size": "global_batch_size",
        "step_scheduler.local_batch_size": "micro_batch_size",
        "step_scheduler.grad_acc_steps": "gradient_accumulation_steps",
        "distributed.tp_size": "tensor_model_parallel_size",
        "distributed.cp_size": "context_parallel_size",
        "distributed.pp_size": "pipeline_model_parallel_size",
        "distributed.ep_size": "expert_model_parallel_size",
        "distributed.dp_size": "dp",
        "distributed.sequence_parallel": "sequence_parallel",
        "distributed.activation_checkpointing": "gradient_checkpointing",
        "distributed_config.activation_checkpointing": "gradient_checkpointing",
        "packed_sequence.packed_sequence_size": "seq_length",
        "dataset.seq_length": "seq_length",
        "dataset.max_length": "max_length",
        "model.torch_dtype": "torch_dtype",
        "model.attn_implementation": "attn_implementation",
        "peft.dim": "lora_rank",
        "peft.target_modules": "target_modules",
        "freeze_config.freeze_vision_tower": "freeze_vision_tower",
        "freeze_config.freeze_language_model": "freeze_language_model",
    },
    "veomni": {
        "model.model_path": "model",
        "model.attn_implementation": "attn_implementation",
        "model.ops_implementation.attn_implementation": "attn_implementation",
        "data.max_seq_len": "max_seq_len",
        "train.accelerator.ulysses_size": "ulysses_size",
        "train.ulysses_parallel_size": "ulysses_size",
        "train.accelerator.tp_size": "tensor_parallel_size",
        "train.tensor_parallel_size": "tensor_parallel_size",
        "train.accelerator.ep_size": "expert_parallel_size",
        "train.accelerator.pp_size": "pipeline_parallel_size",
        "train.accelerator.cp_size": "context_parallel_size",
        "train.enable_gradient_checkpointing": "gradient_checkpointing",
        "train.gradient_checkpointing.enable": "gradient_checkpointing",
    },
    "axolotl": {
        "base_model": "model",
        "sequence_len": "max_length",
        "adapter": "tuner_type",
        "lora_target_modules": "target_modules",
        "sequence_parallel_degree": "context_parallel_size",
    },
    "accelerate": {
        "num_machines": "num_machines",
        "num_processes": "num_processes",
        "fsdp_config.fsdp_activation_checkpointing": "gradient_checkpointing",
        "deepspeed_config.zero_stage": "zero_stage",
        "deepspeed_config.gradient_accumulation_steps": "gradient_accumulation_steps",
        "megatron_lm_config.megatron_lm_tp_degree": "tensor_model_parallel_size",
        "megatron_lm_config.megatron_lm_pp_degree": "pipeline_model_parallel_size",
        "parallelism_config.parallelism_config_tp_size": "tensor_model_parallel_size",
        "parallelism_config.parallelism_config_cp_size": "context_parallel_size",
        "parallelism_config.parallelism_config_dp_shard_size": "dp_shard_size",
        "parallelism_config.parallelism_config_dp_replicate_size": "dp_replicate_size",
    },
}


def _precision(value: Any) -> list[tuple[str, str | None]]:
    word = str(value).lower()
    return (
        [("bf16", "true")]
        if "bf16" in word or "bfloat" in word
        else [("fp16", "true")]
        if word.startswith(("16", "fp16"))
        else []
    )


def _activation(value: Any) -> list[tuple[str, str | None]]:
    return [("swiglu", "true")] if re.search("swiglu|geglu|reglu", str(value)) else []


def _negated(argument: str) -> Translation:
    return lambda value: [(argument, str(not value))] if isinstance(value, bool) else []


def _grouped(value: Any) -> list[tuple[str, str | None]]:
    return [("num_query_groups", str(value)), ("group_query_attention", "true")]


def _tower(value: Any) -> list[tuple[str, str | None]]:
    word = str(value).lower()
    kinds = {
        "clip": "clip",
        "siglip": "siglip",
        "internvit-300m": "internvit300m",
        "internvit": "internvit",
        "radio": "radio",
    }
    kind = next((kind for mark, kind in kinds.items() if mark in word), word.rsplit("/", 1)[-1])
    return [("vision_model_type", kind), ("disable_vision_class_token", "true")]  # NeVA hands on patches alone


def _crop(value: Any) -> list[tuple[str, str | None]]:
    side = value[0] if isinstance(value, list) and value else value
    return [("img_h", str(side))] if not isinstance(side, dict | list) else []


def _pixels(value: Any) -> list[tuple[str, str | None]]:
    """The side of a square of so many pixels."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 1e10:
        return []
    return [("image_size", str(max(1, round(math.sqrt(value)))))]


def _adapter(value: Any) -> list[tuple[str, str | None]]:
    return [("pixel_shuffle", "true")] if "downsample" in str(value) else []


def _scheme(value: Any) -> list[tuple[str, str | None]]:
    return [("tuner_type", "lora")] if "lora" in str(value).lower() else []


def _optimizer(value: Any) -> list[tuple[str, str | None]]:
    return [("use_distributed_optimizer", "true" if "distributed" in str(value) else "false")]


def _configured(value: Any) -> list[tuple[str, str | None]]:
    """`nemo.collections.llm.Llama3Config8B` -> llama3-8b."""
    found = re.search(r"([A-Z][A-Za-z]*\d*)(?:Config|Model)(\d+)(?:p(\d+))?([bB])", str(value))
    size = f"{found[2]}{'.' + found[3] if found and found[3] else ''}b" if found else ""
    return [("model", f"{found[1].lower()}-{size}")] if found else []


def _sharded(value: Any) -> list[tuple[str, str | None]]:
    word = str(value).lower()
    if "fsdp" in word:
        return [("use_torch_fsdp2", "true")]
    return [("zero_stage", "0")] if "ddp" in word else []


def _strategy(value: Any) -> list[tuple[str, str | None]]:
    stages = {
        "full_shard": "3",
        "1": "3",
        "hybrid_shard": "3",
        "4": "3",
        "hybrid_shard_zero2": "2",
        "5": "2",
        "shard_grad_op": "2",
        "2": "2",
        "no_shard": "0",
        "3": "0",
    }
    stage = stages.get(str(value).lower())
    hybrid = (
        [("hybrid_shard", "true")] if str(value).lower() in ("hybrid_shard", "4", "hybrid_shard_zero2", "5") else []
    )
    return [("zero_stage", stage), *hybrid] if stage else []


def _offload(value: Any) -> list[tuple[str, str | None]]:
    return [("optimizer_cpu_offload", "true")] if value in (True, "cpu", "nvme") else []


def _offload_all(value: Any) -> list[tuple[str, str | None]]:
    """FSDP's offload: weights, gradients and optimizer state."""
    return [("fsdp_offload_params", "true")] if value is True or value in ("cpu", "nvme", "true", "True") else []


def _reshard(value: Any) -> list[tuple[str, str | None]]:
    """FSDP2 says whether weights are freed behind a forward, FSDP1 its strategy under the same key."""
    stage = {"true": "3", "false": "2"}.get(str(value).lower())
    return [("zero_stage", stage)] if stage else _strategy(value)


def _fsdp(value: Any) -> list[tuple[str, str | None]]:
    return [("use_torch_fsdp2", "true")]


def _lora(value: Any) -> list[tuple[str, str | None]]:
    return [("tuner_type", "lora")] if "lora" in str(value).lower() or "peft" in str(value).lower() else []


def _nothing(value: Any) -> list[tuple[str, str | None]]:
    return []


def _of_fsdp(translate: Translation) -> Translation:
    """A key that stands only where FSDP is used."""
    return lambda value: [*_fsdp(value), *translate(value)]


_OF_AXOLOTL: tuple[tuple[str, Translation], ...] = (
    (r"fsdp_config\.(fsdp_)?reshard_after_forward", _of_fsdp(_reshard)),
    (r"fsdp_config\.(fsdp_)?sharding_strategy", _of_fsdp(_strategy)),
    (r"fsdp_config\.(fsdp_)?offload_params", _of_fsdp(_offload_all)),
    (r"fsdp_config\.(fsdp_)?activation_checkpointing", lambda value: [("gradient_checkpointing", str(value))]),
    (r"fsdp_version|fsdp_config\..*", _fsdp),
)
_IMAGES = ((r"(.*\.)?(image_max_pixels|max_pixels|image_resolution)", _pixels),)
TRANSLATED: Mapping[str, tuple[tuple[str, Translation], ...]] = {
    "nemo": (
        (r"trainer\.precision|model\.precision|trainer\.plugins\.precision|mixed_precision", _precision),
        (r"model\.activation", _activation),
        (r"model\.bias", _negated("disable_bias_linear")),
        (r"model\.share_embeddings_and_output_weights", _negated("untie_embeddings_and_output_weights")),
        (r"model\.(config\.)?num_query_groups", _grouped),
        (r"model\.mm_cfg\.vision_encoder\.from_pretrained", _tower),
        (r"model\.mm_cfg\.vision_encoder\.crop_size", _crop),
        (r"model\.mm_cfg\.mm_mlp_adapter_type", _adapter),
        (r"model\.peft\.peft_scheme", _scheme),
        (r"model\.optim\.name", _optimizer),
        (r"model\.config\._target_|model\._target_", _configured),
        (r"model\.(data|name|optim)", _nothing),
    ),
    "automodel": (
        (r"distributed\.(strategy|_target_)", _sharded),
        (r"peft\._target_", _lora),
        (r"model\._target_|tokenizer\..*", _nothing),
    ),
    "veomni": (
        (r"train\.(data_parallel_mode|accelerator\.fsdp_config\.fsdp_mode)", _sharded),
        (r"train\.(enable_full_shard|accelerator\.fsdp_config\.full_shard)", _reshard),
        (r"train\.(enable_fsdp_offload|accelerator\.fsdp_config\.offload)", _offload_all),
        (r"train\.(optimizer|checkpoint|wandb|profile)(\..*)?", _nothing),
        *((pattern, translate) for pattern, translate in _IMAGES),
    ),
    "axolotl": _OF_AXOLOTL,
    "llama-factory": _IMAGES,
    "ms-swift": _IMAGES,
    "accelerate": (
        (r"mixed_precision", _precision),
        (r"fsdp_config\.fsdp_sharding_strategy", _strategy),
        (r"fsdp_config\.fsdp_reshard_after_forward", _reshard),
        (r"fsdp_config\.fsdp_offload_params|deepspeed_config\.offload_param_device", _offload_all),
        (r"deepspeed_config\.offload_optimizer_device", _offload),
        (r"fsdp_config\.fsdp_version", _fsdp),
        (r"distributed_type", _sharded),
        (r"deepspeed_config\.deepspeed_config_file", lambda value: [("deepspeed", str(value))]),
    ),
}
