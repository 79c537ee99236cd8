"""What each software stack keeps in device memory beyond what the technique says: one row of facts per generation.

Nothing here is fitted; every field is a constant or a code path of the named software.
"""

from dataclasses import dataclass
from typing import Literal

from mmplan.cost_models.counts import FP32_BYTES
from mmplan.errors import CostModelError
from mmplan.scenario.scenario import DTYPE_BYTES, Dtype, Optimizer
from mmplan.scenario.technique import Technique

Engine = Literal["plain", "megatron", "deepspeed", "fsdp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRules:
    """Facts of one stack.

    engine: who holds the training state. `plain`, `megatron` and `deepspeed` keep weights in the training type and an
    fp32 master copy in the optimizer; `fsdp` keeps the fp32 weights as the parameters and casts what it gathers.
    fused_activation: SiLU * gate is one kernel that keeps its inputs only.
    fused_wgrad: weight gradients are added to their buffer inside the matrix product, so no temporary is needed.
    bucket_elements: gradients collected before they are reduced (two buckets with overlap); None: hidden^2, what HF
    Trainer writes for "auto". live_elements: parameters that ZeRO-3 may keep gathered.
    logit_bytes: per logit at the peak of a plain loss in 16 bit. torch's cross_entropy holds log-probabilities and two
    fp32 gradients (derivatives.yaml: nll_loss_backward, _log_softmax_backward_data); Megatron works in place on one
    fp32 copy beside the 16-bit logits (core/tensor_parallel/cross_entropy.py); HF models also return the logits.
    gradients_split_from: the ZeRO stage from which gradients take 1/dp of their memory.
    """

    engine: Engine
    fused_activation: bool = False
    fused_wgrad: bool = False
    bucket_elements: int | None = 0
    live_elements: int = 0
    gradients_split_from: int = 2
    logit_bytes: int = 12


# Megatron-LM, training/arguments.py: bias_gelu / bias_swiglu fusion and gradient_accumulation_fusion are on by default.
_MEGATRON = MemoryRules(engine="megatron", fused_activation=True, fused_wgrad=True, logit_bytes=6)
# DeepSpeed: reduce_bucket_size 5e8 and stage3_max_live_parameters 1e9 (docs, config-json, "ZeRO optimizations").
_BUCKET, _LIVE = 500_000_000, 1_000_000_000
# DeepSpeed's own estimate for ZeRO-2 is 4 B * P + 16 B * P / N: 16-bit weights and gradients whole
# (deepspeed/runtime/zero/stage_1_and_2.py, estimate_zero2_model_states_mem_needs).
_SPLIT = 3
_MEGATRON_DEEPSPEED = MemoryRules(
    engine="deepspeed",
    fused_activation=True,
    bucket_elements=_BUCKET,
    live_elements=_LIVE,
    gradients_split_from=_SPLIT,
    logit_bytes=6,
)

RULES: dict[str, MemoryRules] = {
    "mmplan": MemoryRules(engine="plain"),
    "megatron-2019": _MEGATRON,
    "megatron-2021": _MEGATRON,
    "megatron-deepspeed-2022": _MEGATRON_DEEPSPEED,
    "megatron-deepspeed-2024": _MEGATRON_DEEPSPEED,
    "deepspeed-2024": MemoryRules(
        engine="deepspeed",
        bucket_elements=None,
        live_elements=_LIVE,
        gradients_split_from=_SPLIT,
        logit_bytes=14,
    ),
    "llm-foundry-2023": MemoryRules(engine="fsdp"),
    "nemo-2024": _MEGATRON,
    "nemo-2025": _MEGATRON,
    "jax-2025": MemoryRules(engine="fsdp", fused_activation=True),  # XLA fuses point-wise operators
    "torch-2025": MemoryRules(engine="fsdp"),
}


def memory_rules(stack: str) -> MemoryRules:
    """Facts of a stack; CostModelError when nothing is known about its memory."""
    if stack not in RULES:
        raise CostModelError(f"nothing is known about the memory of stack '{stack}'; known: {', '.join(RULES)}")
    return RULES[stack]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterBytes:
    """Bytes per parameter before sharding."""

    weight: int
    gradient: int
    optimizer: int
    frozen: int


def parameter_bytes(precision: Dtype, optimizer: Optimizer, technique: Technique) -> ParameterBytes:
    """Bytes that one trained (or frozen) parameter costs (arXiv 1910.02054, section 3.1: 2 + 2 + 12 with AdamW).

    fsdp: the fp32 parameter is the master copy and gradients have its type (torch FSDP docs, "MixedPrecision").
    deepspeed: fp16 gradients stay fp16 (stage_1_and_2.py); bf16 ones with fp32 accumulation exist in both types at the
    end of a microbatch (bf16_optimizer.py, `update_hp_grads`).
    """
    weight = DTYPE_BYTES[precision]
    gradient = DTYPE_BYTES[technique.gradient_dtype or optimizer.gradient_dtype]
    if memory_rules(technique.stack).engine == "deepspeed" and weight < gradient:
        gradient = weight if precision == "fp16" else gradient + weight
    moments = 2 * FP32_BYTES if optimizer.name == "adamw" else 0
    if memory_rules(technique.stack).engine == "fsdp":
        return ParameterBytes(weight=FP32_BYTES, gradient=FP32_BYTES, optimizer=moments, frozen=weight)
    master = FP32_BYTES if optimizer.name == "adamw" and weight < FP32_BYTES else 0
    return ParameterBytes(weight=weight, gradient=gradient, optimizer=moments + master, frozen=weight)
