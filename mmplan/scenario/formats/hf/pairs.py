"""Pairs of encoders that a contrastive loss brings together: CLIP and its kin, SigLIP, CLAP's text side."""

from dataclasses import replace
from typing import Any

from mmplan.scenario.formats.hf.convnets import efficientnet
from mmplan.scenario.formats.hf.towers import tower_of
from mmplan.scenario.formats.hf.vit import BIASES, POST
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import SOURCE, apart, divided, edge, projector_module
from mmplan.scenario.scenario import Model, ModelModule, TextInput, Transformer, Vocabulary


def clip(config: Fields, name: str) -> Model:
    """The class token and the last text token pass one linear each; the temperature is stored. Chinese-CLIP and
    AltCLIP have BERT's blocks for words."""
    fields = config.part("text_config")
    bert = fields.kind in ("altclip_text_model", "chinese_clip_text_model")
    vision, text = tower_of(config), bert_tower(fields) if bert else text_tower(fields, causal=True)
    width, words = config.count("projection_dim"), text.output_width
    stored = 1
    if fields.kind == "altclip_text_model":  # a norm and a linear in front of the projection
        stored, words = stored + 2 * words + (words + 1) * fields.count("project_dim"), fields.count("project_dim")
        stored += words * width - text.output_width * width
    return paired(name, vision, text, width, stored=stored)


def paired(name: str, vision: ModelModule, text: ModelModule, width: int, *, stored: int) -> Model:
    if vision.vision is not None:
        vision = replace(vision, vision=replace(vision.vision, keep_class_token=vision.vision.class_token))
    seen = projector_module((vision.output_width, width), name="vision_projector", bias=False)
    dims = (text.output_width, width)
    said = projector_module(dims, name="text_projector", modality="text", bias=False, stored=stored)
    return apart(name, (vision, seen), (text, said))


def align(config: Fields, name: str) -> Model:
    """An EfficientNet, whose averaged rows are compared as they are, and BERT with a linear."""
    fields = config.part("text_config")
    vision, width = efficientnet(config.part("vision_config")), config.count("projection_dim")
    text = bert_tower(fields, stored=pooler(fields.count("hidden_size")))
    said = projector_module((text.output_width, width), name="text_projector", modality="text", stored=1)
    return apart(name, vision, (text, said))


def siglip(config: Fields, name: str) -> Model:
    """SigLIP: a pooling head on the images, one linear on the text; temperature and bias are stored."""
    vision, fields = tower_of(config), config.part("text_config")
    text = text_tower(fields, causal=False)
    width = fields.optional("projection_size") or text.output_width
    said = projector_module((text.output_width, width), name="text_projector", modality="text", stored=2)
    return Model(name=name, modules=(vision, text, said), edges=(edge("text", "text_projector", "input"),))


def dual_encoder(config: Fields, name: str) -> Model:
    """A ViT and a BERT of any size, each with its pooler."""
    vision, fields = tower_of(config), config.part("text_config")
    if fields.kind not in ("bert", "roberta", "xlm-roberta"):
        raise fields.error("model_type", f"expected 'bert' or 'roberta', found '{fields.kind:.60}'")
    text = bert_tower(fields, stored=pooler(fields.count("hidden_size")))
    return paired(name, vision, text, config.count("projection_dim"), stored=1)


def text_tower(text: Fields, *, causal: bool, table: bool = True, **shape: Any) -> ModelModule:
    """CLIP's text encoder: texts of a padded length, with a `table` of positions."""
    entry = TextInput(tokens=text.count("max_position_embeddings"), positions="learned" if table else "none")
    return _words(text, {"causal": causal, **shape}, entry)


def bert_tower(text: Fields, *, stored: int = 0, pre: bool = False, **shape: Any) -> ModelModule:
    """BERT's: norms behind the branches unless `pre`; positions, kinds of tokens and a first norm are stored."""
    width = text.count("hidden_size")
    rows = text.count("max_position_embeddings", most=100_000_000) + (text.optional("type_vocab_size", least=0) or 0)
    usual = {"causal": False, **({} if pre else POST), **shape}
    return replace(_words(text, usual, TextInput(positions="none")), stored=(rows + 2) * width + stored)


def pooler(width: int) -> int:
    """A linear on the first token, of which no products are counted."""
    return width * (width + 1)


def _words(text: Fields, shape: dict[str, Any], entry: TextInput) -> ModelModule:
    hidden, heads = text.count("hidden_size"), text.count("num_attention_heads")
    blocks = Transformer(
        layers=text.layers(),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=divided(text, hidden, heads),
        ffn=text.count("intermediate_size"),
        **{"gated_mlp": False, "norm": "layer", **BIASES, **shape},
    )
    return ModelModule(
        name="text",
        kind="text_encoder",
        modality="text",
        transformer=blocks,
        vocabulary=Vocabulary(size=text.count("vocab_size")),
        text=entry,
        source=SOURCE,
    )
