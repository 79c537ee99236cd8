"""Residual streams: each token has several rows, of which a block reads a weighted sum and to which it adds its result
(hyper-connections, arXiv 2409.19606). Qwen4-Exp's, GLM-5.3's, Hunyuan 4's and Inkling 2's."""

from math import isqrt

from mmplan.scenario.steps import (
    Active,
    Aside,
    Convolve,
    Dense,
    Fold,
    Fork,
    Join,
    Kept,
    Look,
    Normed,
    Split,
    Step,
    Steps,
    Widen,
    residual,
)

RMS = Normed(kind="rms")
OPEN = Active(function="sigmoid")
LEVEL = Active()  # a norm without weights: as many bytes


def between(streams: int, layers: int) -> tuple[int, ...]:
    """Of rows that the first block widens and the last one folds."""
    return (1, *(streams,) * (layers - 1))


def weighed(width: int, parts: int = 0, *, low: int | None = None) -> Step:
    """Rows times the sigmoids of a linear on them, one for each of `parts` equal parts; or of two linears, one for each
    column."""
    if low is None:
        return Fork(left=(), right=(Dense(width=parts), OPEN), product=True)
    narrow = (Dense(width=low, bias=False), Active(function="silu"), Dense(width=width, bias=False), OPEN)
    return Fork(left=(), right=narrow, product=True)


def gated(streams: int, hidden: int, low: int, *inner: Step) -> Step:
    """Qwen4-Exp: a norm of all streams stands in front of what the block reads, which has a weight for each column."""
    read: Steps = (weighed(streams * hidden, low=low), Fold(parts=streams))
    back: Steps = (*read, *inner, Widen(times=streams))
    return residual(RMS, Fork(left=back, right=(Dense(width=streams, bias=False), OPEN), product=True))


def gated_end(streams: int, hidden: int, low: int) -> Steps:
    return (RMS, weighed(streams * hidden, low=low), Fold(parts=streams))


def weighted(streams: int, *inner: Step, mixed: bool) -> Steps:
    """GLM-5.3 (`mixed`: the streams are mixed with each other too, arXiv 2512.24880) and Hunyuan 4: a weight for each
    stream on the way in and on the way out, with scales."""
    read: Steps = (weighed(0, streams), Fold(parts=streams), *inner, Widen(times=streams))
    added = Fork(left=read, right=(LEVEL, Dense(width=streams), OPEN), product=True)
    kept: Steps = (weighed(0, streams**2),) if mixed else ()
    return (Fork(left=kept, right=(added,)), Kept(size=3 if mixed else 2))


def chosen(parts: int, queries: int = 1) -> Steps:
    """Inkling 2: a mean of all streams with weights by learned queries (attention residuals); a second and third one
    are read aside."""
    weights: Steps = (Split(parts=parts), Dense(width=1, bias=False), Join(rows=parts))
    read: Steps = (LEVEL, Fork(left=(), right=weights, product=True), Fold(parts=parts))
    return (*(Aside(steps=(*read, RMS)),) * (queries - 1), *read)


def hashed_words(streams: int, hidden: int, *, heads: int, rows: int, width: int, taps: int) -> Steps:
    """Qwen4-Exp's tables of hashed n-grams: `heads` rows of one table for each token make a value, and keys that the
    streams open; a convolution over neighbouring tokens behind them. Keys are priced column by column."""
    looked: Steps = (Look(size=rows, width=width // heads), Widen(times=heads))
    keys: Steps = (Dense(width=streams * hidden, bias=False), RMS)
    values: Steps = (Dense(width=hidden, bias=False), Widen(times=streams))
    opened = Fork(left=(RMS,), right=(*looked, Fork(left=keys, right=values, product=True)), product=True)
    wide = streams * hidden
    near = residual(RMS, Convolve(width=wide, taps=taps, groups=wide, bias=False), Active(function="silu"))
    return (residual(opened, near),)


def rows_of_hashes(base: int, heads: int, table: int, unit: int) -> int:
    """Rows of a table of n-grams: the primes from `base` on, `heads` of them for each table, filled up."""
    prime, total = base - 1, 0
    for number in range((table + 1) * heads):
        prime += 1
        while not _is_prime(prime):
            prime += 1
        total += prime if number >= table * heads else 0
    return -(-total // unit) * unit


def _is_prime(value: int) -> bool:
    return value > 1 and all(value % divisor for divisor in range(2, isqrt(value) + 1))
