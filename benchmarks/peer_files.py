"""Readers of the published planners' inputs: operator DAGs of dnn-partitioning, layer tables of Piper.

Both are JSON objects with `nodes` and `edges`; nodes with `TMPCs` (time, memory, parallelism configurations) make a
layer table. Whatever is missing or no number is an `InputError` with the file and the key.
"""

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

from mmplan.errors import InputError
from mmplan.planner.partition.problem import PartitionProblem, mirrored_order
from mmplan.planner.partition.replicated_problem import LayerAtDegree, LayerOption, ReplicatedProblem

MS_PER_S = 1000.0  # dnn-partitioning states times in milliseconds


@dataclass(frozen=True)
class Reader:
    """A JSON value, and where in which file it lies."""

    file: Path
    key: str
    value: object

    def error(self, message: str) -> InputError:
        return InputError(message, file=self.file, key=self.key or None)

    def has(self, name: str) -> bool:
        return isinstance(self.value, dict) and self.value.get(name) is not None

    def get(self, name: str) -> "Reader":
        key = f"{self.key}.{name}" if self.key else name
        if not isinstance(self.value, dict):
            raise self.error(f"expected an object with key {name}, found {_shown(self.value)}")
        if name not in self.value:
            raise InputError("key is missing", file=self.file, key=key)
        return Reader(self.file, key, self.value[name])

    def items(self) -> "list[Reader]":
        if not isinstance(self.value, list):
            raise self.error(f"expected a list, found {_shown(self.value)}")
        return [Reader(self.file, f"{self.key}[{index}]", value) for index, value in enumerate(self.value)]

    def fields(self) -> "dict[str, Reader]":
        if not isinstance(self.value, dict):
            raise self.error(f"expected an object, found {_shown(self.value)}")
        return {name: self.get(name) for name in self.value}

    def number(self) -> float:
        """A finite number that is not negative."""
        good = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if not good or not math.isfinite(self.value) or self.value < 0:
            raise self.error(f"expected a number of at least 0, found {_shown(self.value)}")
        return float(self.value)

    def integer(self) -> int:
        """A whole number, which may be negative: ids and colours are names."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or self.value != self.value // 1:
            raise self.error(f"expected a whole number, found {_shown(self.value)}")
        return int(self.value)

    def count(self, least: int) -> int:
        if self.integer() < least:
            raise self.error(f"expected at least {least}, found {self.value}")
        return self.integer()

    def flag(self) -> bool:
        if self.value not in (0, 1):
            raise self.error(f"expected true or false, found {_shown(self.value)}")
        return bool(self.value)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 40 else f"a {type(value).__name__}"


def open_peer_file(file: Path) -> Reader:
    """The object in the file.

    Raises:
        InputError: it cannot be read or is no JSON object.
    """
    try:
        value = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", file=file) from error
    except json.JSONDecodeError as error:
        raise InputError(f"no JSON: {error.msg}", file=file, line=error.lineno) from error
    reader = Reader(file, "", value)
    reader.fields()
    return reader


def refuse_other_kinds(reader: Reader) -> None:
    """A DAG or a layer table has `nodes`.

    Raises:
        InputError: it is a placement, such as a human expert's, or something else.
    """
    if reader.has("nodes"):
        return
    if reader.has("fpgas"):
        devices = len(reader.get("fpgas").items())
        raise reader.error(
            f"a placement on {devices} accelerators, not a workload: it lists nodes of devices without their costs; "
            "give the workload that it places"
        )
    keys = ", ".join(list(reader.fields())[:6]) or "none"
    raise reader.error(f"neither an operator DAG nor a layer table, which have nodes and edges; its keys: {keys}")


def is_layer_table(reader: Reader) -> bool:
    """Piper's kind of file; the other kind is an operator DAG."""
    nodes = reader.get("nodes").items()
    if not nodes:
        raise reader.get("nodes").error("expected at least one node")
    return reader.has("mbsInBatch") or any(node.has("TMPCs") for node in nodes)


def _edges(reader: Reader, place: dict[int, int]) -> list[tuple[int, int, Reader]]:
    """Places of both ends, and the edge."""
    edges = []
    for edge in reader.get("edges").items():
        ends = []
        for name in ("sourceId", "destId"):
            end = edge.get(name)
            if end.integer() not in place:
                raise end.error(f"no node has the id {end.value}")
            ends.append(place[end.integer()])
        edges.append((ends[0], ends[1], edge))
    return edges


def _places(reader: Reader) -> dict[int, int]:
    place: dict[int, int] = {}
    for index, node in enumerate(reader.get("nodes").items()):
        if node.get("id").integer() in place:
            raise node.get("id").error(f"another node has the id {node.get('id').value}")
        place[node.get("id").integer()] = index
    return place


def read_placement(reader: Reader) -> PartitionProblem:
    """An operator DAG with the devices it states; a node without colour may go anywhere, one that does not say so is no
    backward node and runs on accelerators.

    Raises:
        InputError: a key is missing or wrong, or the outputs of one node have unlike costs.
    """
    nodes, place = reader.get("nodes").items(), _places(reader)
    edges = _edges(reader, place)
    consumers: dict[int, list[int]] = defaultdict(list)
    transfer_s: dict[int, float] = {}
    for producer, consumer, edge in edges:
        cost_s = edge.get("cost").number() / MS_PER_S
        if not math.isclose(transfer_s.setdefault(producer, cost_s), cost_s):
            raise edge.get("cost").error(f"another edge of node {edge.get('sourceId').value} has another cost")
        consumers[producer].append(consumer)
    backward = [node.has("isBackwardNode") and node.get("isBackwardNode").flag() for node in nodes]
    keys = [
        ("colour", node.get("colorClass").integer()) if node.has("colorClass") else ("node", index)
        for index, node in enumerate(nodes)
    ]
    colour_of = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    colour = [colour_of[key] for key in keys]
    accelerators, cpus = reader.get("maxFPGAs").count(0), reader.get("maxCPUs").count(0)
    if accelerators + cpus == 0:
        raise reader.get("maxFPGAs").error("no devices: maxFPGAs and maxCPUs are 0")
    return PartitionProblem(
        accelerator_s=tuple(
            node.get("fpgaLatency").number() / MS_PER_S
            if not node.has("supportedOnFpga") or node.get("supportedOnFpga").flag()
            else math.inf
            for node in nodes
        ),
        cpu_s=tuple(node.get("cpuLatency").number() / MS_PER_S for node in nodes),
        size_bytes=tuple(node.get("size").number() for node in nodes),
        transfer_s=tuple(transfer_s.get(index, 0.0) for index in range(len(nodes))),
        consumers=tuple(tuple(consumers[index]) for index in range(len(nodes))),
        order=mirrored_order([(u, v) for u, v, _ in edges], backward, colour),
        colour=tuple(colour),
        accelerators=accelerators,
        cpus=cpus,
        capacity_bytes=reader.get("maxSizePerFPGA").number(),
    )


def read_layer_table(reader: Reader, link_bytes_per_s: float | None = None) -> ReplicatedProblem:
    """A layer table with the devices and, unless another is given, the link that it states.

    A transfer between stages moves the tensor and its tensor-parallel synchronisation, forwards and backwards.

    Raises:
        InputError: a key is missing or wrong, or the options of a layer at one degree differ in more than time and
            memory.
    """
    nodes, place = reader.get("nodes").items(), _places(reader)
    edges = _edges(reader, place)
    order = nx.DiGraph((u, v) for u, v, _ in edges)
    order.add_nodes_from(range(len(nodes)))
    if not nx.is_directed_acyclic_graph(order):
        raise reader.get("edges").error("the edges make a cycle")
    rank = {node: index for index, node in enumerate(nx.lexicographical_topological_sort(order))}
    bytes_of = {(rank[u], rank[v]): edge.get("communicationCost").number() for u, v, edge in edges}
    link = reader.get("bandwidth")
    if link_bytes_per_s is None and link.number() == 0:
        raise link.error("expected a number above 0, found 0")
    link_bytes_per_s = link_bytes_per_s or link.number()
    ranks = {node_id: rank[index] for node_id, index in place.items()}
    layers: list[dict[int, LayerAtDegree]] = [{} for _ in nodes]
    for index, node in enumerate(nodes):
        for name, options in node.get("TMPCs").fields().items():
            if not name.isdigit() or int(name) < 1:
                raise options.error("expected a tensor degree as key")
            layers[rank[index]][int(name)] = _layer(options, rank[index], ranks, bytes_of, link_bytes_per_s)
        if not layers[rank[index]]:
            raise node.get("TMPCs").error("expected at least one tensor degree")
    return ReplicatedProblem(
        layers=tuple(layers),
        edges=tuple(sorted(bytes_of)),
        devices=reader.get("maxDevices").count(1),
        capacity_bytes=reader.get("maxMemoryPerDevice").number(),
        link_bytes_per_s=link_bytes_per_s,
        samples=reader.get("mbsInBatch").count(1),
    )


def _layer(
    reader: Reader, layer: int, ranks: dict[int, int], bytes_of: dict[tuple[int, int], float], link_bytes_per_s: float
) -> LayerAtDegree:
    """One layer at one tensor degree."""
    options = reader.items()
    if not options:
        raise reader.error("expected at least one configuration")
    for option in options[1:]:
        for name in ("parameterSize", "syncTimeFw", "syncTimeBw"):
            if option.get(name).value != options[0].get(name).value:
                raise option.get(name).error("differs from that of the first configuration")
    sync_bytes: dict[int, float] = {}
    for name in ("syncTimeFw", "syncTimeBw"):
        for node_id, size in options[0].get(name).fields().items():
            neighbour = ranks.get(int(node_id)) if node_id.isdigit() else None
            if neighbour is None:
                raise size.error(f"no node has the id {node_id}")
            sync_bytes[neighbour] = size.number()
    moved = {v if u == layer else u: size for (u, v), size in bytes_of.items() if layer in (u, v)}
    return LayerAtDegree(
        options=tuple(
            LayerOption(
                name=str(option.get("id").value),
                time_s=option.get("timePerSample").number(),
                in_flight_bytes=option.get("memoryUsageA").number(),
                fixed_bytes=option.get("memoryUsageB").number(),
            )
            for option in options
        ),
        parameter_bytes=options[0].get("parameterSize").number(),
        transfer_s={n: 2 * (size + sync_bytes.get(n, 0.0)) / link_bytes_per_s for n, size in moved.items()},
    )
