"""Language models of Hugging Face configs: their blocks, table and head, as the stack of their `model_type` says."""

from dataclasses import replace

from mmplan.scenario.document import listed, shown
from mmplan.scenario.formats.hf.blocks_by_layer import per_layer
from mmplan.scenario.formats.hf.stack import Stack
from mmplan.scenario.formats.hf.stacks import STACKS
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.formats.hf_modules import SOURCE, divided
from mmplan.scenario.scenario import ModelModule, TextInput, Transformer, Vocabulary


def text_module(
    config: Fields,
    *keys: str,
    default: str | None = None,
    tied: bool | None = None,
    rows: int = 0,
    name: str = "llm",
    flat: bool = False,
) -> ModelModule:
    """The language model of the nested config `keys[0]` (or another of `keys`), or of the config itself without keys.

    Args:
        default: `model_type` of a nested config that names none.
        tied: whether head and token table share a matrix, where the family decides and no config.
        rows: of the token table beyond the head's.
        flat: keys may stand at the top.

    Raises:
        InputError: an unknown model_type, or a size that is missing or impossible.
    """
    text = config.part(*keys, kind=default, flat=flat) if keys else config
    if text.kind not in STACKS:
        raise text.error("model_type", f"expected {listed(sorted(STACKS), 200)}, found {shown(text.kind)}")
    if tied is None:
        tied = STACKS[text.kind].ties and is_tied(config, text)
    return language_module(text, tied=tied, rows=rows, name=name)


def is_tied(config: Fields, text: Fields) -> bool:
    """The outer config decides (its class's default where it is silent); some classes ask the text config too."""
    own = text.flag("tie_embedding" if text.has("tie_embedding") else "tie_word_embeddings")  # LFM2's older name
    if config.path == text.path and config.kind == text.kind:
        return own
    if config.kind == "internvl_chat":
        return own
    return config.flag("tie_word_embeddings") or (config.of_class.tie_from_text and own)


def language_module(text: Fields, *, tied: bool, rows: int = 0, name: str = "llm") -> ModelModule:
    """The module of a text config whose `model_type` is known."""
    stack = STACKS[text.kind]
    if stack.as_now is not None:
        text = stack.as_now(text)
    shape = per_layer(text, stack_shape(text, stack))
    size, stored = text.count("vocab_size"), rows * shape.hidden
    stored += stack.stored(text, shape) if stack.stored is not None else 0
    stored += size if _decided(text, stack.head_bias) else 0
    return ModelModule(
        name=name,
        kind="language_model",
        modality="text",
        transformer=shape,
        vocabulary=Vocabulary(size=size, tied=tied),
        # positions that are stored, not turned
        text=TextInput(positions="none") if stack.stored is not None and not stack.turned else None,
        stored=stored,
        form=stack.form(text, shape) if stack.form is not None else None,
        source=SOURCE,
    )


def stack_shape(text: Fields, stack: Stack) -> Transformer:
    hidden, heads = text.count("hidden_size"), text.count("num_attention_heads")
    latent = "mla" in stack.shape
    kv_heads = heads if latent else text.optional("num_key_value_heads") or heads
    if heads % kv_heads:
        message = f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}"
        raise text.error("num_key_value_heads", message)
    shape = Transformer(
        layers=stack.layers(text),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=text.optional("head_dim") or (1 if latent else divided(text, hidden, heads)),
        ffn=_ffn(text, stack),
        gated_mlp=True,
        causal=True,
        norm="rms",
        qkv_bias=_decided(text, stack.qkv_bias),
        out_bias=_decided(text, stack.out_bias),
        mlp_bias=_decided(text, stack.mlp_bias),
    )
    shape = replace(shape, **{key: value for key, value in stack.shape.items() if key != "mla"})
    for adapt in stack.adapt:
        shape = adapt(text, shape)
    if shape.head_dim % 2 and shape.mla is None and shape.delta is None and stack.turned:
        raise text.error("head_dim", f"rotary positions need an even width, found {shape.head_dim}")
    return shape


def _ffn(text: Fields, stack: Stack) -> int:
    """Width of the MLP; the first one where each block has its own."""
    if text.has("block_ff_dim"):  # LFM2's older name
        return text.count("block_ff_dim")
    widths = text.get(stack.ffn)
    if isinstance(widths, list) and widths and text.kind == "gemma3n_text":
        return replace(text, values={**text.values, stack.ffn: widths[0]}).count(stack.ffn)
    return text.count(stack.ffn)


def _decided(text: Fields, by: str | bool) -> bool:
    return text.flag(by) if isinstance(by, str) else by
