"""Whole-number arithmetic as shell scripts write it in `$(( ))`: + - * / % and parentheses over known variables."""

import operator
import re
from collections.abc import Iterator, Mapping

MOST = 10**15
MAX_CHARACTERS = 200
_TOKEN = re.compile(r"\s*(?:(\d{1,15})|\$?\{?([A-Za-z_][A-Za-z0-9_]*)\}?|([-+*/%()]))")


def evaluated(text: str, variables: Mapping[str, str]) -> int | None:
    """The value, or None where a variable is not known or the text is something else."""
    tokens = list(_tokens(text, variables)) if len(text) <= MAX_CHARACTERS else [None]
    if not tokens or None in tokens:
        return None
    try:
        value, rest = _sum([str(token) for token in tokens])
    except (ValueError, IndexError, ZeroDivisionError, RecursionError):
        return None
    return value if not rest and abs(value) <= MOST else None


def _tokens(text: str, variables: Mapping[str, str]) -> Iterator[str | None]:
    text, at = text.strip(), 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            yield None
            return
        at = match.end()
        if match[2] is None:
            yield match[1] or match[3]
            continue
        value = variables.get(match[2], "").strip()
        yield value if re.fullmatch(r"-?\d{1,15}", value) else None


def _sum(tokens: list[str]) -> tuple[int, list[str]]:
    value, rest = _product(tokens)
    while rest and rest[0] in "+-":
        other, after = _product(rest[1:])
        value, rest = (value + other if rest[0] == "+" else value - other), after
    return value, rest


def _product(tokens: list[str]) -> tuple[int, list[str]]:
    value, rest = _single(tokens)
    while rest and rest[0] in ("*", "/", "%"):
        other, after = _single(rest[1:])
        if abs(value) > MOST or abs(other) > MOST:
            raise ValueError("too large")
        value = {"*": operator.mul, "/": operator.floordiv, "%": operator.mod}[rest[0]](value, other)
        rest = after
    return value, rest


def _single(tokens: list[str]) -> tuple[int, list[str]]:
    if tokens[0] == "(":
        value, rest = _sum(tokens[1:])
        if rest[0] != ")":
            raise ValueError("unbalanced")
        return value, rest[1:]
    if tokens[0] == "-":
        value, rest = _single(tokens[1:])
        return -value, rest
    return int(tokens[0]), tokens[1:]
