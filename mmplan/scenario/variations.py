"""`--vary cluster.nodes=1..64`: a key of a scenario file and the values it takes, and the file with other values."""

import itertools
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

import yaml

from mmplan.errors import InputError
from mmplan.scenario.document import Document, shown

MOST_POINTS = 1000  # of a sweep: each is a search of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """A dotted key and its values, in the order in which they are tried."""

    key: str
    values: tuple[Any, ...]


def parse_variation(text: str) -> Variation:
    """`batch.global=256,512`, `cluster.nodes=1..64` (doubling, the end included), `tp=8..64+8` (in steps), mixed.

    Raises:
        InputError: no key, no value, an empty range, or one that never ends.
    """
    key, equals, written = text.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise _error(text, "expected KEY=VALUES such as cluster.nodes=1..64 or batch.global=256,512")
    values = [value for part in _parts(written) for value in _values(text, part.strip())]
    if not values:
        raise _error(text, "expected at least one value")
    distinct = [value for index, value in enumerate(values) if value not in values[:index]]
    return Variation(key=key.strip(), values=tuple(distinct))


def points(variations: Sequence[Variation]) -> tuple[dict[str, Any], ...]:
    """Every combination, key -> value; the last key changes fastest.

    Raises:
        InputError: a key stands twice, none is given, or there are too many combinations.
    """
    keys = [variation.key for variation in variations]
    if not keys:
        raise InputError("--vary: expected at least one key, such as --vary cluster.nodes=1..64")
    for index, key in enumerate(keys):
        if key in keys[:index]:
            raise InputError(f"--vary: {shown(key)} stands twice; write its values in one list: {key}=1,2")
    counts = [len(variation.values) for variation in variations]
    if math.prod(counts) > MOST_POINTS:
        product = " x ".join(map(str, counts))
        raise InputError(f"--vary: {product} = {math.prod(counts):,} points, at most {MOST_POINTS:,} are solved")
    combinations = itertools.product(*(variation.values for variation in variations))
    return tuple(dict(zip(keys, values, strict=True)) for values in combinations)


def varied(document: Document, changes: Mapping[str, Any]) -> Document:
    """The document with other values under dotted keys; mappings on the way are made where they are missing.

    Raises:
        InputError: a key leads through a value that is no mapping.
    """
    values = deepcopy(document.values)
    for key, value in changes.items():
        *way, last = key.split(".")
        place = values
        for depth, part in enumerate(way):
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                whole = ".".join(way[: depth + 1])
                raise InputError(f"--vary {key}: {whole} is {shown(place)}, not a mapping", file=document.file)
        place[last] = value
    return replace(document, values=values)


def _parts(written: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth = [""], 0
    for letter in written:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _values(text: str, part: str) -> list[Any]:
    first, dots, rest = part.partition("..")
    if dots and part[:1] not in "[{'\"":
        return _range(text, part, first, rest)
    try:
        value = yaml.safe_load(part)
    except yaml.YAMLError as error:
        raise _error(text, f"expected a value, found {shown(part)}") from error
    if not part:
        raise _error(text, "expected a value between commas, found none")
    return [value]


def _range(text: str, part: str, first: str, rest: str) -> list[Any]:
    last, plus, step = rest.partition("+")
    low, high, by = (_number(text, part, word) for word in (first, last, step if plus else "1"))
    if high < low:
        raise _error(text, f"the range {part} is empty: {last} is below {first}")
    if plus and by <= 0:
        raise _error(text, f"expected a step above 0 in {part}, found {step}")
    if not plus and low <= 0:
        raise _error(text, f"doubling from {first} never reaches {last}; write a step: {first}..{last}+1")
    found, value = [], low
    while value < high:
        found.append(value)
        if len(found) > MOST_POINTS:
            raise _error(text, f"{part} has more than {MOST_POINTS:,} values")
        value = value + by if plus else 2 * value
    if not plus or value == high:
        found.append(high)
    return [int(item) if item == item.to_integral_value() else float(item) for item in found]


def _number(text: str, part: str, word: str) -> Decimal:
    try:
        number = Decimal(word.strip())
    except InvalidOperation as error:
        raise _error(text, f"expected numbers in the range {part}, found {shown(word)}") from error
    if not number.is_finite():
        raise _error(text, f"expected numbers in the range {part}, found {shown(word)}")
    return number


def _error(text: str, message: str) -> InputError:
    return InputError(message, key=f"--vary {text}")
