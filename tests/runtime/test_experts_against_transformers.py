"""Blocks with experts, latent attention and sliding windows against Hugging Face's of the same shape and weights."""

from dataclasses import replace

import pytest
import torch
from expert_models import SHAPES, text_only
from layer_zoo import graph_of, microbatch_of, scenario_of
from torch import Tensor, nn

from mmplan.runtime.layers import build_layer
from mmplan.scenario.scenario import Sample, Transformer

transformers = pytest.importorskip("transformers")
LENGTHS = (9, 4)


def _copy_linears(module: nn.Module, oracle: nn.Module, names: dict[str, str]) -> None:
    for ours, theirs in names.items():
        target, source = module.get_submodule(f"parts.{ours}"), oracle.get_submodule(theirs)
        target.get_parameter("weight").data.copy_(source.get_parameter("weight"))


def _copy_experts(module: nn.Module, experts: nn.Module) -> None:
    gate, up = experts.get_parameter("gate_up_proj").chunk(2, dim=1)
    for name, weight in (("gate", gate), ("up", up), ("down", experts.get_parameter("down_proj"))):
        module.get_parameter(f"parts.experts_{name}.weight").data.copy_(weight)


def _random(oracle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in oracle.parameters():
        nn.init.normal_(parameter, std=0.3)
    return oracle.eval()


def _compare(shape: Transformer, oracle: nn.Module, rotary: nn.Module, module: nn.Module) -> None:
    scenario = scenario_of(text_only(shape))
    batch = microbatch_of(scenario, tuple(Sample(text_tokens=length) for length in LENGTHS))
    x = torch.randn(sum(LENGTHS), shape.hidden)
    packed: Tensor = module({graph_of(scenario.model).layer("llm.1").sources[0].producer: x}, batch)
    first = 0
    for length in LENGTHS:
        alone = x[first : first + length].unsqueeze(0)
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        result = oracle(
            alone, position_embeddings=rotary(alone, torch.arange(length).unsqueeze(0)), attention_mask=mask
        )
        result = result[0] if isinstance(result, tuple) else result
        torch.testing.assert_close(packed[first : first + length], result.view(length, -1), rtol=1e-4, atol=1e-4)
        first += length


NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def test_block_with_experts_equals_qwen3_moe() -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    shape = replace(SHAPES["qwen3_moe"], layers=3)  # block 1 is not the last, which ends in the final norm
    assert shape.moe is not None
    config = transformers.Qwen3MoeConfig(
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_experts=shape.moe.experts,
        num_experts_per_tok=shape.moe.topk,
        moe_intermediate_size=shape.moe.expert_ffn,
        norm_topk_prob=True,
    )
    config._attn_implementation = config._experts_implementation = "eager"
    oracle = _random(qwen.Qwen3MoeDecoderLayer(config, 1))
    module = build_layer(graph_of(text_only(shape)).layer("llm.1"))
    names = {part: f"self_attn.{part}_proj" for part in "qkvo"} | {f"{p}_norm": f"self_attn.{p}_norm" for p in "qk"}
    _copy_linears(module, oracle, names | NORMS | {"router": "mlp.gate"})
    _copy_experts(module, oracle.get_submodule("mlp.experts"))
    _compare(shape, oracle, qwen.Qwen3MoeRotaryEmbedding(config), module)


@pytest.mark.parametrize("v_dim", [6, 4])
def test_block_with_latent_attention_equals_deepseek_v3(v_dim: int) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    shape = replace(SHAPES["deepseek"], layers=3)
    assert shape.moe is not None and shape.mla is not None
    shape = replace(shape, mla=replace(shape.mla, v_dim=v_dim))
    config = transformers.DeepseekV3Config(
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        q_lora_rank=shape.mla.q_lora,
        kv_lora_rank=shape.mla.kv_lora,
        qk_nope_head_dim=shape.mla.qk_nope,
        qk_rope_head_dim=shape.mla.qk_rope,
        v_head_dim=v_dim,
        n_routed_experts=shape.moe.experts,
        num_experts_per_tok=shape.moe.topk,
        moe_intermediate_size=shape.moe.expert_ffn,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
        rope_interleave=False,
    )
    config._attn_implementation = config._experts_implementation = "eager"
    oracle = deepseek.DeepseekV3DecoderLayer(config, 1)
    shared = shape.moe.shared_ffn
    oracle.mlp.shared_experts = deepseek.DeepseekV3MLP(config, intermediate_size=shared)
    oracle = _random(oracle)
    module = build_layer(graph_of(text_only(shape)).layer("llm.1"))
    names = {"q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj", "o": "o_proj"}
    names |= {"kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj"}
    names = {ours: f"self_attn.{theirs}" for ours, theirs in names.items()} | NORMS | {"router": "mlp.gate"}
    names |= {f"shared_{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
    _copy_linears(module, oracle, names)
    _copy_experts(module, oracle.get_submodule("mlp.experts"))
    _compare(shape, oracle, deepseek.DeepseekV3RotaryEmbedding(config), module)
