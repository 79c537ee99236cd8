"""Query transformers and perceivers: learned rows that attend to the tokens of a tower and take their place."""

from dataclasses import replace

from mmplan.scenario.formats.hf.vit import BIASES
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import SOURCE, divided
from mmplan.scenario.scenario import Modality, ModelModule, Transformer
from mmplan.scenario.steps import Attend, Form, Kept, Mlp, Normed, Step, Steps, residual


def encoder_module(
    shape: Transformer, form: Form, *, name: str, modality: Modality = "vision", stored: int = 0
) -> ModelModule:
    """A module that reads another one's tokens."""
    return ModelModule(
        name=name, kind="encoder", modality=modality, transformer=shape, form=form, stored=stored, source=SOURCE
    )


def querying(hidden: int, heads: int, ffn: int, layers: int, context: int, head_dim: int | None = None) -> Transformer:
    """Blocks of BERT's widths that attend to rows of width `context`; the form says in which order."""
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim or hidden // heads,
        ffn=ffn,
        gated_mlp=False,
        causal=False,
        norm="layer",
        final_norm=False,
        cross_layers=tuple(range(layers)),
        cross_width=context,
        **BIASES,
    )


def qformer(
    config: Fields,
    *,
    queries: int,
    context: int,
    window: int | None = None,
    name: str = "qformer",
    modality: Modality = "vision",
    text: bool = False,
) -> ModelModule:
    """BLIP-2's query transformer (arXiv 2301.12597): norms behind the branches, every `cross_attention_frequency`-th
    block attends to the tower too. `text`: each block has a second MLP for words and the module a table of them."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    divided(config, hidden, heads)
    ffn, layers = config.count("intermediate_size"), config.layers()
    read = config.count("encoder_hidden_size")
    if read != context:
        raise config.error(
            "encoder_hidden_size", f"the query transformer reads width {read}, the tower gives {context}"
        )
    words = (Kept(size=2 * hidden * ffn + ffn + 3 * hidden),) if text else ()
    own: Steps = (residual(Attend()), Normed(), residual(Mlp()), Normed(), *words)
    both: Steps = (residual(Attend()), Normed(), residual(Attend(across=True)), Normed(), *own[2:])
    often = config.count("cross_attention_frequency", most=2_000)
    blocks = tuple((1, both if index % often == 0 else own) for index in range(layers))
    form = Form(front=(Normed(),), blocks=blocks, queries=queries, window=window)
    shape = querying(hidden, heads, ffn, layers, context)
    shape = replace(shape, cross_layers=tuple(range(0, layers, often)))
    if window is not None:  # queries of one window see each other alone
        shape = replace(shape, window_tokens=queries)
    stored = (config.count("vocab_size") + config.count("max_position_embeddings")) * hidden if text else 0
    return encoder_module(shape, form, name=name, modality=modality, stored=stored)


def perceiver(
    shape: Transformer, *, queries: int, norms: int, name: str = "resampler", modality: Modality = "vision"
) -> ModelModule:
    """Blocks whose queries attend to tokens and to themselves at once; `norms` more numbers in each, of the tokens."""
    kind = shape.norm
    steps: tuple[Step, ...] = (
        residual(Normed(kind=kind), Attend(across=True)),
        residual(Normed(kind=kind), Mlp()),
        Kept(size=norms),
    )
    form = Form(blocks=((shape.layers, steps),), queries=queries, together=True)
    return encoder_module(shape, form, name=name, modality=modality)
