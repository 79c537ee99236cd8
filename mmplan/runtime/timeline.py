"""The recorded step as run.json keeps it: per rank one text of actions, and columns of seconds beside it.

`0F3` is the forward of stage 0 on microbatch 3, `0REDUCE`, `0TIE1` (number 1 of the sums over stages) and `0STEP` end
the step. Some 30 bytes an action, where one object for each takes 200.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

from mmplan.planner.prediction import TimedAction
from mmplan.planner.program import Action, ActionKind

_ACTION = re.compile(r"(\d+)(?:([FBIW]|TIE)(\d+)|(REDUCE|STEP))", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimeline:
    """What one rank did, in its order: when it asked for the inputs of an action, had them, and was done."""

    rank: int
    actions: str
    asked_s: tuple[float, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]

    def __post_init__(self) -> None:
        counts = {len(self.actions.split()), len(self.asked_s), len(self.start_s), len(self.end_s)}
        if len(counts) > 1:
            raise ValueError(f"actions and times of rank {self.rank} differ in number: {sorted(counts)}")

    def timed(self) -> Iterable[TimedAction]:
        """Raises ValueError at a text that is no action."""
        for text, start_s, end_s in zip(self.actions.split(), self.start_s, self.end_s, strict=True):
            yield TimedAction(self.rank, _action(text), start_s, end_s)


def bare(action: Action) -> Action:
    """What of an action its text tells: bytes and peers are the program's."""
    return Action(action.kind, action.stage, action.microbatch)


def rank_timelines(timeline: Sequence[TimedAction], asked_s: Sequence[float]) -> tuple[RankTimeline, ...]:
    """Columns by rank of actions in the order of ranks; where nobody asked, an action asked when it started."""
    asked_s = asked_s or [item.start_s for item in timeline]
    rows = []
    for rank, pairs in groupby(zip(timeline, asked_s, strict=True), key=lambda pair: pair[0].rank):
        items, asked = zip(*pairs, strict=True)
        rows.append(
            RankTimeline(
                rank=rank,
                actions=" ".join(str(bare(item.action)) for item in items),
                asked_s=asked,
                start_s=tuple(item.start_s for item in items),
                end_s=tuple(item.end_s for item in items),
            )
        )
    return tuple(rows)


def _action(text: str) -> Action:
    found = _ACTION.fullmatch(text)
    if found is None:
        raise ValueError(f"expected an action such as 0F3 or 0STEP, found '{text[:20]}'")
    stage, kind, microbatch, last = found.groups()
    return Action(cast(ActionKind, kind or last), int(stage), int(microbatch) if microbatch else -1)
