"""Counts of every layer kind against what torch does with the same layer: parameters, FLOPs, kept bytes, edges."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from layer_counts import compare
from layer_zoo import (
    FROZEN,
    FULL,
    LORA_ALL,
    LORA_GATE,
    LORA_QV,
    graph_of,
    llava,
    microbatch_of,
    mllama,
    omni,
    qwen_vl,
    scenario_of,
)
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mmplan.cost_models.counts import (
    dgrad_flops,
    kept_bytes,
    wgrad_flops,
)
from mmplan.cost_models.loads import sample_loads
from mmplan.cost_models.ops import Rope
from mmplan.runtime.attention import rope_table
from mmplan.runtime.layers import build_layer
from mmplan.runtime.model import MultimodalModel
from mmplan.scenario.scenario import Dtype, Model, Sample

MODELS: dict[str, Callable[..., Model]] = {"llava": llava, "qwen_vl": qwen_vl, "mllama": mllama, "omni": omni}
MODES = {
    "all full": (FULL, FULL, FULL),
    "all frozen": (FROZEN, FROZEN, FROZEN),
    "encoder frozen": (FROZEN, FULL, FULL),
    "only projector": (FROZEN, FULL, FROZEN),
    "only encoder": (FULL, FROZEN, FROZEN),
    "frozen encoder, LoRA on all linears": (FROZEN, FULL, LORA_ALL),
    "LoRA on q and v": (LORA_QV, FROZEN, LORA_QV),
    "LoRA on one factor of the gated MLP": (FROZEN, FROZEN, LORA_GATE),
}
EQUAL = (Sample(text_tokens=7, images=((8, 8),), audio_s=(0.8,), speech_tokens=5),) * 2
UNEQUAL = (
    Sample(text_tokens=5, images=((8, 8), (6, 18)), audio_s=(1.1, 0.3), speech_tokens=3),
    Sample(text_tokens=11, images=((13, 9),), audio_s=(0.5,), speech_tokens=9),
    Sample(text_tokens=1, images=((8, 8), (8, 8), (8, 8)), audio_s=(1.7, 1.7), speech_tokens=1),
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_counts_equal_torch_for_every_layer_and_training_mode(model: str, mode: str) -> None:
    compare(MODELS[model](*MODES[mode]), UNEQUAL, "fp32")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_counts_equal_torch_for_equal_lengths_and_16_bit(model: str, precision: Dtype) -> None:
    for mode in (MODES["all full"], MODES["frozen encoder, LoRA on all linears"]):
        compare(MODELS[model](*mode), EQUAL, precision)
        compare(MODELS[model](*mode), UNEQUAL, precision)


@pytest.mark.parametrize("wide", ["text", "others"])
@pytest.mark.parametrize("model", MODELS)
def test_counts_equal_torch_where_modules_differ_in_precision(model: str, wide: str) -> None:
    """What a layer reads of another precision it casts, and keeps as it has cast it."""
    made = MODELS[model](FULL, FULL, FULL)
    modules = tuple(
        replace(m, precision="fp32" if (m.modality == "text") == (wide == "text") else "bf16") for m in made.modules
    )
    compare(replace(made, modules=modules), UNEQUAL, "bf16")


def test_the_zoo_holds_every_layer_kind() -> None:
    kinds = set().union(*(compare(build(FULL, FULL, FULL), EQUAL, "fp32") for build in MODELS.values()))
    assert kinds == {
        "patch_embed",
        "audio_embed",
        "block",
        "cross_block",
        "projector",
        "token_embed",
        "head",
        "loss",
    }


def test_talker_with_its_table_at_hidden_width_counts_right() -> None:
    compare(omni(FROZEN, FULL, FULL, wide_table=False), UNEQUAL, "fp32")


@pytest.mark.parametrize("model", MODELS)
def test_frozen_block_behind_a_trained_encoder_computes_input_gradients_only(model: str) -> None:
    trained, frozen = graph_of(MODELS[model](FULL, FULL, FULL)), graph_of(MODELS[model](FULL, FULL, FROZEN))
    load = sample_loads(scenario_of(MODELS[model](FULL, FULL, FULL)), UNEQUAL)["llm"]
    for layer in (layer for layer in frozen.layers() if layer.module == "llm"):
        assert wgrad_flops(layer, load) == 0
        if layer.kind == "block" and "x" in layer.grad_values:
            assert dgrad_flops(layer, load) == dgrad_flops(trained.layer(layer.id), load) > 0


def _whole_model(model: Model, precision: Dtype = "fp32") -> MultimodalModel:
    graph = graph_of(model)
    return MultimodalModel(graph.layers(), graph, precision=precision, seed=0, device=torch.device("cpu"))


@pytest.mark.parametrize("mode", ["all full", "encoder frozen", "LoRA on q and v"])
@pytest.mark.parametrize("name", ["llava", "qwen_vl"])
def test_kept_bytes_of_layers_add_up_to_those_of_the_model(name: str, mode: str) -> None:
    model = MODELS[name](*MODES[mode])
    scenario, saved = scenario_of(model), dict[int, Tensor]()
    whole = _whole_model(model)
    batch = microbatch_of(scenario, UNEQUAL)

    def keep(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.dim() > 0:
            saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = whole(batch)
    shared = {parameter.untyped_storage().data_ptr() for parameter in whole.parameters()}
    lengths = {op.x.width // op.heads for layer in graph_of(model).layers() for op in layer.ops if isinstance(op, Rope)}
    for module in batch.lengths.values():
        for head_dim in lengths:
            tables = rope_table(module, head_dim, torch.float32, torch.device("cpu"))
            shared |= {table.untyped_storage().data_ptr() for table in tables}
    loads = sample_loads(scenario, UNEQUAL)
    expected = sum(kept_bytes(layer, loads[layer.module], "fp32") for layer in graph_of(model).layers())
    assert sum(t.untyped_storage().nbytes() for pointer, t in saved.items() if pointer not in shared) == expected
    assert losses["llm"].isfinite()


@pytest.mark.parametrize("model", MODELS)
def test_microbatch_without_images_or_clips_trains_the_language_model(model: str) -> None:
    samples = (Sample(text_tokens=6, speech_tokens=4), Sample(text_tokens=3, speech_tokens=2))
    built = MODELS[model](FULL, FULL, FULL)
    whole = _whole_model(built)
    losses = whole(microbatch_of(scenario_of(built), samples))
    torch.stack(list(losses.values())).sum().backward()
    gradients = {name: p.grad for name, p in whole.named_parameters() if ".llm_" in name}
    assert gradients and all(g is not None and g.isfinite().all() for n, g in gradients.items() if "llm_1" not in n)
    assert all(p.grad is None or not p.grad.any() for n, p in whole.named_parameters() if ".vision_" in n)


def test_samples_without_context_get_no_cross_attention() -> None:
    model = mllama(FULL, FULL, FULL)
    graph, scenario = graph_of(model), scenario_of(model)
    layer = graph.layer("llm.1")
    module = build_layer(layer)
    both = (Sample(text_tokens=4, images=((4, 4),)), Sample(text_tokens=3))
    batch = microbatch_of(scenario, both)
    x, context = torch.randn(7, 24), torch.randn(10, 24)
    inputs = {source.producer: x if source.value == "x" else context for source in layer.sources}
    mixed = module(inputs, batch)
    alone = microbatch_of(scenario, both[1:])
    inputs = {source.producer: x[4:] if source.value == "x" else context[:0] for source in layer.sources}
    torch.testing.assert_close(mixed[4:], module(inputs, alone))
    other = {source.producer: x if source.value == "x" else context + 1 for source in layer.sources}
    changed = module(other, batch)
    assert not torch.allclose(mixed[:4], changed[:4])
    torch.testing.assert_close(mixed[4:], changed[4:])


@pytest.mark.parametrize("model", MODELS)
def test_loss_of_a_packed_microbatch_is_the_sum_over_its_samples(model: str) -> None:
    """Samples packed into one sequence of rows do not see each other."""
    built = MODELS[model](FULL, FULL, FULL)
    scenario, whole = scenario_of(built), _whole_model(built)
    packed = whole(microbatch_of(scenario, UNEQUAL))
    alone = [whole(microbatch_of(scenario, (sample,), index)) for index, sample in enumerate(UNEQUAL)]
    for module, loss in packed.items():
        torch.testing.assert_close(loss, torch.stack([losses[module] for losses in alone]).sum())


def test_training_mode_is_part_of_the_module() -> None:
    graph = graph_of(llava(FROZEN, FULL, LORA_QV))
    module = build_layer(graph.layer("llm.0"))
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained == {f"parts.{target}_{side}.weight" for target in ("q", "v") for side in ("a", "b")}
    assert not any(p.requires_grad for p in build_layer(graph.layer("vision.0")).parameters())


def test_whisper_key_projection_has_no_bias() -> None:
    module = build_layer(graph_of(omni(FULL, FULL, FULL)).layer("audio.0"))
    biased = {name for name, _ in module.named_parameters() if name.endswith(".bias") and "norm" not in name}
    assert biased == {f"parts.{part}.bias" for part in ("q", "v", "o", "up", "down")}
