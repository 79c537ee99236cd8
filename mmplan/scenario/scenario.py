"""What is trained, on which data and machines: the frozen values every later step reads.

Files are read in `schema.py` and `load.py`; nothing here knows YAML. Layer ids are `module.index` for repeated blocks
(`vision.0`, `llm.31`) and `module.embed`, `module.head`, `module.loss` for the layers around them.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from mmplan.scenario.asked import Forbidden, OwnRanks, Zone
from mmplan.scenario.attention_forms import GatedDelta, Mla
from mmplan.scenario.cluster import Cluster
from mmplan.scenario.recipe import Recipe
from mmplan.scenario.recorded import Recorded
from mmplan.scenario.steps import Form
from mmplan.scenario.technique import Compression, Fp8, Offload, Recompute, Sharding, Technique

ModuleKind = Literal[
    "vision_encoder", "audio_encoder", "text_encoder", "encoder", "projector", "language_model", "recorded"
]
Modality = Literal["vision", "audio", "text", "speech"]
EdgeKind = Literal["input", "merge", "cross_attention", "hidden", "add"]
Dtype = Literal["fp32", "bf16", "fp16"]

DTYPE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How a module is trained; `targets` are the linears that get an adapter: q, k, v, o, gate, up, down."""

    mode: Literal["full", "frozen", "lora"] = "full"
    rank: int = 0
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Moe:
    """Routed experts, each a gated MLP as wide as `expert_ffn`, in place of the MLP of some layers.

    Layer i (from 0) has experts when i >= first_dense and (i + 1) is a multiple of `every`; the others keep their MLP.
    """

    experts: int
    topk: int
    expert_ffn: int
    shared_ffn: int = 0  # width of a further MLP that every token passes
    shared_gate: bool = False  # times the sigmoid of one number of each token (Qwen2-MoE)
    first_dense: int = 0
    every: int = 1
    scoring: Literal["softmax", "softmax_all", "sigmoid", "sigmoid_plain"] = "softmax"
    router_bias: bool = False
    capacity_factor: float | None = None  # None: no token is dropped
    imbalance: float = 1.0  # rows of the busiest expert rank over the mean

    def in_layer(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        return index >= self.first_dense and (index + 1) % self.every == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Blocks of a stack (0-based) that differ from its others in more than windows; `shape.layers` has no meaning."""

    layers: tuple[int, ...]
    shape: "Transformer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformer:
    """A stack of `layers` identical blocks, apart from window and cross-attention positions (0-based) and `variants`.

    `stored`: numbers that each block holds beside its products (gates, scales, further norms). They are trained and
    kept like all others; their arithmetic is not counted.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated_mlp: bool
    causal: bool
    norm: Literal["layer", "rms"]
    qkv_bias: bool = False
    key_bias: bool = True  # with `qkv_bias`: False leaves the key projection without one (Whisper)
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_kind: Literal["layer", "rms"] | None = None  # None: as `norm`
    qk_norm_whole: bool = False  # with `qk_norm`: over all heads at once, with a scale of their joint width
    activation: Literal["gelu", "silu"] | None = None  # of the MLP; None: silu when gated, else gelu
    post_norms: bool = False  # norms on what attention and MLP add to the residual stream (Gemma)
    layer_scale: bool = False  # learned scales on what attention and MLP add (InternViT)
    norm_first_extra: bool = False  # a norm between embedding and first block (CLIP's pre_layernorm)
    final_norm: bool = True  # a norm after the last block, inside the last block's layer
    window_tokens: int | None = None  # attention within windows of this many tokens ...
    sliding: bool = False  # ... that slide: a token sees itself and the window_tokens - 1 before it
    global_layers: tuple[int, ...] = ()  # ... except in these layers
    cross_layers: tuple[int, ...] = ()  # these layers attend to another module's tokens instead of their own
    cross_width: int | None = None  # hidden size of those tokens
    moe: Moe | None = None
    mla: Mla | None = None  # then head_dim and kv_heads have no meaning
    pad_heads: bool = False  # heads are filled up to a multiple of tp, key-value heads repeated
    norm_bias: bool = True  # with `norm: layer`: shifts beside the scales (Cohere has none)
    pre_norms: bool = True  # norms in front of attention and MLP; False with `post_norms`: OLMo 2
    parallel: bool = False  # attention and MLP read one norm and are added together (Cohere)
    # What attention gives times the sigmoid of a further projection: of every column (Qwen3-Next) or head (Step 3.7).
    out_gate: Literal["column", "head"] | None = None
    keys_as_values: bool = False  # no value projection: values are the projected keys (Gemma 4)
    cross_also: bool = False  # cross layers attend to their own tokens first (Whisper's decoder)
    delta: GatedDelta | None = None  # in place of attention
    short_conv: int = 0  # in place of attention: kernel of a causal convolution between two gates (LFM2)
    stored: int = 0
    variants: tuple[Variant, ...] = ()

    def at(self, index: int) -> "Transformer":
        """The shape of block `index`."""
        return next((variant.shape for variant in self.variants if index in variant.layers), self)

    def shapes(self) -> "tuple[Transformer, ...]":
        """The unlike shapes among the blocks."""
        return tuple(dict.fromkeys(self.at(index) for index in range(self.layers)))

    @property
    def mlp_activation(self) -> Literal["gelu", "silu"]:
        return self.activation or ("silu" if self.gated_mlp else "gelu")


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionInput:
    """Patch embedding; `image_size` is None for native resolution (sizes come from the data)."""

    patch: int
    channels: int = 3
    temporal_patch: int = 1
    image_size: int | None = None
    class_token: bool = False
    keep_class_token: bool = False  # False: dropped after the last block, so the next module sees patches only
    learned_positions: bool = False
    position_rows: int = 0  # rows of a stored table that is stretched over an image of any size
    patch_bias: bool = False
    tiles: int = 1  # every image becomes this many images of `image_size` ...
    joint_tiles: bool = False  # ... which attend to each other: one sequence of all tiles' tokens (Llama 3.2)


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioInput:
    """Whisper-style front end: two convolutions (kernel 3) over frames of which the second has stride 2.

    With `channels` (Qwen3-Omni): as many convolutions of kernel 3 and stride 2 over frames and mel bins, in chunks of
    `chunk_frames` to whose multiple a clip is filled up, then one linear over what is left of the bins.
    """

    mel_bins: int
    frames_per_s: int = 100
    pad_s: float | None = 30.0  # clips are padded to this length; None keeps their own
    pool: int = 1  # encoder tokens averaged into one after the last block
    positions: int = 0  # rows of a stored position table, one per token before pooling; 0: computed, no weights
    channels: tuple[int, ...] = ()
    chunk_frames: int = 0
    stride: int = 2  # frames of a token, before pooling

    def tokens(self, frames: int) -> int:
        """Tokens of so many mel frames, before pooling."""
        # each convolution, of kernel 3, stride 2 and padding 1, leaves half of them, rounded up
        chunk = -(-self.chunk_frames // 2 ** len(self.channels))
        return frames // self.chunk_frames * chunk if self.channels else frames // self.stride


@dataclass(frozen=True, kw_only=True, slots=True)
class TextInput:
    """Token ids of a text encoder: `tokens` of every sample (padded), or its text tokens when None.

    `learned`: a stored table of `tokens` positions (CLIP); `none`: positions inside attention that cost next to nothing
    (T5's buckets, of which no weights are counted).
    """

    tokens: int | None = None
    positions: Literal["learned", "rotary", "none"] = "learned"


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Token table and head of a language model; `tied` shares one matrix between them."""

    size: int
    tied: bool = False
    width: int | None = None  # of the token table when it is not `hidden` (a talker's, see `hidden` edges)
    pad_to: int = 1  # rows are filled up to a multiple of this times tp (Megatron: 128)
    elsewhere: bool = False  # the table is that of another module and counted there (BART's encoder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Projector:
    """`pool` neighbouring tokens are averaged, `merge` of the results joined, normalised if `norm`, then they pass
    linears `dims[i] -> dims[i+1]`. `gated`: the last two linears are a gated MLP (a third matrix beside the first).
    `reads`: outputs of so many layers of the producer stand side by side in front of the first linear, and are all
    taken from its last one: so many matrices, whose results are added."""

    dims: tuple[int, ...]
    merge: int = 1
    pool: int = 1
    gated: bool = False
    norm: Literal["layer", "rms"] | None = None
    norm_before_merge: bool = False
    bias: bool = True
    reads: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelModule:
    """One module; which parts are set follows from `kind`. An `encoder` reads another module's tokens."""

    name: str
    kind: ModuleKind
    modality: Modality
    transformer: Transformer | None = None
    vision: VisionInput | None = None
    audio: AudioInput | None = None
    text: TextInput | None = None
    vocabulary: Vocabulary | None = None
    projector: Projector | None = None
    training: Training = field(default_factory=Training)
    source: str = ""
    stored: int = 0  # numbers beside its products, as `Transformer.stored` but in the module's first layer
    whole: bool = False  # tensor parallelism may not split it: a zone forbids tensor_sharding
    precision: Dtype | None = None  # of its weights and activations; None: the scenario's, which then all modules have
    time_factor: float = 1.0  # seconds of its layers, as a run measured them, over those of the cost model
    form: Form | None = None  # layers that are not as `transformer` and `projector` say
    recorded: tuple[str, ...] = ()  # ids of its layers in the recording of the model (kind `recorded`)
    recorded_tp: tuple[int, ...] = ()  # degrees of tensor parallelism that split some layer of that model

    def __post_init__(self) -> None:
        if [self.projector is not None, self.transformer is not None, self.recorded != ()].count(True) != 1:
            raise ValueError(
                f"module '{self.name}' is a projector, has transformer blocks or was recorded, one of these"
            )

    @property
    def output_width(self) -> int:
        """Width of the tokens that the module hands on."""
        if self.projector is not None:
            return self.projector.dims[-1]
        assert self.transformer is not None
        return self.transformer.hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEdge:
    """Tokens of `producer` feed `consumer`.

    `input` feeds a projector; `merge` places the tokens into a language model's sequence; `cross_attention` feeds every
    cross layer; `hidden` hands a language model's last hidden states to another one (a talker) through its own linear
    with bias (producer's hidden -> consumer's hidden). With `Vocabulary.width` set (= producer's hidden) the talker's
    token embeddings are added before that linear and pass it too. `add` adds the tokens, after block `consumer_layer`
    of a language model, to those that the same encoder has merged into its sequence (DeepStack). `producer_layer`: the
    tokens are those of this block instead of the last.
    """

    producer: str
    consumer: str
    kind: EdgeKind
    producer_layer: int | None = None
    consumer_layer: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    name: str
    modules: tuple[ModelModule, ...]
    edges: tuple[ModelEdge, ...]
    recorded: Recorded | None = None  # what its layers do, where all modules are of kind `recorded`

    def module(self, name: str) -> ModelModule:
        """The module of that name; KeyError when there is none."""
        for module in self.modules:
            if module.name == name:
                return module
        raise KeyError(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Sizes of one training sample: text tokens, (height, width) pixels per image, seconds per audio clip,
    speech tokens that a talker has to produce."""

    text_tokens: int
    images: tuple[tuple[int, int], ...] = ()
    audio_s: tuple[float, ...] = ()
    speech_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """`values` drawn with `weights` (they sum to 1); one value means fixed."""

    values: tuple[float, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Sizes of samples, as independent distributions or as the rows of a manifest (`manifest` wins when not empty)."""

    text_tokens: Distribution
    images: Distribution
    image_sizes: tuple[tuple[int, int], ...]  # (height, width), drawn uniformly
    audio_clips: Distribution
    audio_s: Distribution
    speech_tokens: Distribution
    manifest: tuple[Sample, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """`adamw` keeps two fp32 moments (and an fp32 master copy in 16-bit training), `sgd` none."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-4
    gradient_dtype: Dtype = "fp32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraints:
    """What a plan may not do. Empty tuples allow every value.

    `zones` say where `no_split` and `ModelModule.whole` come from; planners read these two (see `zones.py`).
    """

    no_split: tuple[str, ...] = ()  # layer ids: no pipeline cut on any edge that touches them
    zones: tuple[Zone, ...] = ()
    memory_headroom: float = 0.08  # fraction of device memory that stays free
    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    dp: tuple[int, ...] = ()
    microbatch: tuple[int, ...] = ()
    schedule: tuple[str, ...] = ()
    cp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    etp: tuple[int, ...] = ()  # ranks that share one expert: as tp while ep is 1
    vp: tuple[int, ...] = ()  # chunks of layers per pipeline rank
    sharding: tuple[Sharding, ...] = ()
    recompute: tuple[Recompute, ...] = ()
    offload: tuple[Offload, ...] = ("none",)  # what may lie in host memory
    compression: tuple[Compression, ...] = ("none",)  # of gradients between replicas
    fp8: tuple[Fp8, ...] = ("none",)  # of products in blocks
    sequence_parallel: tuple[bool, ...] = ()  # (): as the technique says, which is one of these otherwise
    spread: tuple[str, ...] | None = None  # modules that run whole on part of the samples; None leaves the choice
    # those of them, or where the choice is left those of any, that may cut the rows of their images instead; None: all
    patches: tuple[str, ...] | None = ()
    modules: tuple[OwnRanks, ...] | None = ()  # modules with ranks of their own, (): none; None leaves the choice
    # encoders, each with the numbers of microbatches that it may encode at once; (): each alone; None leaves the choice
    encode_together: tuple[tuple[str, tuple[int, ...]], ...] | None = ()

    prefetch: tuple[str, ...] | None = ()  # frozen encoders that may run a step ahead; None: any

    def forbidding(self, what: Forbidden) -> frozenset[str]:
        """Ids of the layers in zones that forbid it."""
        return frozenset(layer for zone in self.zones if what in zone.forbid for layer in zone.layers)


class HasPrecision(Protocol):
    """A module, its layers, and the edges that leave them."""

    @property
    def precision(self) -> Dtype | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    name: str
    model: Model
    data: Data
    global_batch: int  # samples per optimizer step, over all data-parallel replicas
    precision: Dtype
    optimizer: Optimizer
    cluster: Cluster
    constraints: Constraints
    seed: int = 0
    source: str = ""
    technique: Technique = field(default_factory=Technique)
    recipes: tuple[Recipe, ...] = ()

    def __post_init__(self) -> None:
        if len({module.precision is None for module in self.model.modules}) > 1:
            raise ValueError("all modules have a precision of their own, or none has")

    def precision_of(self, part: HasPrecision) -> Dtype:
        """Type of the weights and activations of a module or layer, or of what travels along an edge."""
        return part.precision or self.precision

    @property
    def precisions(self) -> tuple[Dtype, ...]:
        """Of all modules, each once, in their order."""
        return tuple(dict.fromkeys(self.precision_of(module) for module in self.model.modules))
