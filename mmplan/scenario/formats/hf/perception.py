"""Perception encoders for sound and video: rows of a codec's encoder, or one of each frame, pass blocks like Qwen 3's;
a ModernBERT reads words. What meets rows of two encoders side by side is priced on one of them, the rest is kept."""

from dataclasses import replace

from mmplan.scenario.formats.hf.codecs import dac_encoder
from mmplan.scenario.formats.hf.ears import audio_module
from mmplan.scenario.formats.hf.resamplers import encoder_module
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.timm_towers import perception
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import apart, edge, stepping
from mmplan.scenario.scenario import AudioInput, Modality, Model, ModelModule, TextInput, Transformer
from mmplan.scenario.steps import Active, Average, Convolve, Dense, Form, Kept, Normed, Steps, residual


def audio(config: Fields, name: str) -> Model:
    heard, text = audio_way(config.part("audio_config")), words(config)
    width = text.output_width
    return apart(name, (*heard, head("audio", heard[-1], width)), (text, head("text", text, width, stored=2)))


def video(config: Fields, name: str) -> Model:
    seen, text = video_way(config.part("video_config")), words(config)
    width = text.output_width
    return apart(name, (*seen, head("video", seen[-1], width)), (text, head("text", text, width, stored=2)))


def audio_video(config: Fields, name: str) -> Model:
    config.refuse_unless("tie_word_embeddings", True, None, why="three copies of the text encoder")
    both = config.part("audio_video_config")
    heard, seen, text = audio_way(both.part("audio_config")), video_way(both.part("video_config")), words(config)
    width, a, v = text.output_width, heard[-1].output_width, seen[-1].output_width
    more = 3 * (2 * width + width**2)  # heads of the text alone
    more += (2 + width) * (2 * width + a + v) + 12  # of text beside sound or video
    joint = joint_way(both, a, v)
    model = apart(
        name,
        (*heard, head("audio", heard[-1], width)),
        (*seen, head("video", seen[-1], width)),
        (*joint, head("audio_video", joint[-1], width)),
        (text, replace(head("text", text, width), stored=more - 2 * width - width**2)),
    )
    config.log.notes.append("rows of video beside those of sound have weights in 'audio_video' and no work")
    return replace(model, edges=(*model.edges, edge(heard[0].name, joint[0].name, "input")))


def alone(config: Fields, name: str) -> Model:
    """One of the three encoders by itself."""
    if config.kind == "pe_audio_encoder":
        return apart(name, audio_way(config))
    if config.kind == "pe_video_encoder":
        return apart(name, video_way(config))
    heard, seen = audio_way(config.part("audio_config")), video_way(config.part("video_config"))
    joint = joint_way(config, heard[-1].output_width, seen[-1].output_width)
    model = apart(name, heard, seen, joint)
    return replace(model, edges=(*model.edges, edge(heard[0].name, joint[0].name, "input")))


def words(config: Fields) -> ModelModule:
    text = text_module(config, "text_config", tied=True, name="text")
    return replace(text, kind="text_encoder", text=TextInput(positions="rotary"))


def head(side: str, behind: ModelModule, width: int, stored: int = 0) -> ModelModule:
    steps: Steps = (Normed(), Dense(width=width, bias=False))
    return stepping(steps, (behind.output_width, width), name=f"{side}_projector", stored=stored)


def blocks(fields: Fields) -> Transformer:
    heads = fields.count("num_attention_heads")
    bias = fields.flag("attention_bias")
    return Transformer(
        layers=fields.layers(),
        hidden=fields.count("hidden_size"),
        heads=heads,
        kv_heads=fields.optional("num_key_value_heads") or heads,
        head_dim=fields.count("head_dim"),
        ffn=fields.count("intermediate_size"),
        gated_mlp=True,
        causal=False,
        norm="rms",
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )


def entering(width: int) -> Steps:
    """A row in front (kept), two convolutions over rows."""
    silu = Active(function="silu")
    inner = (Normed(), silu, Convolve(width=width, taps=3), Normed(), silu, Convolve(width=width, taps=3))
    return (Kept(size=width), residual(*inner))


def output(name: str, width: int, modality: Modality) -> ModelModule:
    step = Dense(width=width, bias=False)
    return replace(stepping((step,), (width, width), name=f"{name}_output"), modality=modality)


def audio_way(fields: Fields) -> tuple[ModelModule, ...]:
    codec, shape = fields.part("dac_config"), blocks(fields)
    steps, stride = dac_encoder(codec)
    front = (*steps, Dense(width=codec.count("codebook_dim")), Dense(width=shape.hidden), *entering(shape.hidden))
    entry = AudioInput(mel_bins=1, frames_per_s=codec.count("sampling_rate"), pad_s=None, stride=stride)
    first = replace(audio_module(shape, entry), form=Form(front=front, raw_width=1))
    return first, output("audio", shape.hidden, "audio")


def video_way(fields: Fields) -> tuple[ModelModule, ...]:
    """A tower gives each frame one row."""
    tower, shape = fields.part("vision_config"), blocks(fields)
    frame, labels = perception(tower, pooled=True), tower.optional("num_labels") or 2
    assert frame.vision is not None and frame.vision.image_size is not None
    rows = (frame.vision.image_size // frame.vision.patch) ** 2
    steps: Steps = (Average(rows=rows), Dense(width=labels), Dense(width=shape.hidden, bias=False))
    front = (*steps, Dense(width=shape.hidden), *entering(shape.hidden))
    return frame, encoder_module(shape, Form(front=front), name="video"), output("video", shape.hidden, "vision")


def joint_way(fields: Fields, a: int, v: int) -> tuple[ModelModule, ...]:
    """Rows of sound and of video side by side."""
    shape = blocks(fields)
    width = shape.hidden
    beside = Kept(size=v * width + v * a + 3 * a)
    front: Steps = (Dense(width=width), beside, Dense(width=width), *entering(width))
    first = encoder_module(shape, Form(front=front), name="audio_video", modality="audio")
    return first, output("audio_video", width, "audio")
