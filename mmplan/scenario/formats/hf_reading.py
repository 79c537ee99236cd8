"""A Hugging Face config.json for `mmplan import`: the model that it describes, module by module."""

import json
from collections.abc import Sequence
from pathlib import Path

from mmplan.errors import InputError
from mmplan.scenario.document import counted
from mmplan.scenario.formats.hf_config import read_hf_config
from mmplan.scenario.formats.reading import Head, Reading


def looks_like_hf_config(head: Head) -> bool:
    """A JSON object with a `model_type` or `architectures`."""
    if not head.text.lstrip().startswith("{"):
        return False
    if not head.whole:
        return '"model_type"' in head.text
    try:
        values = json.loads(head.text)
    except (ValueError, RecursionError):
        return '"model_type"' in head.text
    return isinstance(values, dict) and not {"model_type", "architectures"}.isdisjoint(values)


def read_hf_configs(paths: Sequence[Path]) -> Reading:
    """The model of one config.json.

    Raises:
        InputError: several files, or one that `read_hf_config` refuses.
    """
    if len(paths) > 1:
        raise InputError(f"a scenario has one model: expected one config.json, found {counted(len(paths), 'file')}")
    model = read_hf_config(paths[0])
    names = ", ".join(f"{module.name} ({module.kind.replace('_', ' ')})" for module in model.modules)
    fragment = {"model": {"hf_config": str(paths[0])}}
    return Reading(kind="hf", fragment=fragment, read=(f"{counted(len(model.modules), 'module')}: {names}",))
