"""From a document to a checked `ScenarioSpec`: pydantic's findings become one sentence with file, line and key."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from mmplan.errors import InputError
from mmplan.scenario.document import Document, KeyPath, counted, did_you_mean, listed, shown
from mmplan.scenario.schema import ScenarioSpec

_NOUNS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "finite_number": "a finite number",
}


def validate_spec(document: Document) -> ScenarioSpec:
    """The spec of a document.

    Raises:
        InputError: the first finding in line order.
    """
    try:
        return ScenarioSpec.model_validate(document.values)
    except ValidationError as error:
        findings = [_finding(document, dict(item)) for item in error.errors(include_url=False)]
        raise min(findings, key=lambda finding: finding.line or 0) from None


def _finding(document: Document, item: dict[str, Any]) -> InputError:
    path, value = _path_in_file(document.values, item["loc"])
    context: Mapping[str, Any] = item.get("ctx", {})
    kind = item["type"]
    if kind == "missing":
        path = (*path, item["loc"][-1])
        here = listed(value) if isinstance(value, dict) and value else "no keys"
        return document.error(path, f"this key is missing; found {here}")
    if kind == "unknown_key":
        return document.error((*path, context["key"]), f"unknown key{context['hint']}")
    return document.error(path, _sentence(kind, context, value, item["msg"]))


def _path_in_file(values: Any, loc: tuple[str | int, ...]) -> tuple[KeyPath, Any]:
    """The part of pydantic's location that exists in the file: it also names union branches and `[key]`."""
    path: KeyPath = ()
    for part in loc:
        inside_list = isinstance(values, list) and isinstance(part, int) and part < len(values)
        if inside_list or (isinstance(values, dict) and part in values):
            values = values[part]
            path = (*path, part)
    return path, values


def _sentence(kind: str, context: Mapping[str, Any], value: Any, message: str) -> str:
    if kind == "sentence":
        return str(context["sentence"])
    if kind in _NOUNS:
        return f"expected {_NOUNS[kind]}, found {shown(value)}"
    if kind in ("literal_error", "union_tag_invalid", "union_tag_not_found"):
        return _choice(context, value)
    for name, word in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than")):
        if name in context:
            return f"expected {word} {context[name]}, found {shown(value)}"
    if kind == "string_pattern_mismatch":
        return f"expected a name of letters, digits, '-' and '_' that starts with a letter, found {shown(value)}"
    for name, word in (("min_length", "at least"), ("max_length", "at most")):
        if name in context:
            unit = "character" if isinstance(value, str) else "item"
            return f"expected {word} {counted(context[name], unit)}, found {shown(value)}"
    return f"{message[:1].lower()}{message[1:]}, found {shown(value)}"


def _choice(context: Mapping[str, Any], value: Any) -> str:
    """For literals and for the `kind` of a module."""
    expected = str(context.get("expected", context.get("expected_tags", "'vision_encoder', ...")))
    found = value
    if isinstance(value, dict) and "expected" not in context:
        if "kind" not in value:
            return f"the key 'kind' is missing; found {listed(value)}"
        found = value["kind"]
    words = [word.strip(" '") for word in expected.replace(" or ", ", ").split(",")]
    hint = did_you_mean(found, words) if isinstance(found, str) else ""
    return f"expected {expected}, found {shown(found)}{hint}"
