"""Gemma 3n and 4 with their encoders."""

from dataclasses import replace

from mmplan.scenario.formats.hf import gemma, mobilenet
from mmplan.scenario.formats.hf.ears import SAMPLES_PER_S, audio_module
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.towers import tower_of
from mmplan.scenario.formats.hf.vit import bare, vision_module
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import edge, merged, projector_module
from mmplan.scenario.scenario import AudioInput, Model, ModelModule, TextInput, VisionInput
from mmplan.scenario.steps import Dense, Kept, Normed


def gemma4(config: Fields, name: str) -> Model:
    """Tokens are averaged k x k and pass one linear; clips pass a conformer and two. Files without the config of an
    encoder have none."""
    llm, ways = text_module(config, "text_config"), list[tuple[ModelModule, ...]]()
    if config.has("vision_config"):
        vision, tower = tower_of(config), config.part("vision_config")
        pool = tower.count("pooling_kernel_size", most=100) ** 2
        ways.append((vision, projector_module((vision.output_width, llm.output_width), pool=pool, bias=False)))
    if config.has("audio_config"):
        ear = config.part("audio_config")
        audio, width = gemma.audio(ear), ear.count("output_proj_dims")
        out = projector_module((audio.output_width, width), name="audio_out", modality="audio")
        heard = projector_module((width, llm.output_width), name="audio_projector", modality="audio", bias=False)
        ways.append((audio, out, heard))
    return merged(name, llm, *ways)


def embedding_gemma2(config: Fields, name: str) -> Model:
    """Gemma 4's encoders in front of blocks that see both sides, and one linear behind them."""
    model = gemma4(config, name)
    llm = replace(model.module("llm"), kind="text_encoder", text=TextInput(positions="rotary"))
    out = config.part("text_config").count("embedding_dim")
    last = projector_module((llm.output_width, out), name="embedding", modality="text", bias=False)
    return replace(
        model, modules=(*model.modules[:-1], llm, last), edges=(*model.edges, edge("llm", "embedding", "input"))
    )


def gemma3n(config: Fields, name: str) -> Model:
    """MobileNet V5 and a conformer; 128 embeddings of marks stand beside each projection."""
    llm, width = text_module(config, "text_config"), config.part("text_config").count("hidden_size")
    seen, heard = config.part("vision_config"), config.part("audio_config")
    tower, audio = mobilenet.tower(seen), gemma.audio(heard)
    marks = (seen.count("vocab_size") + 1) * tower[-1].output_width
    vision = projector_module(
        (tower[-1].output_width, width), name="vision_projector", norm="rms", bias=False, stored=marks
    )
    spoken = (heard.count("vocab_size") + 1) * audio.output_width
    sound = projector_module(
        (audio.output_width, width), name="audio_projector", modality="audio", norm="rms", bias=False, stored=spoken
    )
    return merged(name, llm, (*tower, vision), (audio, sound))


def gemma4_unified(config: Fields, name: str) -> Model:
    """No towers: squares of pixels and stretches of sound pass linears."""
    llm, ways = text_module(config, "text_config"), list[tuple[ModelModule, ...]]()
    if config.has("vision_config"):
        fields = config.part("vision_config")
        side = fields.count("patch_size") * fields.count("pooling_kernel_size", most=100)
        width, raw = fields.count("mm_embed_dim"), 3 * side**2
        rows = 2 * fields.count("mm_posemb_size") * width
        steps = (Normed(), Dense(width=width), Normed(), Kept(size=rows), Normed())
        shape, form = bare(width, steps, raw)
        vision = replace(vision_module(shape, VisionInput(patch=side)), form=form)
        ways.append((vision, projector_module((width, llm.output_width), bias=False)))
    if config.has("audio_config"):
        width = config.part("audio_config").count("audio_embed_dim")
        shape, form = bare(width, (Kept(size=0),), width)
        samples = AudioInput(mel_bins=1, frames_per_s=SAMPLES_PER_S, pad_s=None, stride=width)
        audio = replace(audio_module(shape, samples), form=form)
        heard = projector_module((width, llm.output_width), name="audio_projector", modality="audio", bias=False)
        ways.append((audio, heard))
    return merged(name, llm, *ways)
