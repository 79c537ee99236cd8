"""What must hold between the readings of two files, so that a wrong reading shows although nothing crashes.

Each relation changes a file in a way whose effect on the reading is known: none at all (line ends, colours, encoding,
the order of keys or of hosts), times that double, a line that is lost. A change is None where it does not apply.
"""

import gzip
import json
import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mmplan.scenario.catalogue import catalogue_link
from mmplan.scenario.formats.reading import Reading

Change = Callable[[str, random.Random], bytes | None]
# The two readings, None where a file is refused -> what is wrong, or None.
Expect = Callable[[Reading | None, Reading | None], str | None]


@dataclass(frozen=True, slots=True)
class Relation:
    """`of_mutants`: it holds for damaged files as well as for real ones."""

    name: str
    change: Change
    expect: Expect
    of_mutants: bool = True


def same(before: Reading | None, after: Reading | None) -> str | None:
    """The same numbers, or a refusal of both."""
    if before is None or after is None:
        return None if before is after else "one is refused, the other is not"
    if (before.kind, before.document) != (after.kind, after.document):
        return f"{before.kind}, {before.document} became {after.kind}, {after.document}"
    differing = _difference(before.fragment, after.fragment, "")
    return None if differing is None else f"another value: {differing}"


def same_in_any_order(before: Reading | None, after: Reading | None) -> str | None:
    """As `same`; rows of equal rank may stand in another order."""
    if before is None or after is None:
        return same(before, after)
    ordered = [replace(reading, fragment=_ordered(reading.fragment)) for reading in (before, after)]
    return same(*ordered)


def _ordered(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _ordered(item) for key, item in value.items()}
    return sorted((_ordered(item) for item in value), key=str) if isinstance(value, list | tuple) else value


def _difference(one: Any, other: Any, at: str) -> str | None:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in [*one, *(key for key in other if key not in one)]:
            if (found := _difference(one.get(key), other.get(key), f"{at}.{key}")) is not None:
                return found
        return None
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = (_difference(a, b, f"{at}[{i}]") for i, (a, b) in enumerate(zip(one, other, strict=True)))
        return next((found for found in pairs if found is not None), None)
    if isinstance(one, float) and isinstance(other, float) and math.isclose(one, other, rel_tol=1e-6):
        return None
    return None if one == other else f"{at}: {str(one)[:80]} became {str(other)[:80]}"


def told_or_same(before: Reading | None, after: Reading | None) -> str | None:
    """A loss may change the reading, but not in silence."""
    if before is None or after is None or same(before, after) is None:
        return None
    unsaid = set(after.warnings) <= set(before.warnings) and after.document == before.document
    return f"silent: {same(before, after)}" if unsaid else None


def doubled(*paths: str) -> Expect:
    """Numbers at these places of the fragment are twice as large."""

    def expect(before: Reading | None, after: Reading | None) -> str | None:
        if before is None or after is None:
            return None if before is after else "one is refused, the other is not"
        for path in paths:
            one, other = _at(before.fragment, path), _at(after.fragment, path)
            if isinstance(one, int | float) and not _twice(one, other):
                return f"{path}: {one} became {other}"
        return None

    return expect


def _twice(one: float, other: Any) -> bool:
    return isinstance(other, int | float) and math.isclose(2 * one, other, rel_tol=0.02, abs_tol=2e-6)


def _at(value: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list | tuple) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def half_as_fast(before: Reading | None, after: Reading | None) -> str | None:
    """Bandwidths of a fit halve where times double. Switches have latencies of their own, which do not."""
    if before is None or after is None:
        return None if before is after else "one is refused, the other is not"
    for link in ("node_link", "network"):
        one, other = (_at(reading.fragment, f"cluster.{link}") for reading in (before, after))
        for key in ("bandwidth", "fraction"):
            rates = [float(str(_at(value, key)).split()[0]) for value in (one, other) if _at(value, key) is not None]
            alike = all(_at(one, how) == _at(other, how) for how in ("pipelined", "rings"))
            switched = any(_switched(value) for value in (one, other))
            if len(rates) == 2 and alike and not switched and not 0.45 < rates[1] / rates[0] < 0.56:
                return f"{link}.{key}: {rates[0]} became {rates[1]}"
    return None


def _switched(link: Any) -> bool:
    """Whether switches add, as the value or its catalogue link says."""
    said = _at(link, "nvls")
    name = link.get("link") if isinstance(link, Mapping) else link
    return bool(said) if said is not None else isinstance(name, str) and catalogue_link(name).nvls


def _crlf(text: str, draw: random.Random) -> bytes | None:
    return None if "\r" in text else text.replace("\n", "\r\n").encode(errors="replace")


def _utf16(text: str, draw: random.Random) -> bytes | None:
    return text.encode("utf-16", errors="replace")


def _gzipped(text: str, draw: random.Random) -> bytes | None:
    return gzip.compress(text.encode(errors="replace"), 1)


def _colours(text: str, draw: random.Random) -> bytes | None:
    """Around every line, as terminals show them."""
    lines = [f"\x1b[{draw.choice(('0', '1;31', '38;5;208'))}m{line}\x1b[0m" for line in text.split("\n")]
    return "\n".join(lines).encode(errors="replace")


def _trailing(text: str, draw: random.Random) -> bytes | None:
    lines = [line + " " * draw.randint(0, 3) for line in text.split("\n")]
    return "\n".join(lines).encode(errors="replace")


def _reordered(text: str, draw: random.Random) -> bytes | None:
    """Keys of JSON objects in another order, other white space."""
    value = _json(text)
    if value is None:
        return None
    return json.dumps(_shuffled(value, draw), indent=draw.choice((None, 1, 4)), ensure_ascii=False).encode(
        errors="replace"
    )


def _json(text: str) -> Any:
    try:
        pairs = json.loads(text, object_pairs_hook=_no_twins)
        json.dumps(pairs, allow_nan=False)  # 1e999 would be written as a word
    except (ValueError, RecursionError):
        return None
    return pairs if isinstance(pairs, dict | list) else None


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key twice: its order counts")
    return dict(pairs)


def _shuffled(value: Any, draw: random.Random) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        draw.shuffle(keys)
        return {key: _shuffled(value[key], draw) for key in keys}
    return [_shuffled(item, draw) for item in value] if isinstance(value, list) else value


def _events_reordered(text: str, draw: random.Random) -> bytes | None:
    value = _json(text)
    events = value.get("traceEvents") if isinstance(value, dict) else value
    if not isinstance(events, list):
        return None
    draw.shuffle(events)
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def _events_slower(text: str, draw: random.Random) -> bytes | None:
    value = _json(text)
    events = value.get("traceEvents") if isinstance(value, dict) else value
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        return None
    for event in events:
        for key in ("ts", "dur"):
            if isinstance(event.get(key), int | float):
                event[key] *= 2
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def _hosts_reordered(text: str, draw: random.Random) -> bytes | None:
    lines = text.split("\n")
    draw.shuffle(lines)
    return "\n".join(lines).encode(errors="replace")


_STEP_TIME = re.compile(
    r"((?:elapsed time per iteration \((?:ms|s)\)|iteration[ _]time(?: \(\w+\))?|iter time \(s\)|Step Time"
    r"|train_step_timing in s)\s*[:=]\s*)(\d+(?:\.\d+)?)"
)


def _steps_slower(text: str, draw: random.Random) -> bytes | None:
    changed, count = _STEP_TIME.subn(lambda match: f"{match[1]}{2 * float(match[2]):.4f}", text)
    return changed.encode(errors="replace") if count else None


_ROW = re.compile(
    r"^(.*?\b\d+[ \t]+\d+[ \t]+(?:float|half|double|bfloat16|u?int\d+|char)\b(?:[ \t]+[a-z]+)?(?:[ \t]+-?\d+)?[ \t]+)"
    r"(\d+(?:\.\d+)?)([ \t]+)(\d+\.\d+)([ \t]+)(\d+\.\d+)([ \t]+\S+[ \t]+)"
    r"(\d+(?:\.\d+)?)([ \t]+)(\d+\.\d+)([ \t]+)(\d+\.\d+)(.*)$",
    re.MULTILINE,
)


def _messages_slower(text: str, draw: random.Random) -> bytes | None:
    """Twice the time, half the rates in both halves of each row."""

    def slower(match: re.Match[str]) -> str:
        parts = list(match.groups())
        for at in (1, 7):
            parts[at] = f"{2 * float(parts[at]):.2f}"
        for at in (3, 5, 9, 11):
            parts[at] = f"{float(parts[at]) / 2:.4f}"
        return "".join(parts)

    changed, count = _ROW.subn(slower, text)
    return changed.encode(errors="replace") if count > 8 else None


def _gpu_row_lost(text: str, draw: random.Random) -> bytes | None:
    """A row of the matrix; what is left is no whole matrix."""
    lines = text.split("\n")
    rows = [at for at, line in enumerate(lines) if re.match(r"\s*(?:\x1b\[[\d;]*m)?GPU\d+\b.*\bX\b", line)]
    if len(rows) < 2:
        return None
    del lines[draw.choice(rows)]
    return "\n".join(lines).encode(errors="replace")


_TEXT = (
    Relation("line ends of Windows", _crlf, same),
    Relation("UTF-16", _utf16, same),
    Relation("gzip", _gzipped, same),
)
_TERMINAL = (*_TEXT, Relation("colours", _colours, same), Relation("spaces at the end of lines", _trailing, same))
_JSON = (Relation("order of keys", _reordered, same), Relation("UTF-16", _utf16, same))

RELATIONS: dict[str, tuple[Relation, ...]] = {
    "chakra": (*_JSON,),
    "deepspeed": _JSON,
    "frameworks": _TEXT,
    "hf_config": _JSON,
    "kineto": (
        *_JSON,
        Relation("order of events", _events_reordered, same_in_any_order, of_mutants=False),
        Relation("times doubled", _events_slower, doubled("ranks.0.window_s", "ranks.0.step_s.0"), of_mutants=False),
    ),
    "launch_megatron": _TEXT,
    "megatron_log": (
        *_TERMINAL,
        Relation("times doubled", _steps_slower, doubled("step.median_s", "step.p90_s"), of_mutants=False),
    ),
    "nccl_tests": (*_TERMINAL, Relation("times doubled", _messages_slower, half_as_fast, of_mutants=False)),
    "nsys": _TEXT,
    "nvidia_topo": (*_TERMINAL, Relation("a GPU's row lost", _gpu_row_lost, told_or_same, of_mutants=False)),
    "rocm_topo": (*_TERMINAL, Relation("a GPU's row lost", _gpu_row_lost, told_or_same, of_mutants=False)),
    "slurm_hosts": (*_TERMINAL, Relation("order of hosts", _hosts_reordered, same, of_mutants=False)),
    "torchtitan": _TEXT,
}
