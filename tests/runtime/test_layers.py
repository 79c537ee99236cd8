"""Counts of every layer kind against what torch does with the same layer: parameters, FLOPs, kept bytes, edges."""

from collections.abc import Callable, Mapping

import pytest
import torch
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
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import (
    dgrad_flops,
    edge_bytes,
    forward_flops,
    kept_bytes,
    parameters,
    trainable_parameters,
    wgrad_flops,
)
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load
from mmplan.cost_models.loads import sample_loads
from mmplan.cost_models.ops import Norm, Rope
from mmplan.runtime.attention import rope_table
from mmplan.runtime.batch import Microbatch
from mmplan.runtime.layers import build_layer
from mmplan.runtime.model import MultimodalModel
from mmplan.scenario.scenario import Dtype, Model, Sample

aten = torch.ops.aten
CPU_ATTENTION = {  # FlopCounterMode knows the CUDA kernels only; same formulas
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *args, out_shape=None, **kwargs: sdpa_flop_count(
        q, k, v
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *args, out_shape=None, **kwargs: (
        sdpa_backward_flop_count(g, q, k, v)
    ),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
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


class _Observed:
    """What torch did in one forward and backward of a layer."""

    def __init__(self, layer: Layer, module: nn.Module, batch: Microbatch, inputs: Mapping[str, Tensor]) -> None:
        self.saved: list[Tensor] = []
        with saved_tensors_hooks(self._keep, lambda tensor: tensor):
            with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
                self.output: Tensor = module(inputs, batch)
            self.forward_flops = counter.get_total_flops()
        self.backward_flops = 0
        if self.output.requires_grad:
            with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
                self.output.float().sum().backward()
            self.backward_flops = counter.get_total_flops()
        shared = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        for op in layer.ops:
            if isinstance(op, Rope):
                lengths, head_dim = batch.lengths[layer.module], op.x.width // op.heads
                tables = rope_table(lengths, head_dim, self.output.dtype, self.output.device)
                shared |= {table.untyped_storage().data_ptr() for table in tables}
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in self.saved if tensor.is_floating_point()}
        self.kept_bytes = sum(
            tensor.untyped_storage().nbytes() for pointer, tensor in storages.items() if pointer not in shared
        )

    def _keep(self, tensor: Tensor) -> Tensor:
        if tensor.dim() > 0:  # cross entropy keeps the sum of its weights, one number
            self.saved.append(tensor)
        return tensor


def _norm_statistics_excess(layer: Layer, load: Load, precision: Dtype) -> int:
    """CPU keeps layer norm's two statistics per row in the dtype of the input, CUDA and the count in fp32."""
    norms = [op for op in layer.ops if isinstance(op, Norm) and op.kind == "layer" and op.y.name in layer.grad_values]
    return round(sum(op.x.rows.of(load) * op.groups * 2 * 2 for op in norms)) if precision == "bf16" else 0


def _compare(model: Model, samples: tuple[Sample, ...], precision: Dtype) -> set[str]:
    """Asserts that all counts of all layers are exact; returns the kinds of layers seen."""
    scenario = scenario_of(model, precision, samples)
    graph, loads = build_graph(scenario), sample_loads(scenario, samples)
    batch = microbatch_of(scenario, samples)
    outputs: dict[str, Tensor] = {}
    for layer in graph.layers():
        load, module = loads[layer.module], build_layer(layer).to(DTYPES[precision])
        inputs = {
            source.producer: outputs[source.producer].detach().clone().requires_grad_(source.value in layer.grad_values)
            for source in layer.sources
        }
        observed = _Observed(layer, module, batch, inputs)
        outputs[layer.id] = observed.output
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        assert parameters(layer) == sum(p.numel() for p in module.parameters()), layer.id
        assert trainable_parameters(layer) == sum(p.numel() for p in trained), layer.id
        assert layer.has_backward == observed.output.requires_grad, layer.id
        assert forward_flops(layer, load) == observed.forward_flops, layer.id
        assert dgrad_flops(layer, load) + wgrad_flops(layer, load) == observed.backward_flops, layer.id
        expected = kept_bytes(layer, load, precision) - _norm_statistics_excess(layer, load, precision)
        assert expected == observed.kept_bytes, layer.id
        assert all(p.grad is not None for p in trained), layer.id
    for edge in graph.edges():
        if edge.cuttable:
            assert edge_bytes(edge, loads, precision) == outputs[edge.producer].nbytes, edge.name
    return {layer.kind for layer in graph.layers()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_counts_equal_torch_for_every_layer_and_training_mode(model: str, mode: str) -> None:
    _compare(MODELS[model](*MODES[mode]), UNEQUAL, "fp32")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_counts_equal_torch_for_equal_lengths_and_16_bit(model: str, precision: Dtype) -> None:
    for mode in (MODES["all full"], MODES["frozen encoder, LoRA on all linears"]):
        _compare(MODELS[model](*mode), EQUAL, precision)
        _compare(MODELS[model](*mode), UNEQUAL, precision)


def test_the_zoo_holds_every_layer_kind() -> None:
    kinds = set().union(*(_compare(build(FULL, FULL, FULL), EQUAL, "fp32") for build in MODELS.values()))
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
    _compare(omni(FROZEN, FULL, FULL, wide_table=False), UNEQUAL, "fp32")


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
