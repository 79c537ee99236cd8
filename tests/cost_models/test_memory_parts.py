"""Memory terms against hand arithmetic and against the exact counts of the mmplan stack."""

from dataclasses import replace
from typing import get_args

import pytest
from small_models import FROZEN, LLM, language_model, scenario_of, vision_audio_model

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.context_memory import others_rows_bytes
from mmplan.cost_models.counts import kept_bytes, op_parameters
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load
from mmplan.cost_models.memory import state_bytes
from mmplan.cost_models.memory_activations import (
    Setting,
    kept,
    kept_recomputed,
    logits_bytes,
    with_hooks,
    working_bytes,
)
from mmplan.cost_models.memory_estimate import MemoryEstimate, MemoryPart, Moment
from mmplan.cost_models.memory_rules import RULES, memory_rules, parameter_bytes
from mmplan.cost_models.memory_states import ParameterCounts, Replicas, host_parts, layer_counts, state_parts
from mmplan.cost_models.memory_transients import gathered_part, optimizer_step_part
from mmplan.cost_models.ops import Attention
from mmplan.cost_models.shard import Shard
from mmplan.errors import CostModelError
from mmplan.scenario.scenario import Model, Moe, Optimizer, Transformer
from mmplan.scenario.stacks import stack_names, technique_of
from mmplan.scenario.technique import ContextParallel, Technique

ONE = Replicas(dense=1, expert=1)
GPT = replace(
    LLM, kv_heads=4, gated_mlp=False, norm="layer", qkv_bias=True, out_bias=True, mlp_bias=True, ffn=4 * LLM.hidden
)
LOAD = Load(sequences=1, tokens=32, pairs=32 * 32, targets=31, outputs=32, input_elements=32)


def setting(technique: Technique, **shard: int) -> Setting:
    return Setting(precision="bf16", technique=technique, shard=Shard(**shard))


def graph_of(shape: Transformer) -> ComputationGraph:
    return build_graph(scenario_of(Model(name="m", modules=(language_model(shape),), edges=())))


def block(shape: Transformer = GPT) -> Layer:
    return graph_of(shape).layer("llm.0")


def test_every_stack_has_memory_rules() -> None:
    assert set(RULES) == set(stack_names())
    with pytest.raises(CostModelError, match="nothing is known about the memory of stack 'x'"):
        memory_rules("x")


@pytest.mark.parametrize("optimizer", [Optimizer(), Optimizer(gradient_dtype="bf16"), Optimizer(name="sgd")])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_states_of_the_mmplan_stack_are_state_bytes(optimizer: Optimizer, precision: str) -> None:
    graph = build_graph(scenario_of(vision_audio_model(FROZEN)))
    for layer in graph.layers():
        parts = state_parts(layer_counts(layer, Shard(tp=2)), ONE, precision, optimizer, Technique())
        assert sum(part.bytes for part in parts) == state_bytes(layer, precision, optimizer, 2)


def test_activations_of_the_mmplan_stack_are_kept_bytes() -> None:
    graph = build_graph(scenario_of(vision_audio_model()))
    for layer in graph.layers():
        for tp in (1, 2):
            mine = kept(layer, LOAD, Setting(precision="bf16", technique=Technique(), shard=Shard(tp=tp)))
            assert mine.total == pytest.approx(kept_bytes(layer, LOAD, "bf16", tp), abs=1)


def test_a_gpt_block_keeps_s_b_h_times_34_and_the_scores() -> None:
    """arXiv 2205.05198, equation 1: s b h (34 + 5 a s / h), here plus fp32 statistics of two layer norms."""
    s, h, a = 32, GPT.hidden, GPT.heads
    technique = technique_of("megatron-2021")
    result = kept(block(), LOAD, setting(technique))
    statistics = 2 * 2 * 4 * s
    assert result.total == s * h * 34 + 5 * a * s * s + statistics
    assert result.scores + result.masks == 5 * a * s * s + 2 * s * h


def test_selective_recompute_drops_the_scores_and_flash_never_has_them() -> None:
    s, h = 32, GPT.hidden
    selective = kept(block(), LOAD, setting(technique_of("megatron-2021", recompute="selective")))
    assert selective.scores == 0 and selective.masks == 2 * s * h
    assert kept(block(), LOAD, setting(technique_of("megatron-2021", attention="flash2"))).scores == 0


def test_sequence_parallel_divides_all_rows_by_tp() -> None:
    technique = technique_of("megatron-2021", sequence_parallel=True, attention="flash2")
    whole = kept(block(), LOAD, setting(replace(technique, sequence_parallel=False))).values
    log_sum_exp = 4 * 32 * GPT.heads  # split by heads
    halves = kept(block(), LOAD, setting(technique, tp=2)).values
    assert halves == pytest.approx(whole / 2, abs=log_sum_exp)
    without = kept(block(), LOAD, setting(replace(technique, sequence_parallel=False), tp=2)).values
    assert halves < without < whole


def test_context_parallel_divides_rows_and_scores() -> None:
    technique = technique_of("megatron-2021")
    assert kept(block(), LOAD, setting(technique, cp=2)).total == kept(block(), LOAD, setting(technique)).total / 2


def test_attention_and_its_reader_keep_the_result_apart_where_rows_are_exchanged_for_heads() -> None:
    """By heads and by rows, in 16 bit; of an encoder heads are never dealt out."""
    ring = technique_of("torch-2025", sequence_parallel=False)
    by_heads = replace(ring, context_parallel="all-to-all")
    wide, narrow = (kept(block(LLM), LOAD, setting(way, cp=2)).values for way in (by_heads, ring))
    assert wide - narrow == 32 / 2 * LLM.heads * LLM.head_dim * 2
    assert kept(block(LLM), LOAD, setting(by_heads)) == kept(block(LLM), LOAD, setting(ring))


@pytest.mark.parametrize(("cp", "held"), [(1, 0), (2, 1), (4, 2), (8, 2)])
def test_a_ring_holds_rows_at_hand_and_those_that_come_and_a_gather_all(cp: int, held: int) -> None:
    """32 tokens in 16 bit; sums in fp32: of results, or of gradients of queries and twice of keys and values."""
    (op,) = (op for op in block(LLM).ops if isinstance(op, Attention))
    keys, queries = 2 * 32 / cp * LLM.kv_heads * LLM.head_dim, 32 / cp * LLM.heads * LLM.head_dim
    found = {
        way: [others_rows_bytes(op, LOAD, Shard(cp=cp), way, 2, backward=backward) for backward in (False, True)]
        for way in get_args(ContextParallel)
    }
    if cp == 1:
        assert set(map(tuple, found.values())) == {(0, 0)}
        return
    assert found["ring"] == [2 * keys * held + 4 * queries, 2 * 2 * keys * held + 4 * queries + 2 * 4 * keys]
    assert found["gather"] == [2 * cp * keys, 2 * 2 * cp * keys]
    assert found["all-to-all"] == [0, 0]


def test_full_recompute_keeps_the_input() -> None:
    assert kept_recomputed(block(), LOAD, setting(technique_of("megatron-2021"))).total == 32 * GPT.hidden * 2


def test_a_fused_gate_keeps_one_tensor_less() -> None:
    plain = kept(block(LLM), LOAD, setting(technique_of("torch-2025", sequence_parallel=False))).values
    fused = kept(block(LLM), LOAD, setting(technique_of("nemo-2025"))).values
    assert plain - fused == 32 * LLM.ffn * 2


def test_fp8_keeps_inputs_of_products_in_one_byte() -> None:
    technique = technique_of("nemo-2025")
    wide = kept(block(), LOAD, setting(technique)).values
    narrow = kept(block(), LOAD, setting(replace(technique, fp8="tensor"))).values
    only_products_read = 32 * (2 * GPT.hidden + GPT.ffn)  # two normed values and the activation: 1 byte instead of 2
    read_by_attention_too = 32 * GPT.hidden  # attention keeps its output in 16 bit, the product a copy in FP8
    assert wide - narrow == only_products_read - read_by_attention_too


def test_frozen_towers_keep_activations_only_with_hooks() -> None:
    graph = build_graph(scenario_of(vision_audio_model(FROZEN)))
    layer = graph.layer("vision.0")
    assert kept(layer, LOAD, setting(Technique())).total == 0
    assert kept(with_hooks(layer), LOAD, setting(Technique())).total > 0


def test_losses_hold_logits_by_kernel() -> None:
    graph = graph_of(LLM)
    loss, logits = graph.layer("llm.loss"), 32 * 256
    assert logits_bytes(loss, LOAD, setting(technique_of("nemo-2025")), 64) == (4 * logits, 2 * logits)
    assert logits_bytes(loss, LOAD, setting(technique_of("torch-2025")), 64) == (4 * logits, 8 * logits)
    assert logits_bytes(loss, LOAD, setting(technique_of("torch-2025", cross_entropy="fused")), 64)[0] == 2 * logits
    chunked = logits_bytes(loss, LOAD, setting(technique_of("torch-2025", cross_entropy="chunked")), 64)
    assert sum(chunked) < 2 * logits * 2


def test_attention_without_a_kernel_needs_score_matrices_at_work() -> None:
    scores = 2 * GPT.heads * 32 * 32
    plain = working_bytes(block(), LOAD, setting(technique_of("megatron-2021")))
    flash = working_bytes(block(), LOAD, setting(technique_of("megatron-2021", attention="flash2")))
    assert plain >= flash
    assert plain <= flash + 2 * scores + 32 * GPT.ffn * 4


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        ("none", 2 + 2 + 12),
        ("optimizer", 2 + 2 + 12 / 8),
        ("gradients", 2 + (2 + 12) / 8),
        ("parameters", (2 + 2 + 12) / 8),
    ],
)
def test_each_zero_stage_splits_one_more(sharding: str, expected: float) -> None:
    """arXiv 1910.02054, figure 1."""
    technique = technique_of("nemo-2025", sharding=sharding)
    parts = state_parts(ParameterCounts(dense=8000), Replicas(dense=8, expert=8), "bf16", Optimizer(), technique)
    assert sum(part.bytes for part in parts) == 8000 * expected


def test_deepspeed_zero_2_keeps_gradients_whole() -> None:
    technique = technique_of("deepspeed-2024", sharding="gradients")
    parts = state_parts(ParameterCounts(dense=8000), Replicas(dense=8, expert=8), "bf16", Optimizer(), technique)
    assert sum(part.bytes for part in parts) == 8000 * (4 + 12 / 8)


def test_experts_are_split_over_their_own_replicas_only() -> None:
    """Expert data parallelism of 1 splits nothing, whatever dp is."""
    technique = technique_of("nemo-2025")
    counts = ParameterCounts(expert=1000)
    alone = state_parts(counts, Replicas(dense=64, expert=1), "bf16", Optimizer(), technique)
    assert sum(part.bytes for part in alone) == 1000 * 16
    shared = state_parts(counts, Replicas(dense=64, expert=4), "bf16", Optimizer(), technique)
    assert sum(part.bytes for part in shared) == 1000 * (4 + 12 // 4)


def test_expert_weights_are_counted_apart_and_split_by_ep() -> None:
    shape = replace(LLM, moe=Moe(experts=8, topk=2, expert_ffn=32))
    layer = block(shape)
    one, four = layer_counts(layer, Shard()), layer_counts(layer, Shard(ep=4))
    assert one.expert == 8 * 3 * 32 * LLM.hidden and four.expert == one.expert // 4
    assert one.dense == four.dense > 0
    assert one.total == sum(op_parameters(op) for op in layer.ops)


def test_fsdp_keeps_fp32_shards_and_gathers_two_units() -> None:
    technique = technique_of("torch-2025")
    per = parameter_bytes("bf16", Optimizer(), technique)
    assert (per.weight, per.gradient, per.optimizer) == (4, 4, 8)
    units = [ParameterCounts(dense=100)] * 5
    part = gathered_part(units, ParameterCounts(dense=10), 64, "bf16", technique)
    assert part is not None and part.bytes == 2 * (2 * 100 + 10 + 100)
    held = gathered_part(units, ParameterCounts(dense=10), 64, "bf16", replace(technique, sharding="gradients"))
    assert held is not None and held.bytes == 2 * (510 + 100)


def test_zero_3_live_parameters_do_not_depend_on_the_number_of_ranks_and_gather_fused_experts() -> None:
    technique = technique_of("deepspeed-2024", overlap_dp=False)
    big = ParameterCounts(expert=2_000_000_000)
    part = gathered_part([big], ParameterCounts(), 64, "bf16", technique)
    assert part is not None and part.bytes == 2 * (64 * 64 + 2_000_000_000 + 2_000_000_000)
    small = gathered_part([ParameterCounts(dense=10**8)] * 40, ParameterCounts(), 64, "bf16", technique)
    assert small is not None and small.bytes == 2 * (64 * 64 + 10**9 + 10**8)  # stage3_max_live_parameters


def test_the_first_update_needs_temporaries_by_engine() -> None:
    counts, replicas = ParameterCounts(dense=800), Replicas(dense=8, expert=8)
    fsdp = optimizer_step_part(counts, replicas, "bf16", Optimizer(), technique_of("torch-2025"))
    assert fsdp is not None and (fsdp.name, fsdp.bytes) == ("foreach temporaries", 400)
    megatron = technique_of("nemo-2025", gradient_dtype="fp32")
    assert optimizer_step_part(counts, replicas, "bf16", Optimizer(), megatron) is None


def test_offloading_moves_the_optimizer_to_the_host() -> None:
    technique = technique_of("nemo-2025", offload="optimizer")
    arguments = (ParameterCounts(dense=800), Replicas(dense=8, expert=8), "bf16", Optimizer(), technique)
    assert {part.name: part.bytes for part in state_parts(*arguments)} == {"weights": 1600, "gradients": 1600}
    assert {part.name: part.bytes for part in host_parts(*arguments)} == {
        "optimizer state": 1200,
        "pinned gradient copy": 200,
    }
    nothing = state_parts(*arguments[:4], replace(technique, offload="parameters"))
    assert nothing == ()


def estimate(*sizes: tuple[str, int], limit: int = 100) -> MemoryEstimate:
    parts = tuple(MemoryPart(name=name, bytes=size, why="") for name, size in sizes)
    return MemoryEstimate(
        stage=0,
        moments=(Moment(name="training step", parts=parts),),
        host_parts=(),
        largest=(),
        limit_bytes=limit,
        headroom=0.1,
    )


def test_the_verdict_names_the_part_that_crosses_the_limit() -> None:
    assert estimate(("weights", 50), ("activations", 40)).verdict.kind == "fits"
    tight = estimate(("weights", 50), ("activations", 45)).verdict
    assert (tight.kind, tight.decides) == ("tight", "activations")
    states = estimate(("weights", 20), ("optimizer state", 90), ("gradients", 20), ("activations", 1)).verdict
    assert (states.kind, states.decides) == ("OOM", "optimizer state")
    late = estimate(("weights", 50), ("activations", 49), ("logits", 9)).verdict
    assert (late.kind, late.decides) == ("OOM", "logits")
    assert "weights 50 B + activations 49 B + logits 9 B = 108 B > 100 B" in late.sentence


def test_levels_tell_live_tensors_from_what_the_device_holds() -> None:
    parts = (
        MemoryPart(name="weights", bytes=50, why=""),
        MemoryPart(name="context and NCCL", bytes=7, why="", level="device"),
    )
    result = replace(estimate(("weights", 1)), moments=(Moment(name="training step", parts=parts),))
    assert (result.allocated_bytes, result.device_bytes) == (50, 57)
