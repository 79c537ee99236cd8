"""Times operators on one device: matrix products, fused attention, memory-bound operators, launches, optimizer updates.

Every operator is timed in several rounds, so that a busy moment of the machine does not spoil one kind; of all repeats
the 10th percentile counts, because other processes only ever add time.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmplan.cost_models.calibration import FusedAttention, Moved, Product, Samples, Timed
from mmplan.runtime.dtypes import TORCH_DTYPES
from mmplan.runtime.norms import RMS_NORM_EPS, rms_norm
from mmplan.units import seconds_of_milliseconds

T = TypeVar("T")
Run = Callable[[], object]
OnProgress = Callable[[str], None]

_SHORTEST_S = 5e-5  # of one timing: far above the clock's and events' resolution
_UPDATE_BYTES = 32  # per fp32 parameter of AdamW: as `optimizer_seconds` counts them


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """How much to measure: rounds, seconds of repeats per operator and round, and sizes for the kind of device."""

    rounds: int
    budget_s: float
    rows: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    heads: tuple[int, int]  # (heads, width of a head)
    elements: tuple[int, ...]
    parameters: int
    stream: int


def extent(device: torch.device, quick: bool) -> Extent:
    """Sizes of small models on a CPU, of language models on a GPU."""
    rounds, budget_s = (3, 0.01) if quick else (6, 0.025)
    if device.type == "cuda":
        return Extent(
            rounds=rounds,
            budget_s=budget_s,
            rows=(2048, 8192) if quick else (1024, 2048, 4096, 8192, 16384),
            widths=((4096, 4096), (4096, 14336))
            if quick
            else ((1024, 4096), (4096, 4096), (4096, 14336), (8192, 8192)),
            lengths=(2048, 8192) if quick else (1024, 2048, 4096, 8192),
            heads=(16, 128),
            elements=(2**22, 2**25) if quick else (2**22, 2**24, 2**26),
            parameters=2**27,
            stream=2**28,
        )
    return Extent(
        rounds=rounds,
        budget_s=budget_s,
        rows=(128, 512) if quick else (64, 256, 1024),
        widths=((128, 384), (512, 512)) if quick else ((64, 256), (128, 384), (256, 1024), (512, 512), (1024, 1024)),
        lengths=(128, 512) if quick else (64, 128, 256, 512),
        heads=(4, 32),
        elements=(2**15, 2**19) if quick else (2**14, 2**16, 2**18, 2**20),
        parameters=2**20,
        stream=2**24,
    )


def measure(device: torch.device, size: Extent, on_progress: OnProgress) -> Samples:
    """All samples of a device; takes seconds."""
    makers = _Makers(device, size)
    products, attention = makers.products(), makers.attention()
    pointwise, updates = makers.pointwise(), makers.updates()
    stream, launches = makers.stream(), makers.launches()
    named: Mapping[str, Sequence[_Timing[Any]]] = {
        "matrix products": products,
        "attention": attention,
        "memory-bound operators": pointwise,
        "optimizer updates": updates,
        "copies": stream,
        "launches": launches,
    }
    for number in range(size.rounds):
        for name, row in named.items():
            on_progress(f"round {number + 1} of {size.rounds}: {name}")
            for timing in row:
                timing.round(size.budget_s)
    return Samples(
        products=_done(products),
        attention=_done(attention),
        pointwise=_done(pointwise),
        updates=_done(updates),
        stream=_done(stream),
        launches=_done(launches),
    )


class _Timing(Generic[T]):
    """One operator with all its repeats; `build` makes the sample of its times."""

    def __init__(self, device: torch.device, run: Run, build: Callable[[Timed], T]) -> None:
        self._run, self._device, self._build = run, device, build
        self._rounds: list[list[float]] = []
        self._inner = 1

    def round(self, budget_s: float) -> None:
        """At least three repeats, each of as many calls as give a readable time."""
        if not self._rounds:
            self._run()  # compiles, allocates
            self._inner = max(1, round(_SHORTEST_S / max(self._once(1), 1e-9)))
        times: list[float] = []
        until_s = time.perf_counter() + budget_s
        while len(times) < 3 or time.perf_counter() < until_s:
            times.append(self._once(self._inner))
        self._rounds.append(times)

    def done(self) -> T:
        every = [seconds for times in self._rounds for seconds in times]
        rounds = sorted(_tenth(times) for times in self._rounds)
        quiet = tuple(rounds[: (len(rounds) + 1) // 2])  # the slower half tells of other processes
        return self._build(Timed(seconds=_tenth(every), rounds=quiet))

    def _once(self, calls: int) -> float:
        """Seconds of one call, of `calls` in a row."""
        if self._device.type != "cuda":
            started_s = time.perf_counter()
            for _ in range(calls):
                self._run()
            return (time.perf_counter() - started_s) / calls
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(calls):
            self._run()
        end.record()
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return seconds_of_milliseconds(milliseconds) / calls


def _done(row: Sequence[_Timing[T]]) -> tuple[T, ...]:
    return tuple(timing.done() for timing in row)


def _tenth(values: Sequence[float]) -> float:
    """The 10th percentile (of few values: the least)."""
    return sorted(values)[(len(values) - 1) // 10]


class _Makers:
    """The operators of each kind."""

    def __init__(self, device: torch.device, size: Extent) -> None:
        self._device, self._size = device, size
        self._main = "bf16" if device.type == "cuda" else "fp32"

    def _timing(self, run: Run, build: Callable[[Timed], T]) -> _Timing[T]:
        return _Timing(self._device, run, build)

    def _random(self, *shape: int, dtype: str | None = None, grad: bool = False) -> Tensor:
        made = torch.randn(*shape, device=self._device, dtype=TORCH_DTYPES[dtype or self._main])
        return made.requires_grad_(grad)

    def products(self) -> list[_Timing[Product]]:
        """Forward, input gradient and weight gradient of linears; the main type, and others at the largest shape."""
        others = ("fp32", "fp16") if self._device.type == "cuda" else ("bf16",)
        shapes = [(self._main, *shape) for shape in itertools.product(self._size.rows, self._size.widths)]
        shapes += [(other, self._size.rows[-1], self._size.widths[-1]) for other in others]
        made = []
        for dtype, rows, (inner, outer) in shapes:
            x, weight = self._random(rows, inner, dtype=dtype), self._random(outer, inner, dtype=dtype)
            grad = self._random(rows, outer, dtype=dtype)
            runs: list[tuple[Run, tuple[int, int, int]]] = [
                (partial(F.linear, x, weight), (rows, outer, inner)),
                (partial(torch.matmul, grad, weight), (rows, inner, outer)),
                (partial(torch.matmul, grad.T, x), (outer, inner, rows)),
            ]
            for run, (first, second, depth) in runs:
                build = partial(Product, rows=first, outer=second, inner=depth, dtype=dtype)
                made.append(self._timing(run, _of_time(build)))
        return made

    def attention(self) -> list[_Timing[FusedAttention]]:
        """Causal and not, forward and gradients; on CUDA by flash and by cuDNN where this build has it."""
        kinds = {"flash2": SDPBackend.FLASH_ATTENTION}
        if self._device.type == "cuda":
            kinds["cudnn"] = SDPBackend.CUDNN_ATTENTION
        heads, width = self._size.heads
        made = []
        for (kind, backend), length, causal in itertools.product(kinds.items(), self._size.lengths, (False, True)):
            q, k, v = (self._random(1, heads, length, width, grad=True) for _ in range(3))
            forward = partial(_attend, q, k, v, causal, backend)
            try:
                out = forward()
                backward = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)
                backward()
            except RuntimeError:  # this device or build has no such kernel, forward or back
                continue
            runs: list[tuple[Run, bool]] = [(forward, False), (backward, True)]
            for run, is_backward in runs:
                build = partial(
                    FusedAttention,
                    batch=1,
                    heads=heads,
                    length=length,
                    head_dim=width,
                    causal=causal,
                    backward=is_backward,
                    kind=kind,
                    dtype=self._main,
                )
                made.append(self._timing(run, _of_time(build)))
        return made

    def pointwise(self) -> list[_Timing[Moved]]:
        """What blocks have between products, forward and gradients, with the bytes that `traffic.py` counts."""
        made = []
        for elements in self._size.elements:
            width = 128 if self._device.type == "cpu" else 4096
            x, y = (self._random(elements // width, width, grad=True) for _ in range(2))
            weight, grad = self._random(width, grad=True), self._random(elements // width, width)
            whole = elements * x.element_size()
            forwards: list[tuple[str, Callable[[], Tensor], tuple[Tensor, ...]]] = [
                ("layer_norm", partial(F.layer_norm, x, (width,), weight, weight), (x, weight)),
                ("rms_norm", self._rms_norm(x, weight, width), (x, weight)),
                ("gelu", partial(F.gelu, x), (x,)),
                ("silu", partial(F.silu, x), (x,)),
                ("multiply", partial(torch.mul, x, y), (x, y)),
            ]
            for name, forward, inputs in forwards:
                read = whole * (2 if name == "multiply" else 1)
                backward = partial(torch.autograd.grad, forward(), inputs, grad, retain_graph=True)
                made.append(self._moved(forward, name, read + whole))
                made.append(self._moved(backward, f"{name} gradient", 2 * read + whole))
            made.append(self._moved(partial(torch.add, x, y), "add", 3 * whole))
        return made

    def _rms_norm(self, x: Tensor, weight: Tensor, width: int) -> Callable[[], Tensor]:
        """As `norms.py` runs it on this kind of device."""
        if self._device.type == "cuda":
            return partial(F.rms_norm, x, (width,), weight, RMS_NORM_EPS)
        return partial(rms_norm, x, weight)

    def updates(self) -> list[_Timing[Moved]]:
        """AdamW as a stage runs it, of few large and of many small parameters."""
        made = []
        for pieces in (4, 16):
            parameters = [torch.zeros(self._size.parameters // pieces, device=self._device) for _ in range(pieces)]
            for parameter in parameters:
                parameter.requires_grad_().grad = torch.randn_like(parameter)
            optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=self._device.type == "cuda")
            made.append(self._moved(optimizer.step, "AdamW", _UPDATE_BYTES * self._size.parameters))
        return made

    def stream(self) -> list[_Timing[Moved]]:
        """A copy too large for any cache."""
        source = torch.zeros(self._size.stream, device=self._device)
        copy = partial(torch.add, source, 1.0, out=torch.empty_like(source))
        return [self._moved(copy, "copy", 2 * source.nbytes)]

    def launches(self) -> list[_Timing[Timed]]:
        """Operators on a handful of elements, recorded by autograd as in training."""
        x, weight = self._random(16, 16, grad=True), self._random(16, 16, grad=True)
        vector = self._random(16, grad=True)
        runs: list[Run] = [
            partial(torch.add, x, weight),
            partial(torch.mul, x, weight),
            partial(F.gelu, x),
            partial(F.linear, x, weight),
            partial(F.layer_norm, x, (16,), vector, vector),
        ]
        return [self._timing(run, _itself) for run in runs]

    def _moved(self, run: Run, name: str, moved: float) -> _Timing[Moved]:
        return self._timing(run, lambda timed: Moved(name=name, bytes=float(moved), timed=timed))


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _of_time(build: Callable[..., T]) -> Callable[[Timed], T]:
    return lambda timed: build(timed=timed)


def _itself(timed: Timed) -> Timed:
    return timed
