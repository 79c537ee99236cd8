"""Small models with experts, latent attention, DeepStack and what else the large families add to a block."""

from dataclasses import replace

from layer_zoo import CLIP, FULL, LLM, QWEN_VISION

from mmplan.scenario.attention_forms import Mla
from mmplan.scenario.scenario import (
    Model,
    ModelEdge,
    ModelModule,
    Moe,
    Projector,
    TextInput,
    Training,
    Transformer,
    VisionInput,
    Vocabulary,
)

EXPERTS = Moe(experts=4, topk=2, expert_ffn=10)
DEEPSEEK_MOE = Moe(experts=6, topk=3, expert_ffn=8, shared_ffn=12, first_dense=1, scoring="sigmoid")
MAVERICK_MOE = Moe(experts=4, topk=1, expert_ffn=10, shared_ffn=10, every=2, scoring="sigmoid_plain", router_bias=True)
LATENT = Mla(q_lora=14, kv_lora=10, qk_nope=4, qk_rope=2, v_dim=6)  # heads of keys and of values equally wide


def language_model(shape: Transformer, training: Training = FULL, pad_to: int = 1) -> ModelModule:
    return ModelModule(
        name="llm",
        kind="language_model",
        modality="text",
        transformer=shape,
        vocabulary=Vocabulary(size=50, pad_to=pad_to),
        training=training,
    )


def text_only(shape: Transformer, training: Training = FULL, pad_to: int = 1) -> Model:
    return Model(name="text", modules=(language_model(shape, training, pad_to),), edges=())


QWEN3_MOE = replace(LLM, moe=EXPERTS, qk_norm=True)
DEEPSEEK = replace(LLM, kv_heads=4, moe=DEEPSEEK_MOE, mla=LATENT)
SHAPES: dict[str, Transformer] = {
    "qwen3_moe": QWEN3_MOE,
    "deepseek": DEEPSEEK,
    "deepseek v2 lite": replace(
        DEEPSEEK, mla=replace(LATENT, q_lora=None), moe=replace(DEEPSEEK_MOE, scoring="softmax_all")
    ),
    "maverick": replace(LLM, moe=MAVERICK_MOE, window_tokens=4, global_layers=(1,)),
    "capacity": replace(LLM, moe=replace(EXPERTS, capacity_factor=1.5)),
    "plain experts": replace(LLM, gated_mlp=False, moe=EXPERTS),
    "gemma": replace(LLM, post_norms=True, qk_norm=True, activation="gelu", window_tokens=64, sliding=True),
}


def intern_vl(vision: Training, projector: Training, llm: Training) -> Model:
    """InternViT: norms over all heads at once, layer scales; padded vocabulary."""
    tower = replace(CLIP, norm="rms", qk_norm=True, qk_norm_whole=True, layer_scale=True, norm_first_extra=False)
    tiles = VisionInput(patch=2, image_size=8, class_token=True, learned_positions=True, patch_bias=True)
    modules = (
        ModelModule(
            name="vision", kind="vision_encoder", modality="vision", transformer=tower, vision=tiles, training=vision
        ),
        ModelModule(
            name="projector",
            kind="projector",
            modality="vision",
            projector=Projector(dims=(64, 24, 24), merge=4, norm="layer"),
            training=projector,
        ),
        language_model(replace(QWEN3_MOE, layers=1), llm, pad_to=16),
    )
    edges = (
        ModelEdge(producer="vision", consumer="projector", kind="input"),
        ModelEdge(producer="projector", consumer="llm", kind="merge"),
    )
    return Model(name="internvl", modules=modules, edges=edges)


def glm(vision: Training, projector: Training, llm: Training) -> Model:
    """Pooled tokens and a projector whose last two linears are a gated MLP."""
    tower = replace(QWEN_VISION, window_tokens=None, global_layers=())
    shape = Projector(dims=(16, 20, 24, 36, 24), pool=3, gated=True, norm="rms")
    modules = (
        ModelModule(
            name="vision",
            kind="vision_encoder",
            modality="vision",
            transformer=tower,
            vision=VisionInput(patch=2),
            training=vision,
        ),
        ModelModule(name="projector", kind="projector", modality="vision", projector=shape, training=projector),
        language_model(replace(DEEPSEEK, layers=2), llm),
    )
    edges = (
        ModelEdge(producer="vision", consumer="projector", kind="input"),
        ModelEdge(producer="projector", consumer="llm", kind="merge"),
    )
    return Model(name="glm", modules=modules, edges=edges)


def prompted(encoder: Training, projector: Training, llm: Training) -> Model:
    """CLIP's text encoder (causal, stored positions) on 5 tokens of every sample, projected into the sequence."""
    tower = replace(CLIP, causal=True, norm_first_extra=False, final_norm=True)
    modules = (
        ModelModule(
            name="prompt",
            kind="text_encoder",
            modality="text",
            transformer=tower,
            text=TextInput(tokens=5),
            vocabulary=Vocabulary(size=40),
            training=encoder,
        ),
        ModelModule(
            name="projector",
            kind="projector",
            modality="text",
            projector=Projector(dims=(16, 24)),
            training=projector,
        ),
        language_model(replace(LLM, layers=1), llm),
    )
    edges = (
        ModelEdge(producer="prompt", consumer="projector", kind="input"),
        ModelEdge(producer="projector", consumer="llm", kind="merge"),
    )
    return Model(name="prompted", modules=modules, edges=edges)


def deepstack(vision: Training, projector: Training, llm: Training) -> Model:
    """Qwen3-VL: tokens of inner vision blocks are added after the first blocks of the language model."""
    tower = replace(QWEN_VISION, final_norm=False, window_tokens=None, global_layers=())
    native = VisionInput(patch=2, temporal_patch=2, position_rows=9)
    merger = Projector(dims=(64, 64, 24), merge=4, norm="layer", norm_before_merge=True)
    modules = (
        ModelModule(
            name="vision", kind="vision_encoder", modality="vision", transformer=tower, vision=native, training=vision
        ),
        *(
            ModelModule(name=name, kind="projector", modality="vision", projector=shape, training=projector)
            for name, shape in (
                ("projector", merger),
                ("deep0", replace(merger, norm_before_merge=False)),
                ("deep1", replace(merger, norm_before_merge=False)),
            )
        ),
        language_model(replace(QWEN3_MOE, moe=None), llm),
    )
    edges = (
        ModelEdge(producer="vision", consumer="projector", kind="input"),
        ModelEdge(producer="vision", consumer="deep0", kind="input", producer_layer=0),
        ModelEdge(producer="vision", consumer="deep1", kind="input", producer_layer=1),
        ModelEdge(producer="projector", consumer="llm", kind="merge"),
        ModelEdge(producer="deep0", consumer="llm", kind="add", consumer_layer=0),
        ModelEdge(producer="deep1", consumer="llm", kind="add", consumer_layer=1),
    )
    return Model(name="deepstack", modules=modules, edges=edges)
