"""Models whose layers are split over a tensor-parallel group, and what each process of the group finds out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from case_processes import given_to, meeting
from expert_models import SHAPES, glm, intern_vl, text_only
from gradient_runs import perturb
from layer_zoo import (
    CLIP,
    FROZEN,
    FULL,
    LLM,
    LORA_ALL,
    LORA_QV,
    llava,
    microbatch_of,
    mllama,
    omni,
    qwen_vl,
    scenario_of,
)
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.ops import Rope
from mmplan.runtime.attention import rope_table
from mmplan.runtime.model import MultimodalModel
from mmplan.runtime.tensor_parallel import SplitLayer, name_in_whole, slice_of
from mmplan.runtime.tensor_sums import TensorRanks
from mmplan.scenario.scenario import Model, Sample, Scenario, Transformer

SAMPLES = (
    Sample(text_tokens=5, images=((8, 8), (6, 18)), audio_s=(1.1, 0.3), speech_tokens=3),
    Sample(text_tokens=11, images=((13, 9),), audio_s=(0.5,), speech_tokens=9),
)
BLIND = (Sample(text_tokens=6, speech_tokens=4), Sample(text_tokens=3, speech_tokens=2))
PROCESSES = 2


def _with(model: Model, module: str, change: Callable[[Transformer], Transformer]) -> Model:
    """The model with another transformer in one module."""
    modules = tuple(
        replace(m, transformer=change(m.transformer)) if m.name == module and m.transformer is not None else m
        for m in model.modules
    )
    return replace(model, modules=modules)


def _vocabulary(model: Model, **changes: object) -> Model:
    modules = tuple(
        replace(m, vocabulary=replace(m.vocabulary, **changes)) if m.name == "llm" and m.vocabulary is not None else m
        for m in model.modules
    )
    return replace(model, modules=modules)


def split_cases() -> dict[str, Scenario]:
    """Every kind of layer, of training and of padding; degree 2 divides what has to divide."""
    speaking = _with(omni(FULL, FULL, FULL), "talker", lambda shape: replace(shape, kv_heads=2))
    models = {
        "llava": llava(FULL, FULL, FULL),
        "windows, gated vision and norms of heads": qwen_vl(FULL, FULL, FULL),
        "cross-attention": mllama(FULL, FULL, FULL),
        "audio and talker": speaking,
        "frozen encoder": llava(FROZEN, FULL, FULL),
        "frozen language model": qwen_vl(FROZEN, FULL, FROZEN),
        "LoRA on all linears": qwen_vl(FROZEN, FULL, LORA_ALL),
        "LoRA on q and v": llava(LORA_QV, FROZEN, LORA_QV),
        "tied vocabulary": _vocabulary(llava(FULL, FULL, FULL), tied=True),
        "padded vocabulary": _vocabulary(llava(FULL, FULL, FULL), pad_to=24),
        "key heads on two ranks": _with(
            qwen_vl(LORA_ALL, FULL, FULL),
            "llm",
            lambda shape: replace(shape, kv_heads=1, qkv_bias=True),
        ),
        "padded heads": _with(
            llava(FULL, FULL, FULL), "vision", lambda shape: replace(CLIP, heads=3, kv_heads=3, pad_heads=True)
        ),
        "pooled, gated projector": glm(FULL, FULL, FULL),
        "norms over all heads": intern_vl(FULL, FULL, FULL),
        "norms over all heads, some padded": _with(
            intern_vl(LORA_QV, FULL, FULL), "vision", lambda shape: replace(shape, heads=3, kv_heads=3, pad_heads=True)
        ),
        **{name: text_only(replace(shape, layers=3)) for name, shape in SHAPES.items()},
        "experts that are not trained": text_only(SHAPES["qwen3_moe"], FROZEN),
        "language model alone": text_only(LLM),
    }
    scenarios = {name: scenario_of(model, samples=SAMPLES) for name, model in models.items()}
    in_rows = ("cross-attention", "LoRA on all linears", "language model alone", "qwen3_moe")
    return scenarios | {f"{name}, rows over tp": _in_rows(scenarios[name]) for name in in_rows}


def _in_rows(scenario: Scenario) -> Scenario:
    return replace(scenario, technique=replace(scenario.technique, sequence_parallel=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitResult:
    """Of one process: largest differences to the whole model, relative to the largest element, and bytes."""

    losses: dict[str, tuple[float, float]]  # by module: of the whole model, of the split one
    errors: dict[str, float]  # by parameter
    forward_bytes: int
    backward_bytes: int
    kept_bytes: int
    starts_alike: bool  # weights before anything is done to them


def _run(model: MultimodalModel, scenario: Scenario, samples: tuple[Sample, ...]) -> dict[str, float]:
    losses = model(microbatch_of(scenario, samples))
    parts = [loss for loss in losses.values() if loss.requires_grad]
    if parts:
        torch.stack(parts).sum().backward()
    return {module: loss.item() for module, loss in losses.items()}


def split_error(
    name: str, whole: dict[str, Tensor | None], found: Tensor | None, own: Callable[[Tensor], Tensor]
) -> float:
    """Largest difference of a gradient to its slice of the whole one. Some gradients are zero but for rounding (biases
    of keys), so no scale is below a thousandth of the model's largest."""
    gradient = whole[name_in_whole(name)]
    if gradient is None or found is None:
        return 0.0 if gradient is found or not any(g is not None and g.any() for g in (gradient, found)) else 1.0
    least = max(float(g.abs().max()) for g in whole.values() if g is not None) / 1000
    error = float((found - own(gradient)).abs().max())
    return error / max(float(gradient.abs().max()), least, 1e-30)


def run_case(scenario: Scenario, ranks: TensorRanks, samples: tuple[Sample, ...]) -> SplitResult:
    graph = build_graph(scenario)
    layers, cpu = graph.layers(), torch.device("cpu")
    whole = MultimodalModel(layers, graph, precision="fp32", seed=0, device=cpu)
    split = MultimodalModel(layers, graph, precision="fp32", seed=0, device=cpu, ranks=ranks)
    weights = dict(whole.named_parameters())

    def own(name: str, of_whole: Tensor) -> Tensor:
        _, layer, of_layer = name.split(".", 2)
        module = split.layers[layer]
        assert isinstance(module, SplitLayer)
        return slice_of(of_whole, split.get_parameter(name).shape, *module.extent(of_layer, of_whole.shape))

    def taken(name: str) -> Tensor:
        return own(name, weights[name_in_whole(name)].detach())

    starts_alike = all(torch.equal(parameter, taken(name)) for name, parameter in split.named_parameters())
    perturb(whole)
    for name, parameter in split.named_parameters():
        parameter.data = taken(name)
    expected = _run(whole, scenario, samples)
    saved: dict[int, int] = {}
    shared = {p.untyped_storage().data_ptr() for p in split.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and tensor.dim() > 0 and storage.data_ptr() not in shared:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    for lengths in microbatch_of(scenario, samples).lengths.values():
        for width in {
            op.dims or op.x.width // op.heads for layer in layers for op in layer.ops if isinstance(op, Rope)
        }:
            shared |= {t.untyped_storage().data_ptr() for t in rope_table(lengths, width, torch.float32, cpu)}
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = _run(split, scenario, samples)
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    return SplitResult(
        losses={module: (expected[module], loss) for module, loss in losses.items()},
        errors={name: split_error(name, gradients, p.grad, partial(own, name)) for name, p in split.named_parameters()},
        forward_bytes=ranks.forward_bytes,
        backward_bytes=ranks.backward_bytes,
        kept_bytes=sum(saved.values()),
        starts_alike=starts_alike,
    )


def run_split_cases(rank: int, folder: str) -> None:
    """Body of one of the two processes, which get the scenarios."""
    scenarios: dict[str, Scenario] = given_to(folder)
    with meeting(rank, folder, PROCESSES) as results:
        for name, scenario in scenarios.items():
            sequence = ("llm",) if scenario.technique.sequence_parallel else ()
            for blind in (False, True):
                ranks = TensorRanks(degree=PROCESSES, index=rank, group=None, sequence=sequence)  # it counts bytes
                results[name, blind] = run_case(scenario, ranks, BLIND if blind else SAMPLES)
