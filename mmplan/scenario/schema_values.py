"""Values that a scenario file may write in more than one way: quantities, distributions, sizes, lists.

Each parser raises one sentence; the JSON Schema beside it says the same to an editor.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from mmplan.scenario.document import did_you_mean, shown
from mmplan.scenario.scenario import Distribution
from mmplan.scenario.schedule_names import SCHEDULE_NAMES
from mmplan.scenario.technique import (
    COMPRESSIONS,
    FP8S,
    OFFLOADS,
    RECOMPUTES,
    SHARDINGS,
    Compression,
    Fp8,
    Offload,
    Recompute,
    Sharding,
)
from mmplan.units import parse_bytes, parse_bytes_per_s, parse_flops_per_s, parse_seconds

MAX_AMOUNT = 1e9  # tokens, images, seconds of one sample
MAX_QUANTITY = 1e21
MAX_MEMORY_BYTES = 2.0**50  # of one device: 1 PiB
MAX_COUNT = 1_000_000
_IMAGE_SIZE = re.compile(r"^\s*(\d{1,6})\s*[xX]\s*(\d{1,6})\s*$")


def refuse(message: str) -> PydanticCustomError:
    """The error of a value, with a finished sentence."""
    return PydanticCustomError("sentence", "{sentence}", {"sentence": message})


def quantity(parse: Callable[[str], float], example: str, *, zero: bool = False, most: float = MAX_QUANTITY) -> Any:
    """A validator of texts with a unit, such as '80 GiB', in base units."""

    def validate(value: Any) -> float:
        if not isinstance(value, str):
            raise refuse(f"expected {example} with its unit, found {shown(value)}")
        try:
            number = parse(value[:100])
        except (ValueError, OverflowError) as error:
            raise refuse(
                str(error) if isinstance(error, ValueError) else f"expected {example}, found {shown(value)}"
            ) from error
        if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
            raise refuse(f"expected {example}, {'zero or more' if zero else 'above zero'}, found {shown(value)}")
        if number > most:
            raise refuse(f"expected {example}, at most {most:g} in base units, found {shown(value)}")
        return number

    return BeforeValidator(validate)


def _text(example: str) -> Any:
    return WithJsonSchema({"type": "string", "examples": [example]})


Bytes = Annotated[
    int, quantity(parse_bytes, "a size such as '80 GiB'", zero=True, most=MAX_MEMORY_BYTES), _text("80 GiB")
]
Bandwidth = Annotated[float, quantity(parse_bytes_per_s, "a bandwidth such as '400 Gb/s'"), _text("400 Gb/s")]
Rate = Annotated[float, quantity(parse_flops_per_s, "a rate such as '989 TFLOP/s'"), _text("989 TFLOP/s")]
Seconds = Annotated[float, quantity(parse_seconds, "a time such as '10 us'", zero=True), _text("10 us")]


def _amount(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse(f"expected a number, found {shown(value)}")
    if not 0 <= value <= MAX_AMOUNT:
        raise refuse(f"expected a number from 0 to {MAX_AMOUNT:,.0f}, found {shown(value)}")
    return float(value)


def parse_distribution(value: Any) -> Distribution:
    """A number, a list of equally likely numbers, or `{histogram: {value: weight}}` with relative weights."""
    if isinstance(value, Distribution):
        return value
    if isinstance(value, list):
        if not value:
            raise refuse("expected at least one number, found an empty list")
        return Distribution(values=tuple(_amount(item) for item in value), weights=(1.0 / len(value),) * len(value))
    if not isinstance(value, dict):
        return Distribution(values=(_amount(value),), weights=(1.0,))
    histogram = value.get("histogram")
    if list(value) != ["histogram"] or not isinstance(histogram, dict) or not histogram:
        raise refuse("expected a number, a list of numbers or {histogram: {value: weight}}, found another mapping")
    weights = [_amount(weight) for weight in histogram.values()]
    if sum(weights) <= 0:
        raise refuse(f"expected histogram weights with a sum above 0, found {len(weights)} weights that sum to 0")
    values = tuple(_amount(key) for key in histogram)
    return Distribution(values=values, weights=tuple(weight / sum(weights) for weight in weights))


_NUMBER = {"type": "number", "minimum": 0}
DistributionSpec = Annotated[
    Distribution,
    BeforeValidator(parse_distribution),
    WithJsonSchema(
        {
            "anyOf": [
                _NUMBER,
                {"type": "array", "items": _NUMBER, "minItems": 1},
                {
                    "type": "object",
                    "properties": {"histogram": {"type": "object", "additionalProperties": _NUMBER}},
                    "required": ["histogram"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]


def _image_size(value: Any) -> tuple[int, int]:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 100_000:
        return value, value
    match = _IMAGE_SIZE.match(value) if isinstance(value, str) else None
    if match is None or not (1 <= int(match[1]) <= 100_000 and 1 <= int(match[2]) <= 100_000):
        raise refuse(f"expected pixels such as 336 or '480x640' (height x width), found {shown(value)}")
    return int(match[1]), int(match[2])


def parse_image_sizes(value: Any) -> tuple[tuple[int, int], ...]:
    """(height, width) of one size or of a list of equally likely ones."""
    if value == []:
        raise refuse("expected at least one image size, found an empty list")
    return tuple(_image_size(item) for item in (value if isinstance(value, list) else [value]))


_SIZE = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^\d+x\d+$"}]}
ImageSizes = Annotated[
    tuple[tuple[int, int], ...],
    BeforeValidator(parse_image_sizes),
    WithJsonSchema({"anyOf": [_SIZE, {"type": "array", "items": _SIZE, "minItems": 1}]}),
]


def _counts(value: Any) -> list[int]:
    items = value if isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or not 1 <= item <= MAX_COUNT:
            raise refuse(f"expected a count of at least 1 or a list of them, found {shown(item)}")
    if not items:
        raise refuse("expected a count of at least 1 or a list of them, found none; without the key all are tried")
    return sorted(set(items))


_COUNT = {"type": "integer", "minimum": 1}
CountOrList = Annotated[
    list[int],
    BeforeValidator(_counts),
    WithJsonSchema({"anyOf": [_COUNT, {"type": "array", "items": _COUNT}]}),
]


def _choices_of(names: Sequence[str]) -> tuple[Callable[[Any], list[Any]], dict[str, Any]]:
    """Parser and JSON Schema of one of the names or a list of them."""

    def choices(value: Any) -> list[Any]:
        items = value if isinstance(value, list) else [value]
        for item in items:
            if item not in names:
                hint = did_you_mean(item, names) if isinstance(item, str) else ""
                raise refuse(f"expected one of {', '.join(names)}, found {shown(item)}{hint}")
        if not items:
            raise refuse(f"expected one of {', '.join(names)}, found none; without the key all may be")
        return items

    one = {"enum": list(names)}
    return choices, {"anyOf": [one, {"type": "array", "items": one}]}


_SHARDING, _SHARDING_SCHEMA = _choices_of(SHARDINGS)
Shardings = Annotated[list[Sharding], BeforeValidator(_SHARDING), WithJsonSchema(_SHARDING_SCHEMA)]
_RECOMPUTE, _RECOMPUTE_SCHEMA = _choices_of(RECOMPUTES)
Recomputes = Annotated[list[Recompute], BeforeValidator(_RECOMPUTE), WithJsonSchema(_RECOMPUTE_SCHEMA)]
_OFFLOAD, _OFFLOAD_SCHEMA = _choices_of(OFFLOADS)
Offloads = Annotated[list[Offload], BeforeValidator(_OFFLOAD), WithJsonSchema(_OFFLOAD_SCHEMA)]
_COMPRESSION, _COMPRESSION_SCHEMA = _choices_of(COMPRESSIONS)
Compressions = Annotated[list[Compression], BeforeValidator(_COMPRESSION), WithJsonSchema(_COMPRESSION_SCHEMA)]
_FP8, _FP8_SCHEMA = _choices_of(FP8S)
Fp8s = Annotated[list[Fp8], BeforeValidator(_FP8), WithJsonSchema(_FP8_SCHEMA)]


def _either(value: Any) -> list[bool]:
    if value == "any":
        return [False, True]
    if not isinstance(value, bool):
        raise refuse(f"expected true, false or any, found {shown(value)}")
    return [value]


EitherWay = Annotated[list[bool], BeforeValidator(_either), WithJsonSchema({"enum": [True, False, "any"]})]
_SCHEDULE, _SCHEDULE_SCHEMA = _choices_of(SCHEDULE_NAMES)
Schedules = Annotated[
    list[str],
    BeforeValidator(_SCHEDULE),
    WithJsonSchema(_SCHEDULE_SCHEMA),
]
