"""Quantiles of Student's t, for intervals of means and of paired differences. Imports no torch."""

import math


def t_quantile(probability: float, degrees: int) -> float:
    """Of Student's t, by bisection on its distribution function; probability above 0.5."""
    low, high = 0.0, 1.0
    while _t_below(high, degrees) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _t_below(t: float, degrees: int) -> float:
    """P(T <= t) by the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / degrees**0.5)
    cos2, term, total = math.cos(angle) ** 2, 1.0, 1.0
    for k in range(2 + degrees % 2, degrees - 1, 2):
        term *= cos2 * (k - 1) / k
        total += term
    if degrees % 2 == 0:
        inside = math.sin(angle) * total
    else:
        inside = 2 / math.pi * (angle + (math.sin(angle) * math.cos(angle) * total if degrees > 1 else 0.0))
    return (1 + inside) / 2
