"""Experts, latent attention, DeepStack, layer scales and padded vocabularies: counts equal torch, results are right."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expert_models import DEEPSEEK, LATENT, SHAPES, deepstack, glm, intern_vl, prompted, text_only
from layer_counts import compare
from layer_zoo import FROZEN, FULL, LLM, LORA_QV, graph_of, microbatch_of, scenario_of
from torch import Tensor

from mmplan.cost_models.counts import forward_flops, parameters
from mmplan.cost_models.loads import sample_loads
from mmplan.runtime import experts
from mmplan.runtime.layers import build_layer
from mmplan.runtime.model import MultimodalModel
from mmplan.scenario.scenario import Model, Sample, Training, Transformer

SAMPLES = (Sample(text_tokens=7, images=((8, 8), (6, 18))), Sample(text_tokens=9, images=((13, 9),)))
VISION: dict[str, Callable[[Training, Training, Training], Model]] = {
    "internvl": intern_vl,
    "deepstack": deepstack,
    "glm": glm,
    "text encoder": prompted,
}
MODES = {
    "all full": (FULL, FULL, FULL),
    "all frozen": (FROZEN, FROZEN, FROZEN),
    "only projectors": (FROZEN, FULL, FROZEN),
    "only encoder": (FULL, FROZEN, FROZEN),
    "LoRA on q and v": (FROZEN, FULL, LORA_QV),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("training", [FULL, FROZEN], ids=["full", "frozen"])
def test_counts_of_experts_and_latent_attention_equal_torch(name: str, training: Training) -> None:
    compare(text_only(SHAPES[name], training), SAMPLES, "fp32")


@pytest.mark.parametrize("name", SHAPES)
def test_counts_equal_torch_in_16_bit(name: str) -> None:
    compare(text_only(SHAPES[name]), SAMPLES, "bf16")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", VISION)
def test_counts_of_models_with_encoders_equal_torch(name: str, mode: str) -> None:
    compare(VISION[name](*MODES[mode]), SAMPLES, "fp32")


def _block(shape: Transformer, layer: str = "llm.1", tokens: tuple[int, ...] = (7, 9)) -> tuple[Tensor, Tensor]:
    """Input and output of a block with random weights."""
    model = text_only(shape)
    torch.manual_seed(0)
    module = build_layer(graph_of(model).layer(layer))
    batch = microbatch_of(scenario_of(model), tuple(Sample(text_tokens=count) for count in tokens))
    x = torch.randn(sum(tokens), shape.hidden, requires_grad=True)
    producer = graph_of(model).layer(layer).sources[0].producer
    return x, module({producer: x}, batch)


@pytest.mark.parametrize("name", SHAPES)
def test_a_token_sees_no_later_token_and_no_other_sample(name: str) -> None:
    shape = replace(SHAPES[name], moe=replace(SHAPES[name].moe, capacity_factor=None)) if SHAPES[name].moe else LLM
    x, y = _block(shape)
    (grad,) = torch.autograd.grad(y[9].sum(), x)
    assert grad[7:10].abs().sum() > 0
    assert not grad[:7].any() and not grad[10:].any()


def test_a_sliding_window_reaches_so_many_tokens_back() -> None:
    x, y = _block(replace(SHAPES["gemma"], window_tokens=3, post_norms=False))
    (grad,) = torch.autograd.grad(y[6].sum(), x)
    assert grad[4:7].abs().sum(1).all()
    assert not grad[:4].any()


def test_pairs_of_a_sliding_window_are_twice_what_causal_attention_leaves() -> None:
    """5 tokens, window 3: rows see 1 + 2 + 3 + 3 + 3 = 12; both sides of the diagonal: 3^2 + 2 * 3 * 2 = 21."""
    shape = replace(SHAPES["gemma"], window_tokens=3)
    loads = sample_loads(scenario_of(text_only(shape)), (Sample(text_tokens=5), Sample(text_tokens=2)))
    assert loads["llm"].window_pairs == 21 + 2**2
    assert loads["llm"].pairs == 5**2 + 2**2


def test_experts_equal_a_loop_over_tokens() -> None:
    torch.manual_seed(1)
    x, scores = torch.randn(11, 6), torch.randn(11, 5)
    linear = experts.ExpertLinear(5, 6, 3)
    chosen = experts.top_experts(scores, 2)
    weights = experts.expert_weights("softmax", scores, chosen)
    rows = experts.rows_per_expert(chosen, 5, None)
    y = experts.combine(linear(experts.dispatch(x, chosen, 5, None), rows), chosen, weights, 5, None)
    for token in range(11):
        probability = scores[token].softmax(0)[chosen[token]]
        parts = [linear.weight[expert] @ x[token] for expert in chosen[token]]
        expected = (torch.stack(parts) * (probability / probability.sum()).unsqueeze(1)).sum(0)
        torch.testing.assert_close(y[token], expected)


def test_capacity_drops_the_rows_beyond_it_and_fills_up_with_zeros() -> None:
    x, chosen = torch.arange(1.0, 7.0).unsqueeze(1), torch.tensor([[0], [0], [0], [1], [0], [1]])
    assert experts.rows_per_expert(chosen, 3, 1.0) == [2, 2, 2]
    routed = experts.dispatch(x, chosen, 3, 1.0)
    assert routed.flatten().tolist() == [1, 2, 4, 6, 0, 0]
    back = experts.combine(routed, chosen, torch.ones(6, 1), 3, 1.0)
    assert back.flatten().tolist() == [1, 2, 0, 4, 0, 6]


def test_an_expert_nobody_chose_gets_a_zero_gradient() -> None:
    linear = experts.ExpertLinear(3, 4, 4)
    linear(torch.randn(5, 4), [5, 0, 0]).sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad[0].any() and not linear.weight.grad[1:].any()
    linear.zero_grad()
    linear(torch.randn(0, 4), [0, 0, 0]).sum().backward()
    assert linear.weight.grad is not None and not linear.weight.grad.any()


def test_heads_of_keys_and_values_may_differ_in_width() -> None:
    shape = replace(DEEPSEEK, mla=replace(LATENT, v_dim=4))
    _, y = _block(shape)
    y.sum().backward()
    layer = graph_of(text_only(shape)).layer("llm.1")
    assert parameters(layer) == sum(p.numel() for p in build_layer(layer).parameters())
    narrow = forward_flops(layer, sample_loads(scenario_of(text_only(shape)), SAMPLES)["llm"])
    wide = graph_of(text_only(DEEPSEEK)).layer("llm.1")
    pairs, tokens = 7**2 + 9**2, 16
    saved = 2 * pairs * 4 * 2 + 2 * tokens * (10 * 4 * 2 + 24 * 4 * 2)
    assert forward_flops(wide, sample_loads(scenario_of(text_only(DEEPSEEK)), SAMPLES)["llm"]) - narrow == saved


def test_deepstack_changes_image_tokens_only() -> None:
    model = deepstack(FULL, FULL, FULL)
    layer = graph_of(model).layer("llm.0")
    module, batch = build_layer(layer), microbatch_of(scenario_of(model), SAMPLES)
    rows = sum(batch.lengths["llm"])
    x, images = torch.randn(rows, 24), torch.randn(sum(batch.lengths["projector"]), 24)
    with_images = module({"llm.embed": x, "deep0.0": images}, batch)
    without = module({"llm.embed": x, "deep0.0": torch.zeros_like(images)}, batch)
    at = batch.merge_positions["llm"]
    torch.testing.assert_close((with_images - without)[at["projector"]], images)
    assert torch.equal(with_images[at["text"]], without[at["text"]])


@pytest.mark.parametrize("name", VISION)
def test_models_with_encoders_train_with_and_without_images(name: str) -> None:
    model = VISION[name](FULL, FULL, FULL)
    graph, scenario = graph_of(model), scenario_of(model)
    whole = MultimodalModel(graph.layers(), graph, precision="fp32", seed=0, device=torch.device("cpu"))
    for samples in (SAMPLES, (Sample(text_tokens=5),)):
        loss = torch.stack(list(whole(microbatch_of(scenario, samples)).values())).sum()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in whole.parameters())
