"""JSON as people keep it: with comments and trailing commas, and templates whose values other scripts fill in.

DeepSpeed reads its settings as Hjson, so that such files run.
"""

import json
import re
from pathlib import Path
from typing import Any

from mmplan.errors import InputError
from mmplan.scenario.document import MAX_DEPTH, read_text
from mmplan.scenario.formats.reading import without_terminal_codes

_TOKEN = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?(?:\*/|\Z)|(?:(?<=\s)|^)#[^\n]*|[{}\[\]:,]|[^\s"{}\[\]:,/#]+|.',
    re.DOTALL | re.MULTILINE,
)
_PLACEHOLDER = re.compile(r"\$\{?[A-Za-z_][\w.]*\}?|<[\w .-]+>|\{\{[\w .-]+\}\}|[A-Z][A-Z0-9_]+")


def relaxed_json(path: Path, what: str) -> tuple[Any, tuple[str, ...]]:
    """(values, names of placeholders): a placeholder's value is the text `${NAME}`.

    Raises:
        InputError: not JSON even so, nested too deep, or a key that stands twice in one mapping.
    """
    text = without_terminal_codes(read_text(path, what))
    pieces: list[str] = []
    placeholders: list[str] = []
    depth: int = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        depth += (token in "{[") - (token in "}]")
        if depth > MAX_DEPTH:
            line = text.count("\n", 0, match.start()) + 1
            raise InputError(f"nested deeper than {MAX_DEPTH} levels", file=path, line=line)
        if token.startswith(("//", "/*")) or (token.startswith("#") and len(token) > 1):
            pieces.append("\n" * token.count("\n"))
        elif _PLACEHOLDER.fullmatch(token):
            name = token.strip("${}<> ")
            placeholders.append(name)
            pieces.append(json.dumps(f"${{{name}}}"))
        else:
            pieces.append(token)
    joined = _without_trailing_commas("".join(pieces))
    try:
        values = json.loads(joined, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        place: int | None = getattr(error, "lineno", None)
        raise InputError(f"not valid JSON: {getattr(error, 'msg', error)}", file=path, line=place) from error
    return values, tuple(dict.fromkeys(placeholders))


def _without_trailing_commas(text: str) -> str:
    """Text outside strings without commas before a closing bracket."""
    parts = re.split(r'("(?:[^"\\\n]|\\.)*")', text)
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r",(\s*[}\]])", r"\1", parts[index])
    return "".join(parts)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key '{key[:60]}' stands twice")
        result[key] = value
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def line_of(text: str, key: str) -> int | None:
    """The line where a quoted key stands first."""
    at = text.find(f'"{key}"')
    return None if at < 0 else text.count("\n", 0, at) + 1
