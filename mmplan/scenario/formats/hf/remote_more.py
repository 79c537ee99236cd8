"""More files whose modelling code stands beside the weights: Ultravox, MiniCPM-o, Phi-4-multimodal, Molmo, Ovis,
Qwen-VL, GLM-4V, InternLM 2. Structure and field names are those of each repository's own modelling file."""

from dataclasses import replace
from typing import Any

from mmplan.scenario.formats.hf import querying as query
from mmplan.scenario.formats.hf.ears import whisper
from mmplan.scenario.formats.hf.llava_like import ovis2
from mmplan.scenario.formats.hf.named import named
from mmplan.scenario.formats.hf.remote import minicpmv
from mmplan.scenario.formats.hf.resamplers import encoder_module, querying
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.vit import fixed, vision_module, vit
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import chain, merged, projector_module, stepping
from mmplan.scenario.scenario import Model
from mmplan.scenario.steps import Active, Attend, Dense, Fork, Form, Kept, Normed, Steps, conv


def internlm2(config: Fields, name: str) -> Model:
    """LLaMA with its three projections in one matrix."""
    return Model(name=name, modules=(text_module(internlm2_as_llama(config)),), edges=())


def internlm2_as_llama(fields: Fields) -> Fields:
    biased = fields.flag("bias")
    text = replace(fields.read_as("llama"), defaults={**fields.read_as("llama").defaults, **fields.defaults})
    return replace(text, values={**fields.values, "attention_bias": biased})


def ultravox(config: Fields, name: str) -> Model:
    """Whisper's encoder on clips of their own length, `stack_factor` tokens joined, two linears with a norm behind one
    of them. Encoder and language model may be named and not described."""
    ear, text = named(config, "audio_config", "audio_model_id"), named(config, "text_config", "text_model_id")
    if ear.kind != "whisper":
        raise ear.error("model_type", f"expected 'whisper', found '{ear.kind:.60}'")
    audio, llm = whisper(ear), text_module(text)
    assert audio.audio is not None
    audio = replace(audio, audio=replace(audio.audio, pad_s=None))
    merge, inner, width = config.count("stack_factor", most=1_000), config.count("hidden_size"), llm.output_width
    halved = config.get("projector_act") == "swiglu"
    middle = config.flag("projector_ln_mid")
    joined = merge * audio.output_width
    rms = Normed(kind="rms")
    act: Steps = (Dense(width=inner // 2, bias=False),)
    first: Steps = (Fork(left=act, right=(*act, Active(function="silu")), product=True),) if halved else ()
    steps: Steps = (*(first or (Dense(width=inner, bias=False), Active())), *((rms,) if middle else ()))
    steps = (*steps, Dense(width=width, bias=False), *(() if middle else (rms,)))
    if halved and inner % 2:
        raise config.error("hidden_size", f"a gate halves {inner} columns")
    join = projector_module((joined,), name="stack", modality="audio", merge=merge, norm="rms")
    way = replace(stepping(steps, (joined, width), name="projector"), modality="audio")
    return chain(name, audio, join, way, llm)


def minicpmo(config: Fields, name: str) -> Model:
    """MiniCPM-V 2.6 that listens: Whisper's encoder, two linears, pairs of tokens averaged. Its voice is left out."""
    seen = minicpmv(replace(config, values={"version": "2.6", **config.values}), name)
    if config.get("init_tts") is not False:
        config.log.notes.append("tts: the model that speaks (ConditionalChatTTS) is left out")
    if config.get("init_audio") is False:
        return seen
    audio, llm = whisper(config.part("audio_config", kind="whisper")), seen.module("llm")
    assert audio.audio is not None
    audio = replace(audio, audio=replace(audio.audio, pad_s=None))
    pool, width = config.count("audio_pool_step", most=1_000), llm.output_width
    last = projector_module((audio.output_width, width, width), name="audio_projector", modality="audio", pool=pool)
    heard = merged(name, llm, (audio, last))
    return replace(seen, modules=(*seen.modules[:-1], *heard.modules), edges=(*seen.edges, *heard.edges))


def phi4mm(config: Fields, name: str) -> Model:
    """The file of the repository, with keys of the class of transformers. Its two adapters, for sound and for images,
    are numbers beside the language model, whose products are not counted."""
    ear = config.values.get("audio_processor")
    ear = ear.get("config") if isinstance(ear, dict) else None
    if not isinstance(ear, dict):
        raise config.error("audio_processor", "expected a mapping with the sizes of the audio encoder under 'config'")
    layers = config.values.get("embd_layer")
    crops = layers.get("image_embd_layer") if isinstance(layers, dict) else None
    heard = {PHI4[key]: value for key, value in ear.items() if key in PHI4}
    heard |= _renamed(ear.get("nemo_conv_settings"), "conv_channels", "nemo_conv_channels")
    heard |= _renamed(ear.get("relative_attention_bias_args"), "t5_bias_max_distance", "bias_max_distance")
    values = {**config.values, "audio_config": heard, "vision_config": _renamed(crops, "crop_size", "crop_size")}
    config.log.read.update({"audio_processor", "embd_layer", "img_processor"})
    model = query.phi4_multimodal(replace(config.read_as("phi4_multimodal"), values=values), name)
    audio, llm = model.module("audio"), model.module("llm")
    assert llm.transformer is not None and audio.audio is not None
    shape, adapters = llm.transformer, 0
    ends = shape.hidden + (shape.heads + 2 * shape.kv_heads) * shape.head_dim  # of queries, keys and values
    ends += shape.heads * shape.head_dim + shape.hidden + 2 * shape.hidden + 3 * shape.ffn
    for key in ("speech_lora", "vision_lora"):
        if config.values.get(key) is not None:
            adapters += config.part(key, kind="lora").count("r", most=10_000) * ends * shape.layers
    changed = {
        "audio": replace(audio, stored=audio.stored + 2 * audio.audio.mel_bins),  # means and deviations of the bins
        "llm": replace(llm, stored=llm.stored + adapters),
    }
    return replace(model, modules=tuple(changed.get(module.name, module) for module in model.modules))


def _renamed(values: object, key: str, other: str) -> dict[str, Any]:
    return {other: values[key]} if isinstance(values, dict) and key in values else {}


# Keys of speech_conformer_encoder.py of microsoft/Phi-4-multimodal-instruct and those of the class of transformers.
PHI4 = {
    "attention_dim": "hidden_size",
    "attention_heads": "num_attention_heads",
    "linear_units": "intermediate_size",
    "num_blocks": "num_blocks",
    "kernel_size": "kernel_size",
    "input_size": "input_size",
    "time_reduction": "time_reduction",
    "depthwise_multiplier": "depthwise_multiplier",
    "depthwise_seperable_out_channel": "depthwise_separable_out_channel",
    "ext_pw_out_channel": "ext_pw_out_channel",
}


def molmo(config: Fields, name: str) -> Model:
    """Molmo 1: CLIP's 23 first layers of 336 pixels, of which two are read side by side; squares of 2 x 2 tokens ask by
    their mean; a gated MLP as wide as the language model's. The tower stands in the code, not in the file."""
    config.refuse_unless("layer_norm_type", "rms", None, why="its norms are not read")
    config.refuse_unless("moe_num_experts", None, 0, why="its experts are not read")
    ffn, after = config.count("intermediate_size"), config.flag("norm_after")
    text = replace(
        config.read_as("molmo2_text"),
        values={
            **config.values,
            "attention_bias": config.flag("qkv_bias"),
            "additional_vocab_size": 128,
            "vocab_size": config.count("embedding_size", "vocab_size"),
            "intermediate_size": ffn // 2,
            "use_qk_norm": config.flag("attention_layer_norm"),
            "qk_norm_type": "olmo",
            "norm_after": False,
            "head_dim": None,
        },
        defaults={},
    )
    llm = text_module(text, tied=config.flag("weight_tying"))
    shape = llm.transformer
    assert shape is not None
    shape = replace(shape, qk_norm=config.flag("attention_layer_norm"), qk_norm_whole=True)
    if after:
        shape = replace(shape, pre_norms=False, post_norms=True)
    llm = replace(llm, transformer=shape, stored=128 * shape.hidden)
    tower = replace(config.read_as("clip_vision_model"), values={**MOLMO_TOWER}, path="(code)")
    vision = vision_module(
        vit(tower, norm_first_extra=True, final_norm=False), fixed(tower, bias=False, class_token=True)
    )
    width = vision.output_width
    again = 3 * width * width + 4 * width - width  # of two layers side by side; the mean that asks is no number
    form = Form(blocks=((1, (Attend(across=True),)),), queries=1, window=4)
    pooled = encoder_module(querying(width, 16, 1, 1, width), form, name="pooling", stored=again)
    config.log.notes.append("vision tower: that of the repository's code (CLIP ViT-L/14 of 336 pixels, 23 layers)")
    last = projector_module((width, ffn // 2, llm.output_width), gated=True, bias=False)
    return chain(name, vision, pooled, last, llm)


MOLMO_TOWER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "num_channels": 3,
}


def ovis(config: Fields, name: str) -> Model:
    """Ovis 1.x and 2: `llm_config` and `visual_tokenizer_config`, whose 5 last words say where images are."""
    outer = config.part("visual_tokenizer_config")
    eye = outer.part("backbone_config")
    kinds = {"aimv2": "aimv2_vision_model", "siglip_vision_model": "siglip_vision_model", "clip_vision_model": ""}
    if not kinds.get(eye.kind):
        raise eye.error("model_type", f"expected 'aimv2' or 'siglip_vision_model', found '{eye.kind:.60}'")
    own = {"hidden_stride": outer.count("hidden_stride", most=100), "vocab_size": outer.count("vocab_size")}
    seen = {**eye.values, "model_type": kinds[eye.kind], "use_head": False, **own, "num_visual_indicator_tokens": 5}
    text = config.part("llm_config")
    words = {**text.values, "model_type": text.kind}
    values = {**config.values, "vision_config": seen, "text_config": words}
    values |= {"tie_word_embeddings": text.flag("tie_word_embeddings"), "hidden_size": text.count("hidden_size")}
    config.log.read.update({"llm_config", "visual_tokenizer_config"})
    return ovis2(replace(config, values=values), name)


def qwen_vl(config: Fields, name: str) -> Model:
    """Qwen 1 and, with `visual`, Qwen-VL: CLIP's ViT-bigG and one attention from learned queries, whose positions are
    stored beside them."""
    config.refuse_unless("no_bias", True, why="biases behind every linear")
    ffn = config.count("intermediate_size") // 2
    keys = {"intermediate_size": ffn, "head_dim": config.count("kv_channels")}
    text = replace(config, values={**config.values, **keys, "num_key_value_heads": None})
    llm = text_module(replace(text.read_as("qwen2"), defaults={**text.read_as("qwen2").defaults, **config.defaults}))
    if config.values.get("visual") is None:
        return Model(name=name, modules=(llm,), edges=())
    eye = config.part("visual", kind="qwen_visual")
    wide = int(eye.count("width") * eye.ratio("mlp_ratio"))
    tower = replace(eye, values={**eye.values, "num_channels": 3})
    shape = vit(
        tower, hidden="width", heads="heads", layers="layers", ffn=wide, norm_first_extra=True, final_norm=False
    )
    vision = vision_module(shape, fixed(tower, bias=False))
    assert vision.vision is not None
    # positions of 16 x 16 patches are stretched over the image
    rows = 256
    seen = replace(vision.vision, learned_positions=False, position_rows=rows)
    vision = replace(vision, vision=seen)
    width = eye.count("output_dim")
    asking = querying(width, max(1, width // 128), 1, 1, width)
    queries = int(eye.optional("n_queries") or rows)
    block: Steps = (Attend(across=True), Normed(), Dense(width=width, bias=False))
    form = Form(front=(Normed(),), blocks=((1, block),), queries=queries)
    keys_of = stepping((Dense(width=width, bias=False), Normed()), (shape.hidden, width), name="projector")
    latents = encoder_module(asking, form, name="resampler", stored=queries * width)
    return chain(name, vision, keys_of, latents, llm)


def chatglm(config: Fields, name: str) -> Model:
    """GLM-4 and, with `vision_config`, GLM-4V: EVA2-CLIP, a convolution of stride 2, a linear, a gated MLP."""
    groups = config.count("multi_query_group_num") if config.flag("multi_query_attention") else None
    for key, wanted in (("rmsnorm", True), ("post_layer_norm", True), ("add_bias_linear", False)):
        config.refuse_unless(key, wanted, None, why="its kind of ChatGLM is not read")
    values: dict[str, Any] = {
        "hidden_size": config.count("hidden_size"),
        "intermediate_size": config.count("ffn_hidden_size"),
        "num_hidden_layers": config.layers("num_layers", "num_hidden_layers"),
        "num_attention_heads": config.count("num_attention_heads"),
        "num_key_value_heads": groups,
        "head_dim": config.count("kv_channels"),
        "vocab_size": config.count("padded_vocab_size", "vocab_size"),
        "attention_bias": config.flag("add_qkv_bias"),
    }
    llm = text_module(replace(config.read_as("glm"), values=values), tied=config.flag("tie_word_embeddings"))
    eye = config.values.get("vision_config")
    if eye is None:
        return Model(name=name, modules=(llm,), edges=())
    fields = config.part("vision_config", kind="eva2_clip")
    tower = replace(fields, values={"num_channels": fields.count("in_channels", most=1_000), **fields.values})
    shape = vit(tower, heads="num_heads", final_norm=False, post_norms=True, pre_norms=False)
    seen = replace(fixed(tower, class_token=True))
    width, ffn = llm.output_width, config.count("ffn_hidden_size")
    gate: Steps = (Dense(width=ffn, bias=False),)
    steps: Steps = (
        conv(width, 2, stride=2),
        Dense(width=width, bias=False),
        Normed(),
        Active(),
        Fork(left=gate, right=(*gate, Active(function="silu")), product=True),
        Dense(width=width, bias=False),
        Kept(size=2 * width),  # ends of an image
    )
    last = stepping(steps, (shape.hidden, width), name="projector", merge=4)
    return chain(name, vision_module(shape, seen), last, llm)
