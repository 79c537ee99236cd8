"""Small real scenarios, plans made by hand, and prices that make stages as slow as a test wants."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout, Trained
from mmplan.cost_models.load import Load
from mmplan.planner.plan import Certificate, Plan, StagePlan, scenario_hash
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
from mmplan.scenario.schedule_names import ScheduleName

DEVICE = Device(
    name="toy",
    memory_bytes=2**30,
    memory_bytes_per_s=1e11,
    fp32_flops_per_s=1e12,
    bf16_flops_per_s=None,
    fp16_flops_per_s=None,
    gemm_fraction=0.5,
    attention_fraction=0.5,
    memory_fraction=0.5,
    launch_s=1e-6,
    reserved_bytes=1000,
    source="made up",
)
LINK = Link(bytes_per_s=1e10, latency_s=1e-6, fraction=1.0, source="made up")


def transformer(layers: int, *, causal: bool = False) -> Transformer:
    return Transformer(
        layers=layers,
        hidden=16,
        heads=2,
        kv_heads=2,
        head_dim=8,
        ffn=32,
        gated_mlp=causal,
        causal=causal,
        norm="rms" if causal else "layer",
    )


def fixed(value: float) -> Distribution:
    return Distribution(values=(value,), weights=(1.0,))


def language_model(layers: int) -> ModelModule:
    stack = transformer(layers, causal=True)
    return ModelModule(
        name="llm", kind="language_model", modality="text", transformer=stack, vocabulary=Vocabulary(size=64)
    )


def scenario(
    *,
    llm_layers: int,
    vision_layers: int = 0,
    audio_layers: int = 0,
    frozen_vision: bool = False,
    global_batch: int = 8,
    manifest: tuple[Sample, ...] = (),
    devices: int = 8,
    constraints: Constraints | None = None,
) -> Scenario:
    """A language model, with a vision and an audio encoder (each behind a projector) where their layers are given."""
    modules, edges = [language_model(llm_layers)], []
    encoders = []
    if vision_layers:
        vision = VisionInput(patch=4, image_size=8, learned_positions=True)
        training = Training(mode="frozen" if frozen_vision else "full")
        encoders.append(
            ModelModule(
                name="vision",
                kind="vision_encoder",
                modality="vision",
                transformer=transformer(vision_layers),
                vision=vision,
                training=training,
            )
        )
    if audio_layers:
        audio = AudioInput(mel_bins=4, pad_s=None)
        encoders.append(
            ModelModule(
                name="audio",
                kind="audio_encoder",
                modality="audio",
                transformer=transformer(audio_layers),
                audio=audio,
            )
        )
    for encoder in encoders:
        name = f"{encoder.name}_projector"
        modules = [
            encoder,
            ModelModule(name=name, kind="projector", modality=encoder.modality, projector=Projector(dims=(16, 16))),
            *modules,
        ]
        edges += [
            ModelEdge(producer=encoder.name, consumer=name, kind="input"),
            ModelEdge(producer=name, consumer="llm", kind="merge"),
        ]
    return Scenario(
        name="toy",
        model=Model(name="toy", modules=tuple(modules), edges=tuple(edges)),
        data=Data(
            text_tokens=fixed(6),
            images=fixed(1 if vision_layers else 0),
            image_sizes=((8, 8),),
            audio_clips=fixed(1 if audio_layers else 0),
            audio_s=fixed(0.1),
            speech_tokens=fixed(0),
            manifest=manifest,
        ),
        global_batch=global_batch,
        precision="fp32",
        optimizer=Optimizer(),
        cluster=Cluster(
            name="toy",
            pools=(Pool(device=DEVICE, nodes=1, devices_per_node=devices, node_link=LINK),),
            network_link=LINK,
        ),
        constraints=constraints or Constraints(),
    )


def plan(
    of: Scenario,
    stages: Sequence[Sequence[str]],
    *,
    schedule: ScheduleName = "1f1b",
    dp: int = 1,
    microbatch_size: int = 1,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
) -> Plan:
    """A plan with those stages; its recorded numbers are not true, which only the checker minds."""
    return Plan(
        scenario=of,
        scenario_hash=scenario_hash(of),
        dp=dp,
        tp=1,
        microbatch_size=microbatch_size,
        microbatches=of.global_batch // (dp * microbatch_size),
        schedule=schedule,
        stages=tuple(
            StagePlan(
                layers=tuple(layers),
                forward_s=forward_s,
                backward_s=backward_s,
                finish_s=0.0,
                in_flight=1,
                memory_bytes=1,
                capacity_bytes=2**30,
            )
            for layers in stages
        ),
        certificate=Certificate(objective_s=1.0, bound_s=0.0, gap=1.0, status="given", wall_s=0.0),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SetPrices:
    """A cost model that charges the first layer of a stage for all of it; unnamed layers are free."""

    forward: Mapping[str, float]
    dgrad: Mapping[str, float] = field(default_factory=dict)
    wgrad: Mapping[str, float] = field(default_factory=dict)
    transfer: float = 0.0
    reduce: float = 0.0
    update: float = 0.0

    def forward_s(self, layer: Layer, load: Load, layout: int | Layout) -> float:
        return self.forward.get(layer.id, 0.0)

    def dgrad_s(self, layer: Layer, load: Load, layout: int | Layout) -> float:
        return self.dgrad.get(layer.id, 0.0)

    def wgrad_s(self, layer: Layer, load: Load, layout: int | Layout) -> float:
        return self.wgrad.get(layer.id, 0.0)

    def backward_s(self, layer: Layer, load: Load, layout: int | Layout) -> float:
        return self.dgrad_s(layer, load, layout) + self.wgrad_s(layer, load, layout)

    def transfer_s(self, size_bytes: float, same_node: bool) -> float:
        return self.transfer

    def make_whole_s(self, bytes_made: float, layout: Layout) -> tuple[float, float]:
        return 0.0, 0.0

    def reduce_s(self, trained: Trained, layout: Layout, ranks_per_node: int) -> float:
        return self.reduce if layout.replicas > 1 else 0.0

    def gather_s(self, trained: Trained, layout: Layout, ranks_per_node: int) -> float:
        return 0.0

    def sharding_s(self, held: Trained, trained: Trained, layout: Layout) -> tuple[float, float]:
        return 0.0, 0.0

    @property
    def serial_share(self) -> float:
        return 0.0

    def update_s(self, trained: Trained, layout: Layout) -> float:
        return self.update


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPrices(SetPrices):
    """Every layer's forward takes a second per token."""

    forward: Mapping[str, float] = field(default_factory=dict)

    def forward_s(self, layer: Layer, load: Load, layout: int | Layout) -> float:
        return load.tokens
