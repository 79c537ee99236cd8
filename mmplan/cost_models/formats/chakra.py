"""Execution traces: Chakra's with the time of each node, and PyTorch's observer's with sizes and no times.

Nodes have dependencies and no begin, so that durations are added up: nothing can be said of overlap or idle time.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mmplan.cost_models.formats.chakra_nodes import COLLECTIVE, COMPUTE, Node, json_nodes, line_nodes
from mmplan.cost_models.formats.chakra_protobuf import protobuf_nodes
from mmplan.cost_models.formats.json_stream import Cut
from mmplan.cost_models.formats.kineto_head import rank_in_name
from mmplan.cost_models.traces.kernel_classes import COMMUNICATION, UNNAMED, collective, kernel_class, short_name
from mmplan.cost_models.traces.record import (
    SCHEMA,
    ClassTime,
    MessageTime,
    OperatorTime,
    ProductCount,
    RankTrace,
    TraceRecord,
    record_document,
)
from mmplan.cost_models.traces.samples import product_of
from mmplan.cost_models.traces.summary import MOST_ROWS
from mmplan.errors import InputError
from mmplan.scenario.document import counted
from mmplan.scenario.formats.reading import Head, Reading, read_head
from mmplan.units import format_flops, format_seconds, nanoseconds_of_microseconds, seconds_of_nanoseconds

_RANK = re.compile(r"\.(\d{1,6})\.(json|et|pb)(\.gz)?$|_(\d{1,6})\.(json|et)$")
_OWN_WORDS = ('"workload_graph"', '"NodeType"', '"COMP_NODE"', '"COMM_COLL_NODE"', "execution_trace", '"ctrlDeps"')
_MOST_NAMES = 500_000


def looks_like_chakra(head: Head) -> bool:
    """JSON with the words of one of the schemas, or a protobuf file that is called .et."""
    text = head.text.lstrip()
    if text.startswith(("{", "[")):
        observer = '"nodes"' in text and ('"fw_parent"' in text or '"rf_id"' in text) and '"op_schema"' in text
        return observer or any(word in text for word in _OWN_WORDS)
    return head.path.suffix == ".et"


@dataclass(slots=True)
class _Sums:
    """(nanoseconds, count) by name; counts of products and messages."""

    device: dict[str, tuple[int, int]] = field(default_factory=dict)
    host: dict[str, tuple[int, int]] = field(default_factory=dict)
    messages: dict[tuple[str, int | None], list[int | None]] = field(default_factory=dict)
    products: Counter[tuple[int, int, int, str]] = field(default_factory=Counter)
    nodes: int = 0
    timed: int = 0
    observed: bool = False  # written by PyTorch's ExecutionTraceObserver
    cut: Cut | None = None


def read_chakra(paths: Sequence[Path]) -> Reading:
    """The record of one or more files, one for each rank.

    Raises:
        InputError: no execution trace, or one without nodes.
    """
    ranks, read, ignored, warnings = list[RankTrace](), list[str](), list[str](), list[str]()
    for path in paths:
        sums = _gathered(_nodes(path))
        if not sums.nodes:
            raise InputError("no nodes in it" + (f": {sums.cut.reason}" if sums.cut else ""), file=path)
        trace = _trace(path, sums)
        ranks.append(trace)
        read += _told(path, sums, trace)
        if sums.cut is not None:
            warnings.append(
                f"{path.name}: line {sums.cut.line}: {sums.cut.reason}: {sums.nodes:,} whole nodes are read"
            )
        if not sums.timed:
            ignored.append(
                f"{path.name}: costs: an execution trace of PyTorch holds no times, a Kineto trace beside it does"
            )
        else:
            ignored.append(f"{path.name}: overlap, idle time and steps: nodes have durations and no begin")
    return Reading(
        kind="chakra",
        fragment=record_document(TraceRecord(schema=SCHEMA, ranks=tuple(ranks))),
        document="record of measured seconds" if any(trace.classes for trace in ranks) else "record of operators",
        read=tuple(read),
        ignored=tuple(ignored),
        warnings=tuple(warnings),
    )


def _nodes(path: Path) -> Iterator[Node | Cut]:
    """By what the file begins with."""
    text = read_head(path).text.lstrip()
    if not text.startswith(("{", "[")):
        return protobuf_nodes(path)
    first_line = text.splitlines()[0] if text else ""
    reader: Callable[[Path], Iterator[Node | Cut]] = json_nodes
    if '"workload_graph"' not in text and '"nodes"' not in text and first_line.rstrip().endswith("}"):
        reader = line_nodes
    return reader(path)


def _gathered(nodes: Iterator[Node | Cut]) -> _Sums:
    sums = _Sums()
    for node in nodes:
        if isinstance(node, Cut):
            sums.cut = node
            continue
        sums.nodes += 1
        length_ns = nanoseconds_of_microseconds(node.duration_us) if node.duration_us is not None else None
        sums.timed += length_ns is not None
        sums.observed |= node.name.startswith("[pytorch|profiler|execution_trace")
        on_device = node.on_host is False
        message = node.kind != COMPUTE or (on_device and kernel_class(node.name) == COMMUNICATION)
        # the host's half of a collective says its size, the device's half how long it took
        if message and (on_device or node.size_bytes is not None):
            key = (_named(node), node.size_bytes)
            sums.messages.setdefault(key, []).append(length_ns if on_device or node.on_host is None else None)
        table = sums.device if on_device or (node.on_host is None and length_ns is not None) else sums.host
        if len(table) < _MOST_NAMES or node.name in table:
            total, count = table.get(node.name, (0, 0))
            table[node.name] = (total + (length_ns or 0), count + 1)
        if node.call is not None:
            product = product_of(node.name, node.call)
            if product is not None:
                sums.products[product] += 1
    return sums


def _named(node: Node) -> str:
    found = collective(node.name)
    return found if found != UNNAMED or node.kind == COLLECTIVE else "send_recv"


def _trace(path: Path, sums: _Sums) -> RankTrace:
    classes: dict[str, tuple[int, int]] = {}
    for name, (total, count) in sums.device.items():
        before, calls = classes.get(kernel_class(name), (0, 0))
        classes[kernel_class(name)] = (before + total, calls + count)
    match = _RANK.search(path.name)
    rank = rank_in_name(path)
    return RankTrace(
        file=path.name,
        source="pytorch execution trace" if sums.observed else "chakra",
        rank=int(match[1] or match[4]) if rank is None and match else rank,
        classes=tuple(
            ClassTime(name=name, seconds=seconds_of_nanoseconds(total), count=count)
            for name, (total, count) in sorted(classes.items(), key=lambda item: -item[1][0])
        ),
        operators=tuple(row if sums.timed else replace(row, seconds=None) for row in _ranked(sums.host)),
        kernels=_ranked(sums.device),
        messages=tuple(_message(what, size, lengths) for (what, size), lengths in sums.messages.items())[:MOST_ROWS],
        products=tuple(
            ProductCount(rows=rows, inner=inner, outer=outer, dtype=dtype, count=count)
            for (rows, inner, outer, dtype), count in sums.products.most_common(MOST_ROWS)
        ),
    )


def _message(what: str, size: int | None, lengths: list[int | None]) -> MessageTime:
    timed = sorted(length for length in lengths if length is not None)
    return MessageTime(
        collective=what,
        bytes=size,
        ranks=None,
        group="",
        count=len(lengths),
        seconds=seconds_of_nanoseconds(sum(timed)) if timed else None,
        fastest_s=seconds_of_nanoseconds(timed[0]) if timed else None,
        median_s=seconds_of_nanoseconds(timed[len(timed) // 2]) if timed else None,
    )


def _ranked(table: dict[str, tuple[int, int]]) -> tuple[OperatorTime, ...]:
    merged: dict[str, tuple[int, int]] = {}
    for name, (total, count) in table.items():
        before, calls = merged.get(short_name(name), (0, 0))
        merged[short_name(name)] = (before + total, calls + count)
    order = sorted(merged.items(), key=lambda item: (-item[1][0], -item[1][1], item[0]))[:MOST_ROWS]
    return tuple(
        OperatorTime(name=name, seconds=seconds_of_nanoseconds(ns), count=count) for name, (ns, count) in order
    )


def _told(path: Path, sums: _Sums, trace: RankTrace) -> list[str]:
    sentences = [f"{path.name}: {counted(sums.nodes, 'node')}, {sums.timed:,} with a duration"]
    if trace.classes:
        shares = ", ".join(f"{item.name} {format_seconds(item.seconds)}" for item in trace.classes[:4])
        sentences.append(f"{path.name}: on the device {shares}")
    if sums.products:
        flops = sum(2.0 * rows * inner * outer * n for (rows, inner, outer, _), n in sums.products.items())
        calls = sum(sums.products.values())
        sentences.append(f"{path.name}: {counted(calls, 'matrix product')} of {format_flops(flops)}")
    return sentences
