"""Layer ids of a module, and their short form: `llm.0-7` stands for `llm.0` to `llm.7`."""

import re
from collections.abc import Iterable, Mapping, Sequence

from mmplan.scenario.document import did_you_mean, shown
from mmplan.scenario.scenario import ModelModule

_INDEXED = re.compile(r"^(?P<stem>.+)\.(?P<first>\d+)(?:-(?P<last>\d+))?$")
_RANGE = re.compile(r"^(?P<module>.+)\.(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?$")
_MAX_RANGE = 100_000  # no model has more layers; a longer range is a typing error, not a list to build


def module_layer_ids(module: ModelModule) -> tuple[str, ...]:
    """The ids of a module's layers, in order."""
    if module.recorded:
        return module.recorded
    if module.projector is not None:
        return (f"{module.name}.0",)
    assert module.transformer is not None
    blocks = tuple(f"{module.name}.{index}" for index in range(module.transformer.layers))
    ends = (f"{module.name}.head", f"{module.name}.loss") if module.kind == "language_model" else ()
    return (f"{module.name}.embed", *blocks, *ends)


def last_layer_id(module: ModelModule) -> str:
    """The layer whose output other modules read."""
    return f"{module.name}.0" if module.transformer is None else f"{module.name}.{module.transformer.layers - 1}"


def expand_ids(short: Iterable[str]) -> tuple[str, ...]:
    """`("llm.embed", "llm.0-2")` -> `("llm.embed", "llm.0", "llm.1", "llm.2")`.

    Raises:
        ValueError: a range runs backwards or is absurdly long.
    """
    ids: list[str] = []
    for item in short:
        match = _INDEXED.match(item)
        if match is None or match["last"] is None:
            ids.append(item)
            continue
        if not 0 <= int(match["last"]) - int(match["first"]) < _MAX_RANGE:
            raise ValueError(f"'{item}' is not a range of layers")
        ids.extend(f"{match['stem']}.{index}" for index in range(int(match["first"]), int(match["last"]) + 1))
    return tuple(ids)


def shorten_ids(ids: Sequence[str]) -> tuple[str, ...]:
    """Inverse of `expand_ids` up to merging: consecutive indices of one module become one range."""
    short: list[str] = []
    run: tuple[str, int, int] | None = None

    def close() -> None:
        if run is not None:
            stem, first, last = run
            short.append(f"{stem}.{first}" if first == last else f"{stem}.{first}-{last}")

    for item in ids:
        match = _INDEXED.match(item)
        if match is not None and run is not None and (match["stem"], int(match["first"])) == (run[0], run[2] + 1):
            run = (run[0], run[1], run[2] + 1)
            continue
        close()
        run = (match["stem"], int(match["first"]), int(match["first"])) if match is not None else None
        if match is None:
            short.append(item)
    close()
    return tuple(short)


def layer_hint(item: str, module: str | None, names: Mapping[str, tuple[str, ...]]) -> str:
    """What is said about an unknown layer."""
    blocks = [layer for layer in names.get(module or "", ()) if layer.rpartition(".")[2].isdigit()]
    if blocks:
        return f"; '{module}' has {len(blocks)} block{'s' if len(blocks) > 1 else ''}, the last is '{blocks[-1]}'"
    known = [*names, *(layer for layers in names.values() for layer in layers)]
    return did_you_mean(item, known) or "; layers are named like 'llm.0', 'llm.0-7', 'llm.head'"


def layers_named(item: str, names: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Layer ids of a module, a layer or a range such as `llm.0-7`.

    Args:
        names: layer ids by module.

    Raises:
        ValueError: the model does not have it, or the range runs backwards.
    """
    if item in names:
        return names[item]
    match = _RANGE.match(item)
    last = f"{match['module']}.{int(match['last'] or match['first'])}" if match is not None else item
    if not any(last in layers for layers in names.values()):
        raise ValueError(f"unknown layer {shown(item)}{layer_hint(item, match['module'] if match else None, names)}")
    if match is None:
        return (item,)
    first, end = int(match["first"]), int(match["last"] or match["first"])
    if first > end:
        raise ValueError(f"the range {shown(item)} runs backwards")
    return tuple(f"{match['module']}.{number}" for number in range(first, end + 1))
