"""Schedules: for each stage the order of its compute actions, as data with a text form.

`3F0` is the forward of microbatch 0 on stage 3; `B` the whole backward, `I` its input-gradient part, `W` its
weight-gradient part.
"""

import re
from dataclasses import dataclass
from typing import Literal

ComputeKind = Literal["F", "B", "I", "W"]

_ACTION = re.compile(r"^(\d+)([FBIW])(\d+)$")


@dataclass(frozen=True, slots=True, order=True)
class Compute:
    """One compute action of a stage; `str()` and `parse` are inverse."""

    stage: int
    kind: ComputeKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> "Compute":
        """ValueError when `text` is not stage, one of F B I W, microbatch."""
        match = _ACTION.match(text)
        if match is None:
            raise ValueError(f"expected an action such as '3F0', found '{text}'")
        kind: ComputeKind = match[2]  # type: ignore[assignment]
        return Compute(int(match[1]), kind, int(match[3]))


Schedule = tuple[tuple[Compute, ...], ...]  # one order per stage
