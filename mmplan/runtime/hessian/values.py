"""What was measured so far: one value per layer, modality and batch, in a file that a measurement goes on from.

The file is replaced as a whole, so an interruption costs the values of some seconds. It names the settings, the weights
and the data it belongs to; another measurement does not go on from it. Imports no torch.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from mmplan.errors import InputError
from mmplan.files import write_file
from mmplan.scenario.document import shown

SCHEMA = "mmplan.sensitivity-partial/1"
WRITE_EVERY_S = 2.0
DOUBTFUL = 0.01  # a larger `difference`; of right derivatives on small models all were below 0.001


class Key(NamedTuple):
    """`batch` counts over all seeds: batch b of seed s is `s * batches + b`."""

    batch: int
    modality: str
    layer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """Of one layer in one branch on one batch.

    Attributes:
        largest, least: ends of the spectrum with their signs; `residual` bounds the error of `largest`.
        loss: of the branch.
        trace: Hutchinson's estimate; None where it was not asked for.
        difference: between it and differences of gradients, as a fraction; on the first batch of a branch alone.
        seconds: that it took.
    """

    largest: float
    least: float
    residual: float
    iterations: int
    converged: bool
    loss: float
    trace: float | None
    difference: float | None
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What values belong together: of one model, one data set and one way to measure. Compared field by field."""

    weights: str  # SHA-256
    parameters: int
    scenario: str  # SHA-256 of the model and the data as the scenario has them
    data: str
    settings: Mapping[str, Any]


class _File(NamedTuple):
    schema: str
    identity: Identity
    values: list[tuple[Key, Value]]


_FILE = TypeAdapter(_File)


@dataclass(kw_only=True, slots=True, eq=False)
class Values:
    """Args: path: None keeps all in memory (other processes than the first)."""

    identity: Identity
    path: Path | None
    known: dict[Key, Value] = field(default_factory=dict)
    _written_s: float = field(default_factory=time.monotonic)
    _unwritten: bool = False

    def add(self, key: Key, value: Value) -> None:
        self.known[key] = value
        self._unwritten = True
        if time.monotonic() - self._written_s >= WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Write what is not written yet."""
        if self.path is not None and self._unwritten:
            content = _FILE.dump_json(_File(SCHEMA, self.identity, list(self.known.items())))
            write_file(self.path, content + b"\n")
            self._unwritten, self._written_s = False, time.monotonic()

    def remove(self) -> None:
        """The result is written: nothing is to go on from."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def values_of(path: Path, identity: Identity, *, restart: bool, note: Callable[[str], None]) -> Values:
    """What a file has of this measurement, nothing where there is none.

    Args:
        restart: begin anew whatever is there.

    Raises:
        InputError: the file is of another measurement, or is damaged.
    """
    if restart or not path.exists():
        return Values(identity=identity, path=path)
    advice = "give --restart to begin anew, or another --output"
    try:
        found = _FILE.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no such file, or damaged"
        raise InputError(f"cannot go on from this unfinished measurement: {why}; {advice}", file=path) from error
    if found.schema != SCHEMA:
        raise InputError(f"expected schema '{SCHEMA}', found {shown(found.schema)}; {advice}", file=path, key="schema")
    if difference := _difference(found.identity, identity):
        raise InputError(f"an unfinished measurement is there whose {difference}; {advice}", file=path)
    known = {Key(*key): value for key, value in found.values}
    note(f"going on from {path}, which has {len(known):,} values")
    return Values(identity=identity, path=path, known=known)


_WORDS = {
    "weights": "weights are others",
    "parameters": "model has another number of parameters",
    "scenario": "scenario has another model or other data",
    "data": "data is other",
}


def _difference(saved: Identity, now: Identity) -> str:
    for part in fields(Identity):
        before, after = getattr(saved, part.name), getattr(now, part.name)
        if part.name == "settings":
            for name in after:
                if before.get(name) != after[name]:
                    return f"{name} is {before.get(name)}, now {after[name]}"
        elif before != after:
            return _WORDS[part.name]
    return ""
