"""Small hand-made models that contain every kind of layer and operator, with samples of odd and unequal sizes."""

from dataclasses import replace
from itertools import pairwise

import torch

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.graph import ComputationGraph
from mmplan.runtime.batch import Microbatch, make_microbatch
from mmplan.scenario.cluster import Cluster, Device, Link, Pool
from mmplan.scenario.scenario import (
    AudioInput,
    Constraints,
    Data,
    Distribution,
    Dtype,
    Model,
    ModelEdge,
    ModelModule,
    Optimizer,
    Projector,
    Sample,
    Scenario,
    Training,
    Transformer,
    VisionInput,
    Vocabulary,
)

FULL, FROZEN = Training(), Training(mode="frozen")
LORA_ALL = Training(mode="lora", rank=3, targets=("q", "k", "v", "o", "gate", "up", "down"))
LORA_GATE = Training(mode="lora", rank=2, targets=("gate",))
LORA_QV = Training(mode="lora", rank=2, targets=("q", "v"))

LLM = Transformer(layers=2, hidden=24, heads=4, kv_heads=2, head_dim=6, ffn=40, gated_mlp=True, causal=True, norm="rms")
CLIP = Transformer(
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=4,
    head_dim=4,
    ffn=36,
    gated_mlp=False,
    causal=False,
    norm="layer",
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    norm_first_extra=True,
    final_norm=False,
)
WHISPER = replace(CLIP, key_bias=False, norm_first_extra=False, final_norm=True)
QWEN_VISION = replace(
    CLIP,
    layers=3,
    norm="rms",
    gated_mlp=True,
    qk_norm=True,
    norm_first_extra=False,
    final_norm=True,
    window_tokens=5,
    global_layers=(1,),
)
MLLAMA = replace(LLM, layers=3, cross_layers=(1,), cross_width=24, qk_norm=True)

NOTHING = Distribution(values=(0.0,), weights=(1.0,))
LINK = Link(bytes_per_s=1e10, latency_s=1e-5, fraction=0.5, source="made up")
DEVICE = Device(
    name="toy",
    memory_bytes=10**9,
    memory_bytes_per_s=1e11,
    fp32_flops_per_s=1e12,
    bf16_flops_per_s=2e12,
    fp16_flops_per_s=None,
    gemm_fraction=0.5,
    attention_fraction=0.25,
    memory_fraction=0.5,
    launch_s=1e-6,
    reserved_bytes=0,
    source="made up",
)


def _llm(training: Training, shape: Transformer = LLM) -> ModelModule:
    vocabulary = Vocabulary(size=50)
    return ModelModule(
        name="llm", kind="language_model", modality="text", transformer=shape, vocabulary=vocabulary, training=training
    )


def _projector(name: str, training: Training, shape: Projector) -> ModelModule:
    return ModelModule(name=name, kind="projector", modality="vision", projector=shape, training=training)


def _vision(training: Training, shape: Transformer, vision: VisionInput) -> ModelModule:
    return ModelModule(
        name="vision", kind="vision_encoder", modality="vision", transformer=shape, vision=vision, training=training
    )


def _chain(*names: str, last: str = "merge") -> tuple[ModelEdge, ...]:
    *inner, encoder_end = [ModelEdge(producer=a, consumer=b, kind="input") for a, b in pairwise(names)]
    return (*inner, replace(encoder_end, kind=last))


def llava(vision: Training, projector: Training, llm: Training) -> Model:
    """CLIP with class token, learned positions and pre-norm; class token dropped; two-linear projector."""
    clip = VisionInput(patch=2, image_size=6, class_token=True, learned_positions=True)
    modules = (
        _vision(vision, CLIP, clip),
        _projector("projector", projector, Projector(dims=(16, 20, 24))),
        _llm(llm),
    )
    return Model(name="llava", modules=modules, edges=_chain("vision", "projector", "llm"))


def qwen_vl(vision: Training, projector: Training, llm: Training) -> Model:
    """Native resolution, windows, RMS norm, rotary, q and k norms; merger of 2 x 2 with norm before."""
    native = VisionInput(patch=2, temporal_patch=2)
    merger = Projector(dims=(64, 64, 24), merge=4, norm="rms", norm_before_merge=True)
    modules = (_vision(vision, QWEN_VISION, native), _projector("projector", projector, merger), _llm(llm))
    return Model(name="qwen", modules=modules, edges=_chain("vision", "projector", "llm"))


def mllama(vision: Training, projector: Training, llm: Training) -> Model:
    """Tiles that attend to each other, class tokens kept, cross-attention with q and k norms."""
    tiled = VisionInput(patch=2, image_size=4, class_token=True, keep_class_token=True, tiles=2, joint_tiles=True)
    one_linear = Projector(dims=(16, 24), norm="layer")
    modules = (_vision(vision, CLIP, tiled), _projector("projector", projector, one_linear), _llm(llm, MLLAMA))
    return Model(name="mllama", modules=modules, edges=_chain("vision", "projector", "llm", last="cross_attention"))


def omni(audio: Training, projector: Training, llm: Training, *, wide_table: bool = True) -> Model:
    """Whisper encoder with pooling, a projector that drops remainders, and a talker on the last hidden states."""
    talker_shape = replace(LLM, layers=1, hidden=12, heads=2, kv_heads=1)
    whisper = AudioInput(mel_bins=7, frames_per_s=10, pad_s=None, pool=2, positions=40)
    modules = (
        ModelModule(
            name="audio",
            kind="audio_encoder",
            modality="audio",
            transformer=WHISPER,
            audio=whisper,
            training=audio,
        ),
        _projector("projector", projector, Projector(dims=(32, 24), merge=2, bias=False)),
        _llm(llm),
        ModelModule(
            name="talker",
            kind="language_model",
            modality="speech",
            transformer=talker_shape,
            vocabulary=Vocabulary(size=30, width=24 if wide_table else None),
            training=llm,
        ),
    )
    edges = (*_chain("audio", "projector", "llm"), ModelEdge(producer="llm", consumer="talker", kind="hidden"))
    return Model(name="omni", modules=modules, edges=edges)


def scenario_of(model: Model, precision: Dtype = "fp32", samples: tuple[Sample, ...] = ()) -> Scenario:
    data = Data(
        text_tokens=NOTHING,
        images=NOTHING,
        image_sizes=(),
        audio_clips=NOTHING,
        audio_s=NOTHING,
        speech_tokens=NOTHING,
        manifest=samples,
    )
    pool = Pool(device=DEVICE, nodes=2, devices_per_node=4, node_link=LINK)
    return Scenario(
        name=model.name,
        model=model,
        data=data,
        global_batch=max(1, len(samples)),
        precision=precision,
        optimizer=Optimizer(),
        cluster=Cluster(name="toy", pools=(pool,), network_link=LINK),
        constraints=Constraints(),
    )


def graph_of(model: Model) -> ComputationGraph:
    return build_graph(scenario_of(model))


def microbatch_of(scenario: Scenario, samples: tuple[Sample, ...], first_index: int = 0) -> Microbatch:
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return make_microbatch(
        scenario,
        samples,
        indices=range(first_index, first_index + len(samples)),
        targets_in_batch={module.name: 10 for module in scenario.model.modules},
        raw_modules=[module.name for module in scenario.model.modules if module.projector is None],
        dtype=dtypes[scenario.precision],
        device=torch.device("cpu"),
    )
