"""Nodes of execution traces in JSON: Chakra's own, one object a line, and PyTorch's ExecutionTraceObserver.

Chakra: github.com/mlcommons/chakra, schema/protobuf/et_def.proto. Durations are microseconds. PyTorch's observer writes
sizes and no times.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mmplan.cost_models.formats.json_stream import Cut, json_items
from mmplan.cost_models.formats.kineto_arguments import element_bytes, integer
from mmplan.cost_models.traces.kernel_classes import UNNAMED, collective
from mmplan.cost_models.traces.recording import Call
from mmplan.errors import InputError
from mmplan.scenario.formats.reading import read_lines

COMPUTE, SEND, RECEIVE, COLLECTIVE = "compute", "send", "receive", "collective"
# NodeType of et_def.proto, by number and by name.
NODE_TYPES = {
    4: COMPUTE, 5: SEND, 6: RECEIVE, 7: COLLECTIVE,
    "COMP_NODE": COMPUTE, "COMM_SEND_NODE": SEND, "COMM_RECV_NODE": RECEIVE, "COMM_COLL_NODE": COLLECTIVE,
}  # fmt: skip
# CollectiveCommType of et_def.proto, for nodes whose name names no collective.
_COLLECTIVES = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter",
    "reduce_scatter", "barrier",
)  # fmt: skip
MOST_NODES = 20_000_000
MOST_TEXT_BYTES = 4_000_000_000
_MOST_SIZES = 32


@dataclass(frozen=True, slots=True)
class Node:
    """`duration_us` None: no time recorded. `on_host` None: not said. `size_bytes`: of a collective."""

    name: str
    kind: str
    duration_us: float | None
    on_host: bool | None
    size_bytes: int | None
    call: Call | None


def json_nodes(path: Path) -> Iterator[Node | Cut]:
    """Of a JSON file with a list `workload_graph` or `nodes`.

    Raises:
        InputError: no JSON, or an element that is no node.
    """
    for key, value in json_items(path, ("workload_graph", "nodes")):
        if isinstance(value, Cut):
            yield value
        elif key in ("workload_graph", "nodes"):
            if not isinstance(value, dict):
                raise InputError(f"expected nodes that are objects, found {str(value)[:40]!r}", file=path, key=key)
            yield _node(value)


def line_nodes(path: Path) -> Iterator[Node | Cut]:
    """Of a file with one JSON object a line (Chakra's jsonizer writes metadata first)."""
    for number, line in enumerate(read_lines(path, MOST_TEXT_BYTES), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"expected one JSON object a line: {error}", file=path, line=number) from error
        if isinstance(value, dict) and ("name" in value or "Name" in value):
            yield _node(value)


def _node(value: Mapping[str, object]) -> Node:
    attributes = {**_attributes(value.get("attr")), **_attributes(value.get("attrs"))}
    kind = value.get("NodeType", value.get("type", value.get("node_type")))
    known = NODE_TYPES.get(kind) if isinstance(kind, str | int) else None
    duration = value.get("runtime", value.get("durationMicros", value.get("duration_micros")))
    host = value.get("is_cpu_op", attributes.get("is_cpu_op"))
    size = integer(attributes.get("comm_size"))
    name, named = str(value.get("Name", value.get("name", "")))[:4_000], attributes.get("collective_name")
    if isinstance(named, str) and named:
        known, name = COLLECTIVE, f"{name}: {named[:60]}"
        elements = max(integer(attributes.get("in_msg_nelems")), integer(attributes.get("out_msg_nelems")))
        each = element_bytes(attributes.get("dtype"))
        size = elements * each if elements >= 0 and each is not None else size
    return Node(
        name=with_collective(name, attributes.get("comm_type")),
        kind=known or COMPUTE,
        duration_us=duration_us(duration),
        on_host=host if isinstance(host, bool) else None,
        size_bytes=size if size >= 0 else None,
        call=_call(value),
    )


def with_collective(name: str, comm_type: object) -> str:
    """The name with its collective, where only the number of its type says it."""
    number = integer(comm_type)
    if collective(name) != UNNAMED or not 0 <= number < len(_COLLECTIVES):
        return name
    return f"{name}: {_COLLECTIVES[number]}"


def _attributes(value: object) -> dict[str, object]:
    """`[{"name": "comm_size", "int64Val": "4"}]` as a dictionary: each has one value beside its name and type."""
    found: dict[str, object] = {}
    for item in value if isinstance(value, list) else ():
        if isinstance(item, dict) and isinstance(item.get("name"), str):
            values = [inner for key, inner in item.items() if key == "value" or key.endswith(("Val", "_val"))]
            if len(values) == 1:
                found[str(item["name"])] = values[0]
    return found


def duration_us(value: object) -> float | None:
    if isinstance(value, str):
        value = float(value) if value.replace(".", "", 1).isdigit() and len(value) < 20 else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < 1e12 else None


def _call(value: Mapping[str, object]) -> Call | None:
    """Sizes and types of an operator's inputs, where an execution trace of PyTorch has them."""
    inputs = value.get("inputs")
    within = inputs if isinstance(inputs, dict) else {}
    shapes, types = value.get("input_shapes", within.get("shapes")), value.get("input_types", within.get("types"))
    if not isinstance(shapes, list) or not isinstance(types, list) or not 0 < len(shapes) <= _MOST_SIZES:
        return None
    sizes = tuple(tuple(map(integer, item)) if isinstance(item, list) else () for item in shapes)
    return Call(sizes, tuple(str(item)[:60] for item in types), ())
