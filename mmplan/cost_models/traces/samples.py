"""Operators of a trace as the samples that calibration takes: what was computed or moved, and how long its kernels
took.

An operator's sizes are there with the profiler's `record_shapes=True`. Equal calls are one sample; its time is the 10th
percentile of its calls, as in `mmplan calibrate`, because what disturbs a kernel only ever makes it longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmplan.cost_models.calibration import Exchange, FusedAttention, Moved, Product, Timed
from mmplan.cost_models.traces.attribution import Attribution
from mmplan.cost_models.traces.intervals import Ints
from mmplan.cost_models.traces.kernel_classes import CLASS_INDEX, COMMUNICATION
from mmplan.cost_models.traces.recording import Call, Recording
from mmplan.units import seconds_of_nanoseconds

_DTYPES = {"float": "fp32", "c10::bfloat16": "bf16", "c10::half": "fp16", "bfloat16": "bf16", "half": "fp16"}
_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
_OPERANDS = {"aten::mm": (0, 1), "aten::addmm": (1, 2)}
# Where the sizes of q, k and the causal flag stand among the inputs, and which dimension counts the tokens.
_ATTENTION = {
    "aten::_flash_attention_forward": (8, 1),  # [batch, tokens, heads, width]
    "aten::_scaled_dot_product_flash_attention": (4, 2),  # [batch, heads, tokens, width]
    "aten::_scaled_dot_product_cudnn_attention": (6, 2),
}
_IN_PLACE = ("aten::add_", "aten::mul_", "aten::copy_")
_MOST_ROUNDS = 20
_DEVICES_OF_A_NODE = 8  # a group inside one block of eight ranks is taken to be inside one node


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSamples:
    """Of one or more ranks. `exchanges`: all-reduces of groups inside a node."""

    products: tuple[Product, ...]
    attention: tuple[FusedAttention, ...]
    pointwise: tuple[Moved, ...]
    exchanges: tuple[Exchange, ...]


def samples_of(ranks: Sequence[tuple[Recording, Attribution]]) -> TraceSamples:
    """The samples of all ranks; equal calls of different ranks are one sample."""
    seconds: dict[tuple[str, Call, str], list[int]] = {}
    messages: dict[tuple[int, int], list[int]] = {}
    for recording, attribution in ranks:
        for key, lengths in _calls(recording, attribution).items():
            seconds.setdefault(key, []).extend(lengths)
        for size, lengths in _all_reduces(recording).items():
            messages.setdefault(size, []).extend(lengths)
    timed = [(name, call, kernel, _timed(lengths)) for (name, call, kernel), lengths in seconds.items()]
    products = [_product(name, call, time) for name, call, _, time in timed]
    attention = [_attention(name, call, kernel, time) for name, call, kernel, time in timed]
    moved = [_moved(name, call, time) for name, call, _, time in timed]
    exchanges = [
        Exchange(collective=True, size=size, ranks=n, timed=_timed(own)) for (size, n), own in messages.items()
    ]
    return TraceSamples(
        products=tuple(item for item in products if item is not None),
        attention=tuple(item for item in attention if item is not None),
        pointwise=tuple(item for item in moved if item is not None),
        exchanges=tuple(exchanges),
    )


def _calls(recording: Recording, attribution: Attribution) -> dict[tuple[str, Call, str], list[int]]:
    """(operator, its inputs, its longest kernel) -> nanoseconds of each call: all kernels that it launched itself."""
    host, work = recording.host, recording.work
    operator = attribution.of_work(attribution.operator, -1)
    rows = np.flatnonzero((operator >= 0) & (work.kind != CLASS_INDEX[COMMUNICATION]))
    rows = rows[host.call[operator[rows]] >= 0]
    if len(rows) == 0:
        return {}
    lengths = (work.end_ns - work.start_ns)[rows]
    owners, first = np.unique(operator[rows], return_inverse=True)
    sums = np.bincount(first, weights=lengths.astype(np.float64))
    order = np.lexsort((lengths, first))  # the last row of each owner is its longest kernel
    last = order[np.searchsorted(first[order], np.arange(len(owners)), side="right") - 1]
    found: dict[tuple[str, Call, str], list[int]] = {}
    for owner, total, kernel in zip(owners.tolist(), sums.tolist(), work.name[rows][last].tolist(), strict=True):
        name, call = recording.names[int(host.name[owner])], recording.calls[int(host.call[owner])]
        if total > 0:
            found.setdefault((name, call, recording.names[kernel]), []).append(round(total))
    return found


def _all_reduces(recording: Recording) -> dict[tuple[int, int], list[int]]:
    """(bytes, ranks) -> nanoseconds of the all-reduces whose group lies in one block of eight ranks."""
    work = recording.work
    found: dict[tuple[int, int], list[int]] = {}
    for index, message in enumerate(recording.messages):
        inside = {rank // _DEVICES_OF_A_NODE for rank in message.members} if message.members else set()
        if message.collective != "all_reduce" or not message.bytes or not message.ranks or message.ranks < 2:
            continue
        if len(inside) == 1:
            rows = np.flatnonzero(work.message == index)
            lengths = (work.end_ns - work.start_ns)[rows]
            found.setdefault((message.bytes, message.ranks), []).extend(lengths[lengths > 0].tolist())
    return {size: lengths for size, lengths in found.items() if lengths}


def _timed(lengths_ns: Sequence[int]) -> Timed:
    ordered: Ints = np.sort(np.array(lengths_ns, np.int64))
    picked = np.unique(np.linspace(0, len(ordered) - 1, min(_MOST_ROUNDS, len(ordered))).round().astype(np.int64))
    rounds = tuple(seconds_of_nanoseconds(value) for value in ordered[picked].tolist())
    return Timed(seconds=seconds_of_nanoseconds(int(ordered[(len(ordered) - 1) // 10])), rounds=rounds)


def _dtype(call: Call, index: int) -> str | None:
    return (
        _DTYPES.get(call.types[index].lower().removeprefix("tensor(").rstrip(")")) if index < len(call.types) else None
    )


def _dims(call: Call, index: int, count: int) -> tuple[int, ...] | None:
    sizes = call.sizes[index] if index < len(call.sizes) else ()
    return sizes if len(sizes) == count and all(0 < size < 2**31 for size in sizes) else None


def product_of(name: str, call: Call) -> tuple[int, int, int, str] | None:
    """(rows, inner, outer, type) of a matrix product, None for other operators and where sizes are not plain."""
    if name not in _OPERANDS:
        return None
    left, right = _OPERANDS[name]
    a, b, dtype = _dims(call, left, 2), _dims(call, right, 2), _dtype(call, left)
    return (a[0], a[1], b[1], dtype) if a and b and dtype and a[1] == b[0] else None


def _product(name: str, call: Call, timed: Timed) -> Product | None:
    found = product_of(name, call)
    if found is None:
        return None
    rows, inner, outer, dtype = found
    return Product(rows=rows, outer=outer, inner=inner, dtype=dtype, timed=timed)


def _attention(name: str, call: Call, kernel: str, timed: Timed) -> FusedAttention | None:
    if name not in _ATTENTION:
        return None
    flag, tokens_at = _ATTENTION[name]
    q, k, dtype = _dims(call, 0, 4), _dims(call, 1, 4), _dtype(call, 0)
    causal = call.scalars[flag].lower() if flag < len(call.scalars) else ""
    kind = _attention_kind(kernel)
    if q is None or k is None or dtype in (None, "fp32") or causal not in ("true", "false") or kind is None:
        return None
    if q[tokens_at] != k[tokens_at]:
        return None
    return FusedAttention(
        batch=q[0],
        heads=q[3 - tokens_at],
        length=q[tokens_at],
        head_dim=q[3],
        causal=causal == "true",
        backward=False,
        kind=kind,
        dtype=str(dtype),
        timed=timed,
    )


def _attention_kind(kernel: str) -> str | None:
    lower = kernel.lower()
    if "cudnn" in lower:
        return "cudnn"
    if "sm90" in lower:
        return "flash3"
    return "flash2" if "flash_fwd" in lower else None


def _moved(name: str, call: Call, timed: Timed) -> Moved | None:
    """Bytes that a point-wise operator reads and writes at least."""
    if name in _OPERANDS or name in _ATTENTION or not name.startswith("aten::") or "mm" in name or "attention" in name:
        return None
    tensors: list[float] = []
    for index, sizes in enumerate(call.sizes):
        size = _SIZES.get(_dtype(call, index) or "")
        if sizes and all(0 < dim < 2**31 for dim in sizes):
            if size is None:
                return None
            tensors.append(float(np.prod([float(dim) for dim in sizes])) * size)
    if not tensors:
        return None
    written = 0.0 if name == "aten::copy_" else tensors[0] if name in _IN_PLACE else max(tensors)
    return Moved(name=name, bytes=sum(tensors) + written, timed=timed)
