"""No-split zones of a scenario file as layer ids: single layers, ranges `llm.0-7`, or a module for all its layers."""

import re
from collections.abc import Mapping

from mmplan.scenario.document import Document, KeyPath, did_you_mean, shown
from mmplan.scenario.layer_ids import module_layer_ids
from mmplan.scenario.scenario import Model

_RANGE = re.compile(r"^(?P<module>.+)\.(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?$")


def no_split_layers(items: list[str], model: Model, document: Document) -> tuple[str, ...]:
    """Layer ids of `constraints.no_split`.

    Raises:
        InputError: a layer that the model does not have, or a range that runs backwards.
    """
    known = {layer for module in model.modules for layer in module_layer_ids(module)}
    names = {module.name: module_layer_ids(module) for module in model.modules}
    result: list[str] = []
    for index, item in enumerate(items):
        at: KeyPath = ("constraints", "no_split", index)
        if item in names:
            result.extend(names[item])
            continue
        match = _RANGE.match(item)
        last = f"{match['module']}.{int(match['last'] or match['first'])}" if match is not None else item
        if last not in known:
            hint = _layer_hint(item, match["module"] if match is not None else None, names)
            raise document.error(at, f"unknown layer {shown(item)}{hint}")
        if match is None:
            result.append(item)
            continue
        first, end = int(match["first"]), int(match["last"] or match["first"])
        if first > end:
            raise document.error(at, f"the range {shown(item)} runs backwards")
        result.extend(f"{match['module']}.{number}" for number in range(first, end + 1))
    return tuple(dict.fromkeys(result))


def _layer_hint(item: str, module: str | None, names: Mapping[str, tuple[str, ...]]) -> str:
    """What is said about an unknown layer."""
    blocks = [layer for layer in names.get(module or "", ()) if layer.rpartition(".")[2].isdigit()]
    if blocks:
        return f"; '{module}' has {len(blocks)} block{'s' if len(blocks) > 1 else ''}, the last is '{blocks[-1]}'"
    known = [*names, *(layer for layers in names.values() for layer in layers)]
    return did_you_mean(item, known) or "; layers are named like 'llm.0', 'llm.0-7', 'llm.head'"
