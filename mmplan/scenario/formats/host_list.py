"""Host list expressions of Slurm, `rack[1-2]n[01-16],login1`, as the hosts that they name, in their order.

As scontrol(1) writes them: a name with ranges in brackets, several brackets in a name, zeros in front of a range's
first number kept, commas between names. The order is the order of ranks, so nothing is sorted.
"""

import itertools
import math
import re
from dataclasses import dataclass

from mmplan.scenario.document import shown

MOST_HOSTS = 100_000  # as many nodes as a cluster of a scenario has at most

_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
_TEXT = re.compile(r"[A-Za-z0-9._-]*")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Range:
    first: int
    last: int
    width: int

    @property
    def count(self) -> int:
        return self.last - self.first + 1


def expand_hosts(expression: str) -> list[str]:
    """The hosts of an expression, those named twice twice.

    Raises:
        ValueError: one sentence on what is wrong, with the arithmetic where there are too many hosts.
    """
    parts = [_pieces(part) for part in split_names(expression)]
    total = sum(_count(pieces) for pieces in parts)
    if total > MOST_HOSTS:
        raise ValueError(
            f"{shown(expression)} names {_amount(total)} hosts, a cluster has at most {MOST_HOSTS:,} nodes"
        )
    return [host for pieces in parts for host in _expanded(pieces)]


def split_names(expression: str) -> list[str]:
    """The names between commas that stand in no bracket; ValueError where brackets do not pair or a name is missing."""
    names, start, opened = [], 0, -1
    for place, character in enumerate(expression):
        if character == "[":
            if opened >= 0:
                raise ValueError(f"{shown(expression)} has a bracket inside a bracket")
            opened = place
        elif character == "]":
            if opened < 0:
                raise ValueError(f"{shown(expression)} closes a bracket that it does not open")
            opened = -1
        elif character == "," and opened < 0:
            names.append(expression[start:place])
            start = place + 1
    if opened >= 0:
        raise ValueError(f"{shown(expression)} opens a bracket that it does not close: it may be cut off")
    names.append(expression[start:])
    if "" in names:
        raise ValueError(f"{shown(expression)} has a comma with no host beside it")
    return names


def _pieces(name: str) -> list[str | list[_Range]]:
    """Text and brackets of a name, in turns."""
    pieces: list[str | list[_Range]] = []
    for index, piece in enumerate(re.split(r"[\[\]]", name)):
        if index % 2:
            pieces.append([_range(item, name) for item in piece.split(",")])
        elif not _TEXT.fullmatch(piece):
            raise ValueError(f"{shown(name)} is no host: expected letters, digits, '.', '-' and '_'")
        else:
            pieces.append(piece)
    return pieces


def _range(item: str, name: str) -> _Range:
    match = _RANGE.fullmatch(item)
    if match is None:
        raise ValueError(
            f"expected numbers or ranges such as 1-4 in the brackets of {shown(name)}, found {shown(item)}"
        )
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"the range {item} of {shown(name)} runs backwards")
    return _Range(first=first, last=last, width=len(match[1]))


def _count(pieces: list[str | list[_Range]]) -> int:
    return math.prod(sum(item.count for item in piece) for piece in pieces if not isinstance(piece, str))


def _amount(count: int) -> str:
    return f"{count:,}" if count < 10**18 else "more than a billion billion"


def _expanded(pieces: list[str | list[_Range]]) -> list[str]:
    choices = [
        [piece]
        if isinstance(piece, str)
        else [f"{number:0{item.width}d}" for item in piece for number in range(item.first, item.last + 1)]
        for piece in pieces
    ]
    hosts = ["".join(chosen) for chosen in itertools.product(*choices)]
    for host in (hosts[0], hosts[-1]):
        if not _HOST.fullmatch(host) or host.isdigit():
            raise ValueError(f"{shown(host)} is no host: expected a name such as node01 or an address")
    return hosts
