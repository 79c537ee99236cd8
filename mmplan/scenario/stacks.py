"""Software stacks by name, from `stacks.yaml`: the technique each uses unless told otherwise."""

from functools import cache
from importlib import resources
from typing import Any

import yaml

from mmplan.errors import InputError
from mmplan.scenario.document import did_you_mean, listed
from mmplan.scenario.technique import Technique


@cache
def _stacks() -> dict[str, dict[str, Any]]:
    text = resources.files("mmplan.scenario").joinpath("stacks.yaml").read_text(encoding="utf-8")
    content: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return content


def stack_names() -> tuple[str, ...]:
    """All software stacks."""
    return tuple(_stacks())


def technique_of(stack: str = "mmplan", **choices: Any) -> Technique:
    """The defaults of a stack, with `choices` (fields of `Technique`) in their place.

    Raises:
        InputError: the stack is unknown.
        ValueError: choices that contradict each other.
    """
    row = _stack(stack)
    return Technique(stack=stack, **{**row["technique"], **choices})


def stack_source(stack: str) -> str:
    """Where the defaults of a stack come from; InputError when it is unknown."""
    source: str = _stack(stack)["source"]
    return source


def _stack(stack: str) -> dict[str, Any]:
    if stack not in _stacks():
        hint = did_you_mean(stack, _stacks()) or f"; known stacks: {listed(_stacks())}"
        raise InputError(f"unknown software stack '{stack}'{hint}")
    return _stacks()[stack]
