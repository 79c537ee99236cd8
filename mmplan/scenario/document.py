"""Reading a YAML file into plain values, remembering the line of every key.

Limits keep a hostile file harmless: 1 MB, nesting of 50, 100,000 nodes after aliases are expanded.
"""

import difflib
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mmplan.errors import InputError
from mmplan.scenario.text_bytes import open_text

MAX_FILE_BYTES = 1_000_000
MAX_DEPTH = 50
MAX_NODES = 100_000

KeyPath = tuple[str | int, ...]

# YAML 1.1 reads `1e-4` as text because it has no dot; people mean a number.
_NUMBER = re.compile(r"^[+-]?\d+(\.\d*)?[eE][+-]?\d+$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """The values of a file and, for every key path, its 1-based line."""

    file: Path
    values: Any
    lines: dict[KeyPath, int]

    def error(self, path: KeyPath, message: str) -> InputError:
        """The error at `path`, with the line of the deepest part of it that exists in the file."""
        known = path
        while known not in self.lines and known:
            known = known[:-1]
        return InputError(message, file=self.file, line=self.lines.get(known, 1), key=dotted(path) or None)


def dotted(path: KeyPath) -> str:
    """`("model", "edges", 0)` -> `model.edges[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'vision'?`, or nothing when no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def listed(words: Iterable[object], limit: int = 12) -> str:
    """`'a', 'b', 'c'`, cut after `limit` words."""
    quoted = [f"'{word}'" for word in words]
    return ", ".join(quoted[:limit]) + (f" and {len(quoted) - limit} more" if len(quoted) > limit else "")


def counted(count: int, word: str) -> str:
    """`1 item`, `2 items`."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def shown(value: object) -> str:
    """A value as it is quoted in a message: short, on one line, with its YAML name."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, dict):
        return f"a mapping with {counted(len(value), 'key')}" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {counted(len(value), 'item')}" if value else "an empty list"
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a huge number"
    if isinstance(value, int | float):
        return repr(value)
    text = " ".join(str(value).split())
    return f"'{text[:60]}...'" if len(text) > 60 else f"'{text}'"


def read_text(path: Path, what: str = "scenario", most_bytes: int = MAX_FILE_BYTES) -> str:
    """The text of a file of at most `most_bytes`: UTF-8, UTF-16 or a gzip of these; InputError otherwise."""
    try:
        if path.is_dir():
            raise InputError(f"expected a {what} file, found a directory", file=path)
        with open_text(path) as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise InputError(f"a {what} has at most {most_bytes:,} bytes, this file has more", file=path)
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"expected UTF-8 text, found byte 0x{error.object[error.start]:02x} at {error.start}", file=path
        ) from error
    except FileNotFoundError as error:
        raise InputError(f"no such file{_nearby(path)}", file=path) from error
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise InputError(f"cannot read the {what}: {error}", file=path) from error


def _nearby(path: Path) -> str:
    """A close file name in the same folder, as a did-you-mean."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    return did_you_mean(path.name, names)


def read_document(path: Path, most_bytes: int = MAX_FILE_BYTES, most_nodes: int = MAX_NODES) -> Document:
    """Compose a YAML mapping.

    Raises:
        InputError: unreadable, not UTF-8, not YAML, empty, not a mapping, a key given twice, too deep or too large.
    """
    text = read_text(path, most_bytes=most_bytes)
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise InputError(f"not valid YAML: {' '.join(str(error).split())}", file=path) from error
    try:
        node = loader.get_single_node()
        if node is None:
            raise InputError("expected a scenario, found an empty file", file=path)
        reader = _NodeReader(path, loader, most_nodes)
        values = reader.value(node, (), 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        raise InputError(f"not valid YAML: {error.problem or error.context}", file=path, line=line) from error
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"not valid YAML: {' '.join(str(error).split())}", file=path) from error
    except RecursionError as error:
        raise InputError(f"nested deeper than {MAX_DEPTH} levels", file=path) from error
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise InputError(f"expected a mapping with 'name', 'model', ..., found {shown(values)}", file=path, line=1)
    return Document(file=path, values=values, lines=reader.lines)


class _NodeReader:
    """Turns composed nodes into values and collects `lines`."""

    def __init__(self, file: Path, loader: yaml.SafeLoader, most_nodes: int) -> None:
        self.file, self.loader, self.most_nodes = file, loader, most_nodes
        self.lines: dict[KeyPath, int] = {}
        self.nodes = 0

    def value(self, node: yaml.Node, path: KeyPath, depth: int) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        self.nodes += 1
        if depth > MAX_DEPTH:
            raise self.fail(node, path, f"nested deeper than {MAX_DEPTH} levels")
        if self.nodes > self.most_nodes:
            raise self.fail(node, path, f"more than {self.most_nodes:,} values")
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index), depth + 1) for index, item in enumerate(node.value)]
        return self.scalar(node, path)

    def mapping(self, node: yaml.MappingNode, path: KeyPath, depth: int) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.fail(key_node, path, "expected a word as key, found a list or mapping")
            key = self.scalar(key_node, path)
            if key in result:
                first = self.lines[(*path, key)]
                raise self.fail(key_node, (*path, key), f"the key stands twice, first in line {first}")
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            result[key] = self.value(value_node, (*path, key), depth + 1)
        return result

    def scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        if node.tag == "tag:yaml.org,2002:str":
            plain = isinstance(node, yaml.ScalarNode) and node.style is None
            return float(node.value) if plain and _NUMBER.match(node.value) else node.value
        if node.tag == "tag:yaml.org,2002:timestamp":
            return node.value
        try:
            return self.loader.construct_object(node)
        except yaml.YAMLError as error:
            raise self.fail(node, path, f"the tag '{node.tag}' is not allowed") from error
        except ValueError as error:
            raise self.fail(node, path, "expected a number, found one that is too long or malformed") from error

    def fail(self, node: yaml.Node, path: KeyPath, message: str) -> InputError:
        return InputError(message, file=self.file, line=node.start_mark.line + 1, key=dotted(path) or None)
