"""Means with their confidence, and how alike two rankings are. Imports no torch."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mmplan.runtime.student_t import t_quantile

CONFIDENCE = 0.95


Interval = tuple[float, float | None, float | None]  # a mean and the ends of its interval


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean, and the ends of its two-sided 95 % interval by Student's t; one value has none."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None, None
    half = t_quantile((1 + CONFIDENCE) / 2, len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def rank_correlation(first: Mapping[str, float], second: Mapping[str, float]) -> float | None:
    """Spearman's: the correlation of the ranks of what both have, ties at their mean rank. None below three, or where
    all are equal."""
    common = [key for key in first if key in second]
    if len(common) < 3:
        return None
    a, b = (_ranks([values[key] for key in common]) for values in (first, second))
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(ordered)))}
    return [first[value] + (ordered.count(value) - 1) / 2 for value in values]


def overlap(sets: Sequence[set[str]]) -> float | None:
    """What all have over what any has, 1 for equal sets; None of fewer than two sets, or where all are empty."""
    united: set[str] = set().union(*sets)
    return None if len(sets) < 2 or not united else len(set.intersection(*sets)) / len(united)
