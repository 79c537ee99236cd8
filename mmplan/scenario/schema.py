"""The form of a scenario file, as pydantic models: what may be written, with a sentence on every key.

`load.py` turns them into a `Scenario`. Everything is strict: `true` is no number, `4.0` is no count, unknown keys are
refused. Defaults of a module's block follow its kind: encoders are ViT/Whisper-like (LayerNorm, biases, plain MLP),
language models LLaMA-like (RMSNorm, no biases, gated MLP, causal).
"""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from mmplan.scenario.schema_base import (
    NAME_OR_MAPPING,
    Count,
    DtypeName,
    EncodeTogether,
    Layers,
    ModuleName,
    ModulesApart,
    Name,
    PrecisionSpec,
    Spread,
    Strict,
    Width,
)
from mmplan.scenario.schema_cluster import ClusterSpec
from mmplan.scenario.schema_recorded import RecordedSpec
from mmplan.scenario.schema_technique import RecipeSpec, TechniqueSpec
from mmplan.scenario.schema_values import (
    Compressions,
    CountOrList,
    DistributionSpec,
    EitherWay,
    Fp8s,
    ImageSizes,
    Offloads,
    Recomputes,
    Schedules,
    Shardings,
)


class MoeSpec(Strict):
    """Routed experts in place of the MLP."""

    experts: Count = Field(description="routed experts of a layer")
    topk: Count = Field(description="experts of a token")
    expert_ffn: Width = Field(description="inner width of an expert")
    shared_ffn: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=0, description="inner width of the shared experts together; 0: none"
    )
    first_dense: Annotated[int, Field(ge=0, le=2_000)] = Field(default=0, description="first layers without experts")
    every: Layers = Field(default=1, description="of the others, each such layer has experts (2: 1, 3, 5, ...)")
    scoring: Literal["softmax", "softmax_all", "sigmoid", "sigmoid_plain"] = Field(
        default="softmax", description="weights of the chosen experts: over them or over all; sigmoid (DeepSeek-V3)"
    )
    router_bias: bool = Field(default=False, description="bias in the router's linear")
    capacity_factor: Annotated[float, Field(ge=0.01, le=100)] | None = Field(
        default=None, description="rows of every expert over the mean, filled up or dropped; default: none is dropped"
    )
    imbalance: Annotated[float, Field(ge=1, le=1000)] = Field(
        default=1.0, description="rows of the busiest expert rank over the mean"
    )


class MlaSpec(Strict):
    """Multi-head latent attention (DeepSeek-V2)."""

    q_lora: Width | None = Field(default=None, description="width queries pass through; default: projected at once")
    kv_lora: Width = Field(description="width keys and values pass through")
    qk_nope: Width = Field(description="width of a head's queries and keys without positions")
    qk_rope: Width = Field(description="width with rotary positions, shared by all heads' keys")
    v_dim: Width = Field(description="width of a head's values")


class BlockSpec(Strict):
    """Keys that every module with transformer blocks shares."""

    layers: Layers = Field(description="number of transformer blocks")
    hidden: Width = Field(description="width of the residual stream")
    heads: Count = Field(description="query heads")
    kv_heads: Count | None = Field(default=None, description="key/value heads; default: as many as heads")
    head_dim: Count | None = Field(default=None, description="width of a head; default: hidden / heads")
    ffn: Width = Field(description="inner width of the MLP")
    gated_mlp: bool | None = Field(default=None, description="SwiGLU (three matrices) instead of two; default by kind")
    norm: Literal["layer", "rms"] | None = Field(default=None, description="kind of norm; default by kind")
    qkv_bias: bool | None = Field(default=None, description="biases in the query, key and value projections")
    key_bias: bool = Field(
        default=True, description="with qkv_bias: false leaves the key projection without one (Whisper)"
    )
    out_bias: bool | None = Field(default=None, description="bias in the attention output projection")
    mlp_bias: bool | None = Field(default=None, description="biases in the MLP")
    qk_norm: bool = Field(default=False, description="norms on queries and keys")
    qk_norm_whole: bool = Field(default=False, description="these norms act on all heads at once (InternViT)")
    activation: Literal["gelu", "silu"] | None = Field(
        default=None, description="of the MLP; default: silu when gated, else gelu"
    )
    post_norms: bool = Field(default=False, description="norms also behind attention and MLP (Gemma)")
    layer_scale: bool = Field(default=False, description="learned scales behind attention and MLP (InternViT)")
    final_norm: bool = Field(default=True, description="a norm after the last block")
    window_tokens: Count | None = Field(default=None, description="attention within windows of this many tokens")
    sliding: bool = Field(default=False, description="the window slides: each token sees so many before it")
    global_layers: list[Annotated[int, Field(ge=0)]] = Field(default=[], description="0-based layers without window")
    moe: MoeSpec | None = Field(default=None, description="routed experts in place of the MLP")
    mla: MlaSpec | None = Field(default=None, description="latent attention")
    pad_heads: bool = Field(
        default=False, description="tp may not divide heads: fill ranks up, repeat key/value heads, at their full cost"
    )


class VisionSpec(BlockSpec):
    """A vision transformer. Images are cut into patches; each patch is a token."""

    kind: Literal["vision_encoder"]
    patch: Count = Field(description="pixels per side of a patch")
    channels: Count = Field(default=3, description="colour channels")
    temporal_patch: Count = Field(default=1, description="frames per patch (Qwen: 2; a still image is shown twice)")
    image_size: Count | None = Field(
        default=None, description="fixed square size in pixels; default: sizes of the data"
    )
    class_token: bool = Field(default=False, description="one extra token per image")
    keep_class_token: bool = Field(default=False, description="hand the class token on to the next module")
    learned_positions: bool = Field(default=False, description="a stored table of positions (needs image_size)")
    position_rows: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=0, description="rows of a stored table that is stretched over images of any size"
    )
    patch_bias: bool = Field(default=False, description="bias in the patch embedding")
    first_norm: bool = Field(default=False, description="a norm before the first block (CLIP)")
    tiles: Count = Field(default=1, description="every image becomes this many images of image_size")
    joint_tiles: bool = Field(default=False, description="tiles attend to each other")


class AudioSpec(BlockSpec):
    """A Whisper-style audio encoder: two convolutions, the second of stride 2, then blocks."""

    kind: Literal["audio_encoder"]
    mel_bins: Count = Field(description="mel filters per frame")
    frames_per_s: Count = Field(default=100, description="mel frames per second")
    pad_s: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        default=30.0, description="seconds that every clip is padded to; null: clips keep their length"
    )
    pool: Count = Field(default=1, description="tokens averaged into one after the last block")
    positions: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=0, description="rows of a stored position table"
    )


class TextSpec(BlockSpec):
    """A text encoder (CLIP's, T5's): token table and blocks, no vocabulary head."""

    kind: Literal["text_encoder"]
    vocabulary: Width = Field(description="number of tokens")
    tokens: Count | None = Field(default=None, description="every sample's tokens, padded; default: its text tokens")
    positions: Literal["learned", "rotary", "none"] = Field(default="learned", description="kind of positions")
    causal: bool = Field(default=False, description="tokens see earlier ones only (CLIP)")
    pad_vocabulary: Count = Field(default=1, description="the table grows to a multiple of this times tp")


class LanguageSpec(BlockSpec):
    """A causal language model with token table and vocabulary head."""

    kind: Literal["language_model"]
    vocabulary: Width = Field(description="number of tokens")
    tied: bool = Field(default=False, description="head and token table share one matrix")
    table_width: Width | None = Field(default=None, description="width of the token table of a talker; default: hidden")
    pad_vocabulary: Count = Field(
        default=1, description="table and head grow to a multiple of this times tp (Megatron: 128)"
    )
    cross_layers: list[Annotated[int, Field(ge=0)]] = Field(
        default=[], description="0-based layers that attend to another module's tokens instead of their own"
    )


class ProjectorSpec(Strict):
    """Linears with GELU between them, from one module's width to another's."""

    kind: Literal["projector"]
    dims: list[Width] = Field(min_length=2, max_length=20, description="widths: dims[0] -> dims[1] -> ...")
    merge: Count = Field(default=1, description="neighbouring tokens concatenated before the first linear")
    pool: Count = Field(default=1, description="neighbouring tokens averaged before they are concatenated")
    gated: bool = Field(default=False, description="the last two linears are a gated MLP")
    norm: Literal["layer", "rms"] | None = Field(default=None, description="norm before the first linear")
    norm_before_merge: bool = Field(default=False, description="the norm acts on single tokens, before they are merged")
    bias: bool = Field(default=True, description="biases in the linears")


ModuleSpec = Annotated[VisionSpec | AudioSpec | TextSpec | LanguageSpec | ProjectorSpec, Field(discriminator="kind")]


class ModelSpec(Strict):
    """A Hugging Face config (bundled name or path to a config.json), modules and edges, or a recording."""

    hf_config: str | None = Field(
        default=None, description="name of a bundled config or path of a config.json, relative to this file"
    )
    recorded: RecordedSpec | None = Field(default=None, description="a model of one's own, by `mmplan import job`")
    modules: dict[ModuleName, ModuleSpec] | None = Field(default=None, max_length=50, description="modules by name")
    edges: list[list[str]] | None = Field(
        default=None,
        max_length=500,
        description="[producer, consumer], or [producer, consumer, merge | cross_attention | input | hidden | add]; "
        "vision.8 is the output of block 8, and an edge to llm.0 adds to the output of block 0",
    )
    pad_heads: bool = Field(default=False, description="pad_heads of every module")
    pad_vocabulary: Count = Field(default=1, description="pad_vocabulary of every module that sets none")


class LoraSpec(Strict):
    """Low-rank adapters on a frozen module."""

    rank: Annotated[int, Field(ge=1, le=8192)] = Field(description="inner width of the adapters")
    targets: list[Literal["q", "k", "v", "o", "gate", "up", "down"]] = Field(
        min_length=1, description="linears that get an adapter"
    )


class LoraTraining(Strict):
    """`{lora: {rank: 16, targets: [q, v]}}`."""

    lora: LoraSpec


TrainingSpec = Annotated[
    Annotated[Literal["full", "frozen"], Tag("name")] | Annotated[LoraTraining, Tag("mapping")], NAME_OR_MAPPING
]


class DataSpec(Strict):
    """Sizes of samples: distributions per modality, or the rows of a manifest."""

    text_tokens: DistributionSpec | None = Field(
        default=None, description="text tokens per sample, without merged tokens"
    )
    images: DistributionSpec | None = Field(default=None, description="images per sample; default 0")
    image_size: ImageSizes | None = Field(
        default=None, description="pixels: 336, '480x640' (height x width), or a list"
    )
    audio_clips: DistributionSpec | None = Field(default=None, description="audio clips per sample; default 0")
    audio_seconds: DistributionSpec | None = Field(default=None, description="seconds per clip")
    speech_tokens: DistributionSpec | None = Field(default=None, description="tokens a talker produces; default 0")
    manifest: str | None = Field(
        default=None, description=".jsonl or .csv with one sample per row, relative to this file"
    )


class BatchSpec(Strict):
    """The batch of one optimizer step."""

    global_: Annotated[int, Field(ge=1, le=10_000_000)] = Field(alias="global", description="samples per step")


class OptimizerSpec(Strict):
    """Optimizer and the type gradients are kept in."""

    name: Literal["adamw", "sgd"] = Field(default="adamw", description="adamw keeps two moments per weight, sgd none")
    learning_rate: Annotated[float, Field(gt=0, le=100)] = Field(
        default=1e-4, description="used when the plan is executed"
    )
    gradient_dtype: DtypeName = Field(default="fp32", description="type gradients are summed in")


class ConstraintsSpec(Strict):
    """What a plan may not do."""

    no_split: list[str] = Field(
        default=[], max_length=1000, description="layer ids or ranges (vision.0-7) that no pipeline cut may touch"
    )
    sensitivity: str | None = Field(
        default=None,
        description="a JSON file with values of layers, relative to this file: the most sensitive are zones",
    )
    percentile: Annotated[float, Field(ge=0, lt=100)] = Field(
        default=85.0,
        description="layers above this percentile of their modality are zones, instead of the sensitivity file's rule",
    )
    forbid: list[Literal["split", "tensor_sharding", "fp8", "low_precision_reduce", "compression"]] = Field(
        default=[], description="what zones forbid inside, besides cuts"
    )
    memory_headroom: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.08, description="part of memory that stays free"
    )
    tp: CountOrList = Field(default=[], description="allowed tensor-parallel degrees")
    pp: CountOrList = Field(default=[], description="allowed numbers of stages")
    dp: CountOrList = Field(default=[], description="allowed numbers of replicas")
    microbatch: CountOrList = Field(default=[], description="allowed samples per microbatch")
    schedule: Schedules = Field(default=[], description="allowed schedules")
    cp: CountOrList = Field(default=[], description="allowed context-parallel degrees")
    ep: CountOrList = Field(default=[], description="allowed expert-parallel degrees")
    etp: CountOrList = Field(default=[], description="allowed ranks that share one expert; while ep is 1 that is tp")
    vp: CountOrList = Field(default=[], description="allowed chunks of layers per rank (several: interleaved 1F1B)")
    sharding: Shardings = Field(default=[], description="allowed ZeRO shardings over the replicas")
    recompute: Recomputes = Field(default=[], description="what stages may recompute; full: also some of the blocks")
    spread: Spread | None = Field(
        default=None,
        description="modules not split by tp: each rank runs them on some images or clips, or with {NAME: patches} on "
        "some rows of all of them, projectors behind them too; default: split or by images, as is best; any: also by "
        "patches",
    )
    offload: Offloads = Field(
        default=["none"],
        min_length=1,
        description="what may lie in host memory, if that is faster: optimizer states; parameters: weights, too; "
        "activations: what blocks keep for their backward; optimizer+activations: both",
    )
    compression: Compressions = Field(
        default=["none"],
        min_length=1,
        description="topk (5 % in 5 bits), fp8 (20 % in 8): gradients between replicas may be compressed, if that is "
        "faster; steps are then no longer those of the uncompressed sum, see docs/compression.md",
    )
    fp8: Fp8s = Field(
        default=["none"],
        min_length=1,
        description="tensor, block, mx: products of blocks may be in FP8 so, if that is faster, but for zones that "
        "forbid fp8",
    )
    sequence_parallel: EitherWay = Field(
        default=[],
        description="rows of language models split over tp: true, false or any; default: as technique says",
    )
    pad_heads: bool = Field(
        default=False, description="tp may exceed or not divide heads: as model.pad_heads, for every module"
    )
    modules: ModulesApart = Field(
        default={},
        description="modules on ranks of their own, with what follows them up to a language model, and their degrees; "
        "any: whichever are best on some, or none",
    )
    encode_together: EncodeTogether = Field(
        default={},
        description="{NAME: [1, 4]}: microbatches that an encoder may run at once; any: 1, 2, 4 or 8",
    )
    prefetch: list[ModuleName] | Literal["any"] = Field(
        default=[], description="frozen encoders that may run the next step's batch, where that is faster; any: all"
    )


class ScenarioSpec(Strict):
    """A training job: model, data and machines."""

    name: Name
    source: str = Field(default="", description="where the facts come from")
    model: ModelSpec
    train: dict[ModuleName, TrainingSpec] = Field(
        default={}, description="per module: full (default), frozen or {lora: {rank, targets}}"
    )
    data: DataSpec = DataSpec()
    batch: BatchSpec
    precision: PrecisionSpec = Field(
        description="type of weights in compute and of activations: one, or by module, modality and default"
    )
    optimizer: OptimizerSpec = OptimizerSpec()
    cluster: ClusterSpec
    constraints: ConstraintsSpec = ConstraintsSpec()
    technique: TechniqueSpec = TechniqueSpec()
    recipes: dict[Name, RecipeSpec] = Field(
        default={}, max_length=50, description="published configurations of this job by name, to compare plans with"
    )
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(default=0, description="of sample sizes and weights")


def scenario_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a scenario file, for editors."""
    schema: dict[str, Any] = ScenarioSpec.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "mmplan scenario"}
