"""Qwen3-VL, Qwen3.5 and the thinkers of Qwen2.5-Omni and Qwen3-Omni."""

from dataclasses import replace

from mmplan.scenario.formats.hf.ears import audio_module, ear_of, whisper_blocks
from mmplan.scenario.formats.hf.text import language_module, text_module
from mmplan.scenario.formats.hf.towers import tower_of
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import edge, merger_module, projector_module
from mmplan.scenario.scenario import AudioInput, Model, ModelEdge, ModelModule, Projector, Vocabulary


def qwen3_vl(config: Fields, name: str) -> Model:
    """Tokens of inner vision blocks are added behind the first language blocks (DeepStack), where a file has them."""
    modules, edges = _vision_side(config)
    llm = text_module(config, "text_config")
    return _checked(config, name, (*modules, llm), edges)


def _vision_side(config: Fields, name: str = "projector") -> tuple[list[ModelModule], list[ModelEdge]]:
    """Tower, merger and DeepStack mergers, with their edges into `llm`."""
    vision, tower = tower_of(config), config.part("vision_config")
    assert vision.transformer is not None
    width = tower.count("out_hidden_size")
    projector = merger_module(tower, vision.output_width, width, "layer", name)
    modules = [vision, projector]
    edges = [edge("vision", name, "input"), edge(name, "llm", "merge")]
    listed = tower.get("deepstack_visual_indexes")
    if not listed or tower.kind in ("qwen3_5_vision", "qwen3_5_moe_vision"):
        return modules, edges
    inner = tower.indices("deepstack_visual_indexes", vision.transformer.layers)
    unused = len(listed) - len(inner)
    if unused:
        config.log.notes.append(f"{unused} DeepStack mergers of vision blocks that do not exist do no work")
    dims = (vision.output_width * projector_merge(projector),) * 2 + (width,)
    modules[1] = replace(projector, stored=unused * _merger_parameters(dims))
    for position, block in enumerate(inner):
        deep = replace(projector, name=f"deepstack{position}", projector=_joined_first(projector))
        modules.append(deep)
        edges.append(ModelEdge(producer="vision", consumer=deep.name, kind="input", producer_layer=block))
        edges.append(ModelEdge(producer=deep.name, consumer="llm", kind="add", consumer_layer=position))
    return modules, edges


def projector_merge(module: ModelModule) -> int:
    assert module.projector is not None
    return module.projector.merge


def _joined_first(module: ModelModule) -> Projector:
    """Like the last merger, but the norm acts on joined tokens."""
    assert module.projector is not None
    return replace(module.projector, norm_before_merge=False)


def _merger_parameters(dims: tuple[int, ...]) -> int:
    joined, inner, width = dims
    return 2 * joined + joined * inner + inner + inner * width + width


def _checked(config: Fields, name: str, modules: tuple[ModelModule, ...], edges: list[ModelEdge]) -> Model:
    """DeepStack edges that lead behind the last language block are refused."""
    llm = next(module for module in modules if module.name == "llm")
    assert llm.transformer is not None
    for each in edges:
        if each.consumer_layer is not None and each.consumer_layer >= llm.transformer.layers:
            message = f"{each.consumer_layer + 1} inner layers are added behind as many blocks, the language model has "
            raise config.error("vision_config.deepstack_visual_indexes", message + str(llm.transformer.layers))
    return Model(name=name, modules=modules, edges=tuple(edges))


def qwen2_5_omni(config: Fields, name: str) -> Model:
    """Two encoders and a thinker; the talker reads the thinker's last hidden states."""
    thinker = config.part("thinker_config", flat=True) if config.kind == "qwen2_5_omni" else config
    vision, tower = tower_of(thinker), thinker.part("vision_config")
    seen = merger_module(tower, vision.output_width, tower.count("out_hidden_size"), "rms", "vision_projector")
    ear = thinker.part("audio_config")
    # The encoder cuts the mel frames into chunks of 2 * n_window, which the stride 2 turns into n_window tokens.
    shape = replace(whisper_blocks(ear), window_tokens=ear.count("n_window"))
    width = ear.count("output_dim")
    front = AudioInput(mel_bins=ear.count("num_mel_bins"), pad_s=None, pool=2)
    audio = audio_module(shape, front, stored=2 * width)  # embeddings that mark the ends of audio
    heard = ModelModule(
        name="audio_projector",
        kind="projector",
        modality="audio",
        projector=Projector(dims=(audio.output_width, width)),
        source=audio.source,
    )
    llm = text_module(thinker, "text_config")
    modules = [vision, seen, audio, heard, llm]
    edges = [
        edge("vision", "vision_projector", "input"),
        edge("audio", "audio_projector", "input"),
        edge("vision_projector", "llm", "merge"),
        edge("audio_projector", "llm", "merge"),
    ]
    if config.kind == "qwen2_5_omni" and config.get("enable_audio_output") is not False:
        modules.append(_talker(config, llm))
        edges.append(edge("llm", "talker", "hidden"))
        config.log.notes.append("token2wav, which makes sound of the talker's tokens, is left out: it is trained alone")
    return Model(name=name, modules=tuple(modules), edges=tuple(edges))


def _talker(config: Fields, llm: ModelModule) -> ModelModule:
    fields = config.part("talker_config")
    width = fields.count("embedding_size")
    if width != llm.output_width:
        message = f"expected the thinker's hidden size {llm.output_width}, found {width}"
        raise fields.error("embedding_size", message)
    talker = language_module(fields.read_as_stack("qwen2"), tied=False, name="talker")
    assert talker.vocabulary is not None
    return replace(talker, modality="speech", vocabulary=Vocabulary(size=talker.vocabulary.size, width=width))


def qwen3_omni(config: Fields, name: str) -> Model:
    """Two encoders and a thinker with experts. Talker and code2wav are left out."""
    thinker = config.part("thinker_config", flat=True) if config.kind == "qwen3_omni_moe" else config
    modules, edges = _vision_side(thinker, "vision_projector")
    audio, ear = ear_of(thinker), thinker.part("audio_config")
    dims = (audio.output_width, audio.output_width, ear.count("output_dim"))
    heard = projector_module(dims, name="audio_projector", modality="audio")
    edges += [edge("audio", "audio_projector", "input"), edge("audio_projector", "llm", "merge")]
    llm = text_module(thinker, "text_config")
    if config.kind == "qwen3_omni_moe":
        config.log.notes.append(
            "the talker, which predicts several codes of a frame by a model of its own, and code2wav are left out"
        )
    return _checked(thinker, name, (*modules, audio, heard, llm), edges)
