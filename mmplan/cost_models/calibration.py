"""From timed operators to the numbers of a device: what each reached of what the formulas give at a fraction of one.

A fraction is that of equal work on every sample (the harmonic mean). Its range is found by drawing as many samples, and
of each a round of measurements, again and again: what a job of other shapes, at another moment, would have found.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmplan.cost_models.attention_time import BACKWARD_RATE, fused_attention_s
from mmplan.cost_models.collectives import Group, all_reduce_s, message_s
from mmplan.cost_models.gemm import STREAM_FRACTION, alignment, gemm_s
from mmplan.errors import CostModelError
from mmplan.scenario.cluster import Device, Link
from mmplan.scenario.profile import Measured

_DRAWS = 400
_REFITS = 4
_NEAR = 1e-6  # relative step of a derivative: prices are linear between changes of algorithm
_LAUNCHES = 3  # an operator shorter than so many launches says little about rates


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """An operator's seconds: the 10th percentile of all repeats, and that of each quiet round of repeats."""

    seconds: float
    rounds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """[rows, inner] x [inner, outer] in `dtype`."""

    rows: int
    outer: int
    inner: int
    dtype: str
    timed: Timed

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.outer * self.inner


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedAttention:
    """Attention over `batch` sequences of `length` tokens with `heads` heads, forward or its gradients."""

    batch: int
    heads: int
    length: int
    head_dim: int
    causal: bool
    backward: bool
    kind: str
    dtype: str
    timed: Timed


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """An operator that moves at least `bytes` and computes little."""

    name: str
    bytes: float
    timed: Timed


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """All that was timed on a device. `stream`: plain copies; `launches`: operators on a handful of elements."""

    products: tuple[Product, ...]
    attention: tuple[FusedAttention, ...]
    pointwise: tuple[Moved, ...]
    updates: tuple[Moved, ...]
    stream: tuple[Moved, ...]
    launches: tuple[Timed, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A collective or message: seconds = `latencies` x latency + `bytes` / bandwidth."""

    latencies: float
    bytes: float
    timed: Timed


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A message of `size` bytes between two ranks, or an all-reduce of as many over `ranks` of one node."""

    collective: bool
    size: int
    ranks: int
    timed: Timed

    def predicted_s(self, link: Link) -> float:
        """As `collectives.py` prices it."""
        if self.collective:
            return all_reduce_s(self.size, Group(self.ranks, self.ranks), link, link)
        return message_s(self.size, link)

    def message(self, link: Link) -> Message:
        """Its latencies and bytes by the algorithm that is fastest over `link`."""
        base_s = self.predicted_s(link)
        later = self.predicted_s(replace(link, latency_s=link.latency_s * (1 + _NEAR)))
        slower = self.predicted_s(replace(link, bytes_per_s=link.bytes_per_s / (1 + _NEAR)))
        return Message(
            latencies=(later - base_s) / (_NEAR * link.latency_s),
            bytes=(slower - base_s) / _NEAR * link.bytes_per_s,
            timed=self.timed,
        )


def fit_device(samples: Samples, base: Device, dtype: str, *, known_peaks: bool) -> dict[str, Measured]:
    """The numbers of a device.

    Args:
        base: gives peaks and tiles where `known_peaks`; else the fastest product and copy are the peaks.
        dtype: of the products that fix the fraction.

    Raises:
        CostModelError: no sample is large enough to tell a rate.
    """
    found = {"launch_s": _typical(samples.launches)}
    device = replace(base, launch_s=found["launch_s"].value)
    if not known_peaks:
        best = min(samples.stream, key=lambda item: item.timed.seconds / item.bytes)
        found["memory_bytes_per_s"] = _rate(best.bytes / STREAM_FRACTION, best.timed)
        fastest = max((p for p in samples.products if p.dtype == dtype), key=lambda p: p.flops / p.timed.seconds)
        found[f"{dtype}_flops_per_s"] = _rate(fastest.flops, fastest.timed)
        device = replace(device, **{name: number.value for name, number in found.items()})  # type: ignore[arg-type]
    found["gemm_fraction"] = gemm_fraction(samples.products, device, dtype)
    if not known_peaks:
        found |= _other_peaks(samples.products, device, dtype, found["gemm_fraction"].value)
    for kind in sorted({sample.kind for sample in samples.attention}):
        found[f"attention.{kind}"] = attention_fraction(samples.attention, device, kind)
    for name, moved in (("memory_fraction", samples.pointwise), ("update_fraction", samples.updates)):
        found[name] = moved_fraction(moved, device, name)
    return found


def fit_link(exchanges: Sequence[Exchange], start: Link) -> dict[str, Measured]:
    """Latency and bandwidth of a link; which algorithm is fastest depends on them, so the fit is repeated from `start`
    until they agree."""
    link = replace(start, fraction=1.0, nvls=False, sharp=False)  # a profile's link is priced without them
    for _ in range(_REFITS):
        found = fit_messages([exchange.message(link) for exchange in exchanges])
        link = replace(link, bytes_per_s=found["bytes_per_s"].value, latency_s=found["latency_s"].value)
    return found


def fit_messages(messages: Sequence[Message]) -> dict[str, Measured]:
    """Latency and bandwidth by least squares of relative errors; ranges by drawing messages and rounds again."""
    chosen = random.Random(0)
    latency_s, per_byte_s = _line([(m, m.timed.seconds) for m in messages])
    draws = []
    for _ in range(_DRAWS):
        picked = chosen.choices(messages, k=len(messages))
        draws.append(_line([(m, chosen.choice(m.timed.rounds)) for m in picked]))
    errors = [_miss(m.latencies * latency_s + m.bytes * per_byte_s, m.timed.seconds) for m in messages]
    latencies, rates = sorted(d[0] for d in draws), sorted(1 / d[1] for d in draws)
    return {
        "bytes_per_s": _measured(1 / per_byte_s, rates, len(messages), errors),
        "latency_s": _measured(latency_s, latencies, len(messages), errors),
    }


def _line(points: Sequence[tuple[Message, float]]) -> tuple[float, float]:
    """(latency, seconds per byte), both above zero, with the least squared relative error.

    With a = latencies / seconds and b = bytes / seconds: minimise the sum of (latency a + per_byte b - 1)^2.
    """
    a = [message.latencies / seconds for message, seconds in points]
    b = [message.bytes / seconds for message, seconds in points]
    aa, bb = sum(x * x for x in a), sum(x * x for x in b)
    ab, sa, sb = sum(x * y for x, y in zip(a, b, strict=True)), sum(a), sum(b)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        latency_s, per_byte_s = (sa * bb - sb * ab) / determinant, (sb * aa - sa * ab) / determinant
        if latency_s > 0 and per_byte_s > 0:
            return latency_s, per_byte_s
    smallest = min(seconds / message.latencies for message, seconds in points)
    return smallest, max(sb / bb, 1e-21)


def attention_fraction(samples: Sequence[FusedAttention], device: Device, kind: str) -> Measured:
    """Of the samples of that kind; CostModelError where none is long enough."""
    ratios = [(_attention_s(sample, device), sample.timed) for sample in samples if sample.kind == kind]
    return _fraction([ratio for ratio in ratios if ratio[0] > _LAUNCHES * device.launch_s], "attention")


def moved_fraction(moved: Sequence[Moved], device: Device, name: str) -> Measured:
    """Of the memory bandwidth; CostModelError where no sample is long enough."""
    ratios = [(item.bytes / device.memory_bytes_per_s, item.timed) for item in moved]
    return _fraction([ratio for ratio in ratios if ratio[1].seconds > _LAUNCHES * device.launch_s], name)


def gemm_fraction(products: Sequence[Product], device: Device, dtype: str) -> Measured:
    """Of products that the formula calls bound by computation at any rate near the peak; CostModelError where none
    is."""
    ratios = [(_product_s(p, device, 1.0), p.timed) for p in products if p.dtype == dtype and _computes(p, device)]
    return _fraction(ratios, f"{dtype} products")


def _other_peaks(products: Sequence[Product], device: Device, dtype: str, fraction: float) -> dict[str, Measured]:
    """Peaks of other types such that the one fraction holds for them."""
    peaks = {}
    for other in sorted({p.dtype for p in products} - {dtype}):
        rates = [(p.flops / fraction, p.timed) for p in products if p.dtype == other]
        reached = _fraction([(work / device.fp32_flops_per_s, timed) for work, timed in rates], other, most=math.inf)
        scale = device.fp32_flops_per_s
        peaks[f"{other}_flops_per_s"] = replace(
            reached, value=reached.value * scale, p10=reached.p10 * scale, p90=reached.p90 * scale
        )
    return peaks


def _computes(product: Product, device: Device) -> bool:
    return math.isclose(_product_s(product, device, 0.5), 2 * _product_s(product, device, 1.0), rel_tol=1e-3)


def _product_s(product: Product, device: Device, fraction: float) -> float:
    peak = device.flops_per_s(product.dtype)
    if peak is None:
        raise CostModelError(f"{device.name} has no {product.dtype} units")
    size = 4 if product.dtype == "fp32" else 2
    rate = peak * fraction * alignment(device, product.inner * size, product.outer * size)
    return gemm_s(product.rows, product.outer, product.inner, device, rate, size)


def _attention_s(sample: FusedAttention, device: Device) -> float:
    """By the formula at a fraction of one; gradients are five products for the forward's two."""
    tokens = float(sample.batch * sample.length)
    pairs = tokens * sample.length
    flops = 4.0 * pairs * sample.heads * sample.head_dim
    unit = replace(device, attention=(), attention_fraction=1.0)
    peak = device.flops_per_s(sample.dtype) or device.fp32_flops_per_s
    once = fused_attention_s(flops, pairs, tokens, sample.head_dim, sample.causal, unit, sample.kind, peak)
    return 2.5 * once / BACKWARD_RATE if sample.backward else once


def _fraction(ratios: Sequence[tuple[float, Timed]], what: str, most: float = 1.0) -> Measured:
    """1 / mean(measured / ideal) and its range."""
    if not ratios:
        raise CostModelError(f"no measurement of {what} was long enough to tell a rate; run calibrate without --quick")
    value = min(most, 1 / _mean([timed.seconds / ideal for ideal, timed in ratios]))
    chosen = random.Random(0)
    draws = []
    for _ in range(_DRAWS):
        picked = chosen.choices(ratios, k=len(ratios))
        draws.append(min(most, 1 / _mean([chosen.choice(timed.rounds) / ideal for ideal, timed in picked])))
    errors = [_miss(ideal / value, timed.seconds) for ideal, timed in ratios]
    return _measured(value, sorted(draws), len(ratios), errors)


def _typical(launches: Sequence[Timed]) -> Measured:
    """The mean of several small operators."""
    value = _mean([timed.seconds for timed in launches])
    chosen = random.Random(0)
    draws = sorted(
        _mean([chosen.choice(timed.rounds) for timed in chosen.choices(launches, k=len(launches))])
        for _ in range(_DRAWS)
    )
    return _measured(value, draws, len(launches), [_miss(value, timed.seconds) for timed in launches])


def _rate(work: float, timed: Timed) -> Measured:
    """Work per second of one operator; its range is that of the rounds."""
    draws = sorted(work / seconds for seconds in timed.rounds)
    return _measured(work / timed.seconds, draws, 1, [0.0])


def _measured(value: float, draws: Sequence[float], n: int, errors: Sequence[float]) -> Measured:
    last = len(draws) - 1
    low, high = draws[round(0.1 * last)], draws[round(0.9 * last)]
    residual = sorted(errors)[len(errors) // 2]
    return Measured(value=value, p10=min(low, value), p90=max(high, value), source="measured", n=n, residual=residual)


def _miss(predicted: float, measured: float) -> float:
    return abs(predicted / measured - 1)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
