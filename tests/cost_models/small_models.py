"""Hand-made scenarios for the cost models, without torch."""

from dataclasses import replace

from mmplan.scenario.cluster import Cluster, Device, Link, Pool
from mmplan.scenario.scenario import (
    AudioInput,
    Constraints,
    Data,
    Distribution,
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

FROZEN = Training(mode="frozen")
NODE_LINK = Link(bytes_per_s=100e9, latency_s=2e-6, fraction=0.5, source="made up")
NETWORK_LINK = Link(bytes_per_s=10e9, latency_s=10e-6, fraction=0.5, source="made up")
DEVICE = Device(
    name="toy",
    memory_bytes=10**9,
    memory_bytes_per_s=1e12,
    fp32_flops_per_s=1e12,
    bf16_flops_per_s=8e12,
    fp16_flops_per_s=8e12,
    gemm_fraction=0.5,
    attention_fraction=0.25,
    memory_fraction=0.5,
    launch_s=1e-6,
    reserved_bytes=0,
    source="made up",
)
# meta-llama/Meta-Llama-3-8B config.json
LLAMA_8B = Transformer(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, gated_mlp=True, causal=True, norm="rms"
)
LLM = replace(LLAMA_8B, layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128)
VIT = replace(LLM, kv_heads=4, hidden=32, head_dim=8, gated_mlp=False, causal=False, norm="layer", final_norm=False)
NOTHING = Distribution(values=(0.0,), weights=(1.0,))


def fixed(value: float) -> Distribution:
    return Distribution(values=(value,), weights=(1.0,))


def language_model(
    shape: Transformer = LLM, *, vocabulary: int = 256, tied: bool = False, training: Training | None = None
) -> ModelModule:
    return ModelModule(
        name="llm",
        kind="language_model",
        modality="text",
        transformer=shape,
        vocabulary=Vocabulary(size=vocabulary, tied=tied),
        training=training or Training(),
    )


def vision(training: Training | None = None, image_size: int | None = 8) -> ModelModule:
    return ModelModule(
        name="vision",
        kind="vision_encoder",
        modality="vision",
        transformer=VIT,
        vision=VisionInput(patch=2, image_size=image_size, class_token=image_size is not None),
        training=training or Training(),
    )


def audio(training: Training | None = None) -> ModelModule:
    return ModelModule(
        name="audio",
        kind="audio_encoder",
        modality="audio",
        transformer=VIT,
        audio=AudioInput(mel_bins=8, pad_s=None, pool=2),
        training=training or Training(),
    )


def projector(name: str, training: Training | None = None, merge: int = 1) -> ModelModule:
    return ModelModule(
        name=name,
        kind="projector",
        modality="vision",
        projector=Projector(dims=(32 * merge, 48, 64), merge=merge),
        training=training or Training(),
    )


def edge(producer: str, consumer: str, kind: str = "merge") -> ModelEdge:
    return ModelEdge(producer=producer, consumer=consumer, kind=kind)  # type: ignore[arg-type]


def vision_audio_model(vision_training: Training | None = None, projector_training: Training | None = None) -> Model:
    modules = (
        vision(vision_training),
        projector("projector", projector_training),
        audio(FROZEN),
        projector("audio_projector"),
        language_model(),
    )
    edges = (
        edge("vision", "projector", "input"),
        edge("projector", "llm"),
        edge("audio", "audio_projector", "input"),
        edge("audio_projector", "llm"),
    )
    return Model(name="vision and audio", modules=modules, edges=edges)


def scenario_of(model: Model, *, samples: tuple[Sample, ...] = (), device: Device = DEVICE) -> Scenario:
    pool = Pool(device=device, nodes=2, devices_per_node=8, node_link=NODE_LINK)
    return Scenario(
        name="toy",
        model=model,
        data=Data(
            text_tokens=fixed(16),
            images=fixed(1),
            image_sizes=((8, 8),),
            audio_clips=NOTHING,
            audio_s=NOTHING,
            speech_tokens=NOTHING,
            manifest=samples,
        ),
        global_batch=8,
        precision="bf16",
        optimizer=Optimizer(),
        cluster=Cluster(name="toy", pools=(pool,), network_link=NETWORK_LINK),
        constraints=Constraints(),
    )
