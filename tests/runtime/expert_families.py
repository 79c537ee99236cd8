"""Tiny random models with experts of real classes of transformers, each with one batch."""

from collections.abc import Callable
from typing import Any

import transformers as hf
from ghost_models import TEXT, Case, _text, qwen3_vl_moe


def _batch() -> dict[str, Any]:
    return _text((0, 0), (0, 0), length=24)


def mixtral() -> Case:
    config = hf.MixtralConfig(**TEXT, num_local_experts=4, num_experts_per_tok=2)
    return lambda: hf.MixtralForCausalLM(config), _batch()


def qwen2_moe() -> Case:
    sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
    config = hf.Qwen2MoeConfig(**TEXT, **sizes, num_experts=4, num_experts_per_tok=2)
    return lambda: hf.Qwen2MoeForCausalLM(config), _batch()


def deepseek_v3() -> Case:
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    config = hf.DeepseekV3Config(**(TEXT | groups | latent | experts))
    return lambda: hf.DeepseekV3ForCausalLM(config), _batch()


def llama4() -> Case:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 40}
    config = hf.Llama4TextConfig(**TEXT, **experts, head_dim=8, interleave_moe_layer_step=1)
    return lambda: hf.Llama4ForCausalLM(config), _batch()


EXPERT_FAMILIES: dict[str, Callable[[], Case]] = {
    case.__name__: case for case in (mixtral, qwen2_moe, deepseek_v3, llama4, qwen3_vl_moe)
}
