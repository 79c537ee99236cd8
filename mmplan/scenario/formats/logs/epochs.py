"""Losses that the Hugging Face Trainer prints beside an epoch, in logs whose lines bear a clock (containers): the epoch
says which step it was, as the start of the log says how many steps and epochs there are.

Old versions round epochs to two decimals: then only lines far enough apart count, so that a step is right within 5 %.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.scenario.formats.logs.lines import Iteration, clock_s
from mmplan.scenario.formats.logs.other_steps import loss_in
from mmplan.scenario.formats.logs.trainer_lines import Summary

_EPOCH = re.compile(r"['\"]epoch['\"]:\s*['\"]?(\d{1,6}(?:\.(\d{1,18}))?)")
_ROUNDED = 0.01
_LEAST_ROUNDED = 20 * _ROUNDED  # between lines, where a step is less than a rounded epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochLine:
    """`epoch` of a line, `rounded` where it has two decimals at most, `at_s` by its clock."""

    line: int
    epoch: float
    rounded: bool
    at_s: float
    fields: dict[str, float]


def epoch_line(text: str, line: int) -> EpochLine | None:
    """None where the line has no clock or no epoch."""
    found, at_s = _EPOCH.search(text), clock_s(text)
    if found is None or at_s is None:
        return None
    return EpochLine(
        line=line, epoch=float(found[1]), rounded=len(found[2] or "") <= 2, at_s=at_s, fields=loss_in(text)
    )


def steps_of_epochs(lines: Sequence[EpochLine], summary: Summary) -> list[Iteration]:
    """Lines with the number of their step; empty where the log does not say how many steps an epoch has."""
    if not summary.steps or not summary.epochs:
        return []
    per_epoch = summary.steps / summary.epochs
    coarse = all(line.rounded for line in lines) and per_epoch * _ROUNDED >= 1
    kept: list[Iteration] = []
    last = -1.0
    for line in lines:
        step = round(line.epoch * per_epoch)
        if step <= (kept[-1].step if kept else 0) or (kept and coarse and line.epoch - last < _LEAST_ROUNDED):
            continue
        last = line.epoch
        kept.append(Iteration(line=line.line, step=step, steps=None, seconds=None, fields=line.fields, at_s=line.at_s))
    return kept
