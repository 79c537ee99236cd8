"""Stacks whose blocks differ from layer to layer: one shape per layer, or which of them have experts or windows."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from mmplan.scenario.document import listed, shown
from mmplan.scenario.formats.hf_fields import Fields
from mmplan.scenario.scenario import Moe, Transformer, Variant


def by_layer(shapes: Sequence[Transformer]) -> Transformer:
    """One stack of the given blocks: the most frequent shape (with experts, where any has them) and its variants."""
    counts = Counter(shapes)
    main = max(counts, key=lambda shape: (shape.moe is not None, counts[shape]))
    others = [shape for shape in counts if shape != main]
    variants = tuple(
        Variant(layers=tuple(index for index, shape in enumerate(shapes) if shape == other), shape=other)
        for other in others
    )
    return replace(main, layers=len(shapes), variants=variants)


def each(shape: Transformer, change: Callable[[int, Transformer], Transformer]) -> Transformer:
    """The stack with every block changed by its index, whatever variants it has."""
    return by_layer([change(index, replace(shape.at(index), variants=())) for index in range(shape.layers)])


def experts_in(shape: Transformer, moe: Moe, layers: Sequence[int]) -> Transformer:
    """The stack with experts in the given layers and its MLP in the others."""
    chosen = tuple(layers)
    if not chosen:
        return shape
    regular_forms = () if shape.variants else ((0, 1), (chosen[0], 1), (0, chosen[0] + 1))
    for first_dense, every in regular_forms:
        regular = replace(moe, first_dense=first_dense, every=every)
        if tuple(index for index in range(shape.layers) if regular.in_layer(index)) == chosen:
            return replace(shape, moe=regular)
    return each(shape, lambda index, block: replace(block, moe=moe if index in chosen else None))


def full_layers(
    text: Fields, layers: int, interval: int | None, other: tuple[str, ...] = ("sliding_attention",)
) -> tuple[int, ...]:
    """Layers with attention to all tokens: those that `layer_types` names so, else every `interval`-th (None: all)."""
    types = text.words("layer_types", layers)
    if types is None:
        return tuple(index for index in range(layers) if interval is None or (index + 1) % interval == 0)
    for index, word in enumerate(types):
        if word != "full_attention" and word not in other:
            known = ", ".join(f"'{name}'" for name in ("full_attention", *other))
            raise text.error("layer_types", f"expected {known} for layer {index}, found '{word:.40}'")
    return tuple(index for index, word in enumerate(types) if word == "full_attention")


def kinds_of_layers(text: Fields, layers: int, known: tuple[str, ...], usual: Callable[[int], str]) -> list[str]:
    """What `layer_types` calls each layer, or what the class does where it is absent."""
    types = text.words("layer_types", layers)
    for index, word in enumerate(types or ()):
        if word not in known:
            raise text.error("layer_types", f"expected {listed(known)} for layer {index}, found '{word:.40}'")
    return types or [usual(index) for index in range(layers)]


def sliding(text: Fields, shape: Transformer, interval: int | None) -> Transformer:
    """The stack with windows of `sliding_window` tokens in all but its full layers."""
    full = full_layers(text, shape.layers, interval)
    if len(full) == shape.layers:
        return shape
    window = text.optional("sliding_window", most=100_000_000)
    if window is None:
        return shape
    return each(shape, lambda _, block: replace(block, window_tokens=window, sliding=True, global_layers=full))


# Keys of `per_layer_config`, which files of transformers 5 may have, and the field of a block that each sets.
PER_LAYER = {
    "head_dim": "head_dim",
    "intermediate_size": "ffn",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "sliding_window": "window_tokens",
}


def per_layer(text: Fields, shape: Transformer) -> Transformer:
    """The stack with what `per_layer_config` says of single layers (counted from 0)."""
    given = text.get("per_layer_config")
    if given is None or given == {}:
        return shape
    if not isinstance(given, dict):
        raise text.error("per_layer_config", f"expected a mapping of layers, found {shown(given)}")
    changes: dict[int, dict[str, int]] = {}
    for layer, values in given.items():
        where = text.key("per_layer_config")
        if not str(layer).isdigit() or int(str(layer)[:9]) >= shape.layers or not isinstance(values, dict):
            raise text.error(
                "per_layer_config", f"expected keys of one of {shape.layers} layers, found '{layer!s:.20}'"
            )
        inner = replace(text, values=values, defaults={}, path=f"{where}.{layer!s:.20}")
        unknown = sorted(str(key) for key in values if key not in PER_LAYER)
        if unknown:
            raise inner.error(unknown[0][:40], f"expected {listed(PER_LAYER)}")
        changes[int(layer)] = {PER_LAYER[key]: inner.count(key, most=100_000_000) for key in values}

    def block(index: int, plain: Transformer) -> Transformer:
        plain = replace(plain, **changes.get(index, {}))  # type: ignore[arg-type]
        if plain.heads % plain.kv_heads:
            message = f"layer {index} has {plain.heads} heads, not a multiple of {plain.kv_heads} key-value heads"
            raise text.error("per_layer_config", message)
        return plain

    return each(shape, block)
