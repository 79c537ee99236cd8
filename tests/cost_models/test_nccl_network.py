"""The network of logs over nodes: rings or trees by what the tables support, and messages beside them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from nccl_texts import device_lines, log_text

from mmplan.commands.import_kinds import read_files
from mmplan.cost_models.collectives import Group, all_reduce_s, gather_s, message_s
from mmplan.scenario.cluster import Cluster, Link
from mmplan.scenario.document import Document
from mmplan.scenario.formats.reading import Reading
from mmplan.scenario.machines import cluster_from_spec
from mmplan.scenario.schema_cluster import ClusterSpec

H100 = "NVIDIA H100 80GB HBM3"
NODE = Link(bytes_per_s=450e9, latency_s=2.5e-6, fraction=0.8, source="", nvls=True)
RINGS = Link(bytes_per_s=50e9, latency_s=14e-6, fraction=0.98, source="", pipelined=True, rings=True)
TREES = replace(RINGS, rings=False)


def hosts(count: int) -> list[str]:
    return device_lines([f"n{i}" for i in range(count)], 8, H100)


def table(network: Link, nodes: int) -> str:
    time_s = all_reduce(network, nodes)
    return log_text("all_reduce", 8 * nodes, time_s, devices=hosts(nodes), named=True)


def all_reduce(network: Link, nodes: int) -> Callable[[int], float]:
    return lambda size: all_reduce_s(size, Group(8 * nodes, 8), NODE, network)


def gather(network: Link) -> str:
    time_s = lambda size: gather_s(size, Group(16, 8), NODE, network)  # noqa: E731
    return log_text("all_gather", 16, time_s, devices=hosts(2), named=True)


def messages(network: Link) -> str:
    return log_text("sendrecv", 16, lambda size: message_s(size, network), devices=hosts(2), named=True)


def read(folder: Path, texts: Sequence[str]) -> tuple[Cluster, Reading]:
    paths = [folder / f"{index}.log" for index in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    reading = read_files([str(path) for path in paths])
    values = {"nodes": 2, "devices_per_node": 8, **dict(reading.fragment["cluster"])}  # type: ignore[call-overload]
    document = Document(file=folder / "scenario.yaml", values={}, lines={})
    return cluster_from_spec(ClusterSpec.model_validate(values), document), reading


def told(reading: Reading, words: str) -> bool:
    return any(words in sentence for sentence in reading.read)


def test_a_ring_of_two_nodes_is_49_gigabytes_a_device_and_not_26(tmp_path: Path) -> None:
    cluster, reading = read(tmp_path, [table(RINGS, 2)])
    assert cluster.network_link.rings
    assert cluster.network_link.reached_bytes_per_s == pytest.approx(49e9, rel=0.01)
    assert told(reading, "fit both forms; as trees over nodes the network would have 26.1 GB/s instead of 49 GB/s")


def test_rates_that_no_port_has_are_no_rings(tmp_path: Path) -> None:
    """470 GB/s of busbw on two nodes would be 59 GB/s a device: a port has 50."""
    cluster, reading = read(tmp_path, [table(replace(TREES, fraction=0.63), 2)])
    assert not cluster.network_link.rings
    assert cluster.network_link.reached_bytes_per_s == pytest.approx(31.5e9, rel=0.01)
    assert told(reading, "rings through all ranks would need 59.1 GB/s a device, more than a port has (50 GB/s)")


@pytest.mark.parametrize("network", [replace(RINGS, fraction=0.5), replace(TREES, fraction=0.5)])
@pytest.mark.parametrize("beside", [gather, messages, lambda network: table(network, 4)])
def test_other_tables_tell_rings_from_trees(tmp_path: Path, network: Link, beside: Callable[[Link], str]) -> None:
    cluster, reading = read(tmp_path, [table(network, 2), beside(network)])
    assert cluster.network_link.rings == network.rings
    assert cluster.network_link.reached_bytes_per_s == pytest.approx(25e9, rel=0.02)
    assert told(reading, "the tables are missed by")


@pytest.mark.parametrize("network", [RINGS, replace(TREES, fraction=0.63), replace(RINGS, fraction=0.1)])
def test_the_imported_cluster_takes_as_long_as_the_log_says(tmp_path: Path, network: Link) -> None:
    cluster, _ = read(tmp_path, [table(network, 2)])
    for size in (8, 1024, 2**28, 2**33):
        priced_s = all_reduce_s(size, Group(16, 8), cluster.pools[0].node_link, cluster.network_link)
        assert priced_s == pytest.approx(all_reduce(network, 2)(size), rel=0.05)


@pytest.mark.parametrize(
    ("hostfile", "nodes"),
    [("node1\nnode2\n", 2), ("node1 slots=8\nnode2 slots=8\nnode3 slots=8\n", 2), ("node1\nnode2\nnode3\n", None)],
)
def test_a_host_list_beside_a_log_says_how_its_ranks_lie(tmp_path: Path, hostfile: str, nodes: int | None) -> None:
    """16 ranks: on two hosts, on two of three with eight slots each, on three that do not divide them."""
    (tmp_path / "hosts").write_text(hostfile)
    (tmp_path / "log").write_text("\n".join(line for line in table(RINGS, 2).splitlines() if "Rank" not in line) + "\n")
    paths = [str(tmp_path / "hosts"), str(tmp_path / "log")]
    reading = read_files(paths)
    if nodes is None:
        assert dict(reading.fragment["cluster"]) == {"nodes": 3}  # type: ignore[call-overload]
        assert "its 16 ranks do not fill whole hosts of the 3 hosts beside it" in " ".join(reading.warnings)
        return
    assert any(f"on {nodes} nodes (by the list of" in sentence for sentence in reading.read)
    cluster = reading.fragment["cluster"]
    assert isinstance(cluster, dict) and float(cluster["network"]["bandwidth"].split()[0]) == pytest.approx(
        49, rel=0.01
    )


def test_messages_give_the_network_that_slow_links_inside_nodes_hide(tmp_path: Path) -> None:
    slow = replace(NODE, fraction=0.05, nvls=False)
    time_s = lambda size: all_reduce_s(size, Group(16, 8), slow, RINGS)  # noqa: E731
    inside = log_text(
        "all_reduce", 8, lambda size: all_reduce_s(size, Group(8, 8), slow, RINGS), devices=hosts(1), named=True
    )
    across = log_text("all_reduce", 16, time_s, devices=hosts(2), named=True)
    cluster, _ = read(tmp_path, [inside, across, messages(RINGS)])
    assert cluster.network_link.reached_bytes_per_s == pytest.approx(49e9, rel=0.02)
