"""How a language model differs from LLaMA's block, and the differences of single classes that need few lines."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmplan.scenario.formats.hf.blocks_by_layer import each, sliding
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import Transformer
from mmplan.scenario.steps import Form

Adapt = Callable[[Fields, Transformer], Transformer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Differences from LLaMA: biases (a key that decides, or always, or never), fixed fields, what needs reading."""

    qkv_bias: str | bool = False
    out_bias: str | bool = False
    mlp_bias: str | bool = False
    shape: Mapping[str, Any] = field(default_factory=dict)
    adapt: tuple[Adapt, ...] = ()
    ffn: str = "intermediate_size"
    stored: Callable[[Fields, Transformer], int] | None = None  # numbers beside the token table
    head_bias: str | bool = False
    form: Callable[[Fields, Transformer], Form | None] | None = None
    layers: Callable[[Fields], int] = Fields.layers
    as_now: Callable[[Fields], Fields] | None = None  # older names of keys
    ties: bool = True  # False: the class has a head of its own whatever `tie_word_embeddings` says
    turned: bool = True  # positions turn queries and keys; False: they are among the numbers `stored`


def window(text: Fields, shape: Transformer) -> Transformer:
    """A window in every layer, unless `layer_types` names full ones (Mistral)."""
    if text.optional("sliding_window", most=100_000_000) is None:
        return shape
    return sliding(text, shape, None if text.values.get("sliding_window") is None else 1_000_000)


def qwen_window(text: Fields, shape: Transformer) -> Transformer:
    """`use_sliding_window` gives the layers from `max_window_layers` on a window."""
    if text.words("layer_types", shape.layers) is not None or not text.flag("use_sliding_window"):
        return sliding(text, shape, None)
    first = text.optional("max_window_layers", least=0) or 0
    window = text.count("sliding_window", most=100_000_000)
    if first >= shape.layers:
        return shape
    return replace(shape, window_tokens=window, sliding=True, global_layers=tuple(range(first)))


def every(interval: int) -> Adapt:
    def adapt(text: Fields, shape: Transformer) -> Transformer:
        return sliding(text, shape, interval)

    return adapt


def interval(text: Fields, shape: Transformer) -> Transformer:
    """`sliding_window_pattern`: the last of so many layers is a full one."""
    pattern = text.get("sliding_window_pattern")
    if isinstance(pattern, str) and set(pattern) <= set("LG") and pattern:
        full = tuple(i for i in range(shape.layers) if pattern[i % len(pattern)] == "G" or i == shape.layers - 1)
        window = text.optional("sliding_window", most=100_000_000)
        return replace(shape, window_tokens=window, sliding=True, global_layers=full) if window else shape
    return sliding(text, shape, text.optional("sliding_window_pattern", most=2_000))


def qk_norm_if(key: str) -> Adapt:
    def adapt(text: Fields, shape: Transformer) -> Transformer:
        return replace(shape, qk_norm=text.flag(key))

    return adapt


def post_norms_if(key: str) -> Adapt:
    def adapt(text: Fields, shape: Transformer) -> Transformer:
        return replace(shape, post_norms=text.flag(key))

    return adapt


def learned_positions(key: str, extra: int = 0) -> Callable[[Fields, Transformer], int]:
    def rows(text: Fields, shape: Transformer) -> int:
        return (text.count(key, most=100_000_000) + extra) * shape.hidden

    return rows


def opt(text: Fields, shape: Transformer) -> Transformer:
    """OPT's defaults; its variants with norms behind the branches or a narrower table are not read."""
    text.refuse_unless("do_layer_norm_before", True, why="norms stand behind the branches")
    text.refuse_unless("word_embed_proj_dim", None, shape.hidden, why="the token table is narrower than the blocks")
    text.refuse_unless("_remove_final_layer_norm", False, None, why="there is no norm at the end")
    text.refuse_unless("layer_norm_elementwise_affine", True, why="its norms have no weights")
    bias = text.flag("enable_bias")
    return replace(shape, qkv_bias=bias, out_bias=bias, mlp_bias=bias)


def mllama(text: Fields, shape: Transformer) -> Transformer:
    """Cross layers attend to image tokens alone: norms on their queries and keys, two gates."""
    usual = tuple(index for index in range(3, 40, 5) if index < shape.layers)
    absent = text.get("cross_attention_layers") is None
    cross = usual if absent else text.indices("cross_attention_layers", shape.layers)
    shape = replace(shape, cross_layers=cross, cross_width=shape.hidden if cross else None)
    return each(shape, lambda index, block: replace(block, qk_norm=True, stored=2) if index in cross else block)


def kosmos(text: Fields, shape: Transformer) -> Transformer:
    """Further norms in front of both output projections; Kosmos-2.5 has that of the MLP alone."""
    first = 2 * shape.hidden if text.kind == "kosmos_2_text_model" else 0
    return replace(shape, stored=first + 2 * shape.ffn)


def gpt2(text: Fields, shape: Transformer) -> Transformer:
    text.refuse_unless("add_cross_attention", False, None, why="it attends to another model")
    return replace(shape, ffn=text.optional("n_inner") or 4 * shape.hidden)


def norms_of_heads(text: Fields, shape: Transformer) -> Transformer:
    """Cohere's norms of queries and keys, with weights for each head."""
    numbers = (shape.heads + shape.kv_heads) * shape.head_dim if text.flag("use_qk_norm") else 0
    return replace(shape, stored=numbers)


def square_heads(text: Fields, shape: Transformer) -> Transformer:
    """Helium's output projection is as wide as the blocks on both sides."""
    if shape.heads * shape.head_dim != shape.hidden:
        message = f"{shape.heads} heads of {shape.head_dim} are {shape.heads * shape.head_dim}, the output projection "
        raise text.error("head_dim", f"{message}takes hidden_size = {shape.hidden}")
    return shape


def molmo(text: Fields, shape: Transformer) -> Transformer:
    text.refuse_unless("norm_after", False, None, why="norms stand behind the branches")
    return replace(shape, qk_norm=True, qk_norm_whole=text.get("qk_norm_type") == "olmo")


def further_words(text: Fields, shape: Transformer) -> int:
    return (text.optional("additional_vocab_size", least=0) or 0) * shape.hidden


def refusing(text: Fields, shape: Transformer, key: str, what: str) -> Transformer:
    text.refuse_unless(key, False, None, why=f"it adds {what}")
    return shape
