"""Which tensor-parallel degrees divide everything that they have to divide."""

import math

from mmplan.cost_models.head_groups import HeadGroups
from mmplan.scenario.scenario import Model, ModelModule, Scenario, Transformer


def sharded_widths(module: ModelModule) -> dict[str, int]:
    """Sizes that tensor parallelism splits in a module and that have to divide, by their name."""
    widths: dict[str, int] = {}
    if module.transformer is not None:
        for shape in module.transformer.shapes():
            for name, width in _of_blocks(module.transformer, shape).items():
                widths[name] = math.gcd(width, widths.get(name, width))
    if module.vocabulary is not None and module.vocabulary.pad_to == 1:
        widths["vocabulary"] = module.vocabulary.size
    if module.projector is not None:
        inner = module.projector.dims[1:-1:2]
        widths |= {f"dims[{2 * position + 1}]": width for position, width in enumerate(inner)}
    return widths


def _of_blocks(whole: Transformer, shape: Transformer) -> dict[str, int]:
    """The same of the blocks of one shape."""
    widths: dict[str, int] = {}
    if shape.short_conv:
        widths["hidden"] = shape.hidden
    elif shape.delta is not None:
        widths |= {"key_heads": shape.delta.key_heads, "value_heads": shape.delta.value_heads}
    elif not shape.pad_heads:
        widths |= {"heads": shape.heads} | ({} if shape.mla is not None else {"kv_heads": shape.kv_heads})
    blocks = [index for index in range(whole.layers) if whole.at(index) == shape]
    if shape.moe is None or not all(shape.moe.in_layer(index) for index in blocks):
        widths["ffn"] = shape.ffn
    if shape.moe is not None and any(shape.moe.in_layer(index) for index in blocks):
        widths["expert_ffn"] = shape.moe.expert_ffn
        widths |= {"shared_ffn": shape.moe.shared_ffn} if shape.moe.shared_ffn else {}
    return widths


def divides(module: ModelModule, tp: int) -> bool:
    """Whether tensor parallelism can and may split the module so."""
    if module.recorded:  # its layers that no degree splits lie whole on each rank
        return tp == 1 or (tp in module.recorded_tp and not module.whole)
    if module.form is not None and module.kind != "language_model":  # convolutions and odd widths stay whole
        return tp == 1
    return (tp == 1 or not module.whole) and all(width % tp == 0 for width in sharded_widths(module).values())


def copies_of_keys(model: Model, tp: int) -> tuple[int, ...]:
    """Numbers of ranks over which copies of a key head lie, more than 1 and fewer than tp, ascending."""
    found = set()
    for module in model.modules:
        for shape in module.transformer.shapes() if module.transformer is not None else ():
            if shape.mla is None and shape.delta is None:
                found.add(HeadGroups(shape.heads, shape.kv_heads).copies(tp))
    return tuple(sorted(found - {1, tp}))


def tp_degrees(scenario: Scenario) -> tuple[int, ...]:
    """Degrees that divide each pool's node and the heads, key-value heads, ffn and vocabulary of every language model,
    ascending; 1 is always among them. Other modules may be left whole (`Layout.spread`)."""
    sizes = [pool.devices_per_node for pool in scenario.cluster.pools]
    languages = [module for module in scenario.model.modules if module.kind == "language_model"]
    split = languages or scenario.model.modules
    return tuple(
        degree
        for degree in range(1, min(sizes) + 1)
        if all(size % degree == 0 for size in sizes) and all(divides(module, degree) for module in split)
    )


def heads_of(shape: Transformer) -> tuple[tuple[str, int], ...]:
    """Kinds of heads of a block and how many of each there are."""
    if shape.delta is not None:
        return (("key_heads", shape.delta.key_heads), ("value_heads", shape.delta.value_heads))
    return (("heads", shape.heads), ("kv_heads", shape.kv_heads))
