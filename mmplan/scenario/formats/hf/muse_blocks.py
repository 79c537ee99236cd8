"""Blocks of Muse Glimmer's and Muse Spark's language models: gated attention, windows, experts on narrower rows."""

from dataclasses import replace

from mmplan.scenario.formats.hf.blocks_by_layer import kinds_of_layers
from mmplan.scenario.formats.hf.experts import moe_of
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import Transformer
from mmplan.scenario.steps import Attend, Experts, Form, Kept, Mlp, Normed, Steps, residual

RMS = Normed(kind="rms")


def windows(text: Fields, shape: Transformer) -> Transformer:
    """Every fourth layer, counted from the last, sees all; what attention gives is gated."""
    text.refuse_unless("attention_bias", False, None, why="biases of queries, keys and values beside a gate without")
    known = ("full_attention", "sliding_attention")
    types = kinds_of_layers(text, shape.layers, known, lambda i: known[(shape.layers - 1 - i) % 4 > 0])
    window = text.optional("sliding_window", most=100_000_000)
    shape = replace(shape, out_gate="column")
    if window is None:
        return shape
    full = tuple(index for index, word in enumerate(types) if word == known[0])
    return replace(shape, window_tokens=window, sliding=True, global_layers=full)


def experts(text: Fields, shape: Transformer) -> Transformer:
    """Experts that work on narrower rows, as the form says."""
    return replace(shape, moe=moe_of(text, "num_local_experts", text.count("moe_intermediate_size"), scoring="softmax"))


def form(text: Fields, shape: Transformer) -> Form:
    """The router reads whole rows; what it has beyond the narrower ones is kept, with their norms."""
    words = ("dense", "sparse")
    given = text.words("mlp_layer_types", shape.layers) or ["sparse"] * shape.layers
    for index, word in enumerate(given):
        if word not in words:
            raise text.error("mlp_layer_types", f"expected 'dense' or 'sparse' for layer {index}, found '{word:.40}'")
    latent, width = text.count("moe_hidden_size"), shape.hidden
    router = (width - latent) * text.count("num_local_experts", most=100_000)
    gates = 2 * width
    attention = residual(RMS, Attend())
    sparse: Steps = (attention, residual(RMS, Experts(latent=latent), RMS), Kept(size=router + 2 * latent + gates))
    dense: Steps = (attention, residual(RMS, Mlp(), RMS), Kept(size=gates))
    return Form(blocks=tuple((1, sparse if word == "sparse" else dense) for word in given))
