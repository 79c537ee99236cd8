"""Dots 3 Note: a tower with more and more experts, an audio encoder behind three convolutions."""

from dataclasses import replace

from mmplan.scenario.document import shown
from mmplan.scenario.formats.hf.blocks_by_layer import each
from mmplan.scenario.formats.hf.ears import audio_module
from mmplan.scenario.formats.hf.experts import sparse_layers
from mmplan.scenario.formats.hf.text import text_module
from mmplan.scenario.formats.hf.vit import RMS_GATED, native, vision_module, vit
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import divided, merged, merger_module, projector_module
from mmplan.scenario.scenario import AudioInput, Model, ModelModule, Moe, Transformer
from mmplan.scenario.steps import Active, Convolve, Dense, Form, Join, Steps


def vision(tower: Fields) -> ModelModule:
    """A norm behind the patches, norms on queries and keys; experts of one width in the later blocks."""
    older = {"hidden_size": "embed_dim", "num_attention_heads": "num_heads", "attention_bias": "use_bias"}
    found = {new: tower.values[old] for new, old in older.items() if old in tower.values}
    tower = replace(tower, values={**tower.values, **found})
    bias = tower.flag("attention_bias")
    shape = vit(
        tower,
        **{**RMS_GATED, "qkv_bias": bias, "out_bias": bias, "mlp_bias": tower.flag("mlp_bias")},
        qk_norm=True,
        norm_first_extra=True,
    )
    counts, chosen = _experts_of_tower(tower, shape.layers), tower.optional("num_experts_per_tok", "capacity_factor")
    width = tower.count("moe_intermediate_size")

    def block(index: int, plain: Transformer) -> Transformer:
        many = counts[index]
        if not many:
            return plain
        moe = Moe(experts=many, topk=min(chosen or 2, many), expert_ffn=width, scoring="sigmoid")
        return replace(plain, moe=moe)

    return vision_module(each(shape, block), native(tower, bias=True, channels="num_channels", temporal=False))


def _experts_of_tower(tower: Fields, layers: int) -> list[int]:
    """Experts of each block, 0 for an MLP: four more from block 25 on, unless the file says otherwise."""
    words, given = tower.words("mlp_layer_types", layers), tower.values.get("pyramid_num_routed")
    if given is None and words is None:
        given = [-1] * 25 + list(range(4, 65, 4)) + [64]
    if given is not None:
        if not isinstance(given, list) or len(given) != layers or not all(isinstance(one, int) for one in given):
            raise tower.error("pyramid_num_routed", f"expected {layers} numbers of experts, found {shown(given)}")
        return [max(0, one) for one in given]
    sparse, several = sparse_layers(tower, layers, first=0), tower.get("per_layer_config")
    usual, own = tower.count("num_local_experts", most=100_000), several if isinstance(several, dict) else {}
    counts = [0] * layers
    for index in sparse:
        entry = own.get(str(index), own.get(index))
        inner = replace(tower, values=entry, path=tower.key("per_layer_config")) if isinstance(entry, dict) else None
        counts[index] = inner.count("num_local_experts", most=100_000) if inner else usual
    return counts


def audio(ear: Fields) -> ModelModule:
    """Three convolutions over frames and bins, blocks with RMS norms and a gated MLP, no bias on keys."""
    hidden, heads = ear.count("hidden_size"), ear.count("num_attention_heads")
    shape = Transformer(
        layers=ear.layers(),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(ear, hidden, heads),
        ffn=ear.count("intermediate_size"),
        gated_mlp=True,
        causal=False,
        norm="rms",
        qkv_bias=ear.flag("attention_bias"),
        key_bias=False,
        out_bias=ear.flag("attention_bias"),
        mlp_bias=True,
    )
    bins, inner = ear.count("feature_size", most=100_000), ear.count("downsample_hidden_size")
    convolved: Steps = (Convolve(width=inner, taps=9, joins=4), Active()) * 3
    front: Steps = (*convolved, Join(rows=-(-bins // 8)), Dense(width=hidden, bias=False))
    module = audio_module(shape, AudioInput(mel_bins=bins, pad_s=None, stride=8))
    return replace(module, form=Form(front=front, raw_width=1))


WHISPER = {"d_model": "hidden_size", "encoder_attention_heads": "num_attention_heads"}
WHISPER |= {"encoder_layers": "num_hidden_layers", "encoder_ffn_dim": "intermediate_size"}
WHISPER |= {"num_mel_bins": "feature_size"}


def family(config: Fields, name: str) -> Model:
    """Tower with a merger, audio encoder with two linears behind a norm. Released files have the text's keys on top."""
    tower, ear = config.part("vision_config"), config.part("audio_config")
    older = ear.values.get("whisper_config")
    if isinstance(older, dict):  # sizes of released files
        found = {new: older[old] for old, new in WHISPER.items() if old in older}
        ear = replace(ear, values={**ear.values, **found})
    llm = text_module(config, "text_config", flat=True)
    eye, listener = vision(tower), audio(ear)
    seen = merger_module(tower, eye.output_width, tower.count("adapter_out_dim"), "layer", "vision_projector")
    width = ear.count("whisper_adapter_out_dim", "adapter_output_size", "adapter_out_dim")
    dims = (listener.output_width, width, width)
    heard = projector_module(dims, name="audio_projector", modality="audio", norm="layer")
    return merged(name, llm, (eye, seen), (listener, heard))
