"""Logs of nccl-tests: every layout is read, impossible ones are refused, and the fitted links predict the log again."""

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_texts import SIZES, device_lines, log_text

from mmplan.commands.import_kinds import read_files
from mmplan.cost_models.collectives import Group, all_reduce_s, all_to_all_s, gather_s, message_s
from mmplan.cost_models.formats.nccl_log import read_runs
from mmplan.cost_models.formats.nccl_sweep import sweep_of
from mmplan.errors import InputError
from mmplan.scenario.cluster import Cluster, Link
from mmplan.scenario.document import Document
from mmplan.scenario.formats.reading import Reading, read_lines
from mmplan.scenario.machines import cluster_from_spec
from mmplan.scenario.schema_cluster import ClusterSpec

GIVEN = Path(__file__).parents[2].parent / "shared" / "data" / "files"
NODE = Link(bytes_per_s=300e9, latency_s=2.5e-6, fraction=0.7, source="")
NETWORK = Link(bytes_per_s=10e9, latency_s=9e-6, fraction=0.8, source="", pipelined=True, rings=True)
A100 = "NVIDIA A100-SXM4-80GB"
ONE = device_lines(["n1"], 8, A100)
TWO = device_lines(["n1", "n2"], 8, A100)


def all_reduce(ranks: int, per_node: int) -> Callable[[int], float]:
    return lambda size: all_reduce_s(size, Group(ranks, per_node), NODE, NETWORK)


def reading_of(folder: Path, text: str, name: str = "log.txt") -> Reading:
    file = folder / name
    file.write_text(text)
    return read_files([str(file)])


def told(reading: Reading, words: str) -> bool:
    return any(re.search(words, sentence) for sentence in (*reading.read, *reading.ignored, *reading.warnings))


def cluster_of(reading: Reading, **more: object) -> Cluster:
    """The fragment as the cluster of a scenario."""
    spec = ClusterSpec.model_validate({"devices_per_node": 8, **dict(reading.fragment["cluster"]), **more})  # type: ignore[call-overload]
    return cluster_from_spec(spec, Document(file=Path("scenario.yaml"), values={}, lines={}))


@pytest.mark.parametrize(("busbw", "shared"), [(8e11, True), (1.5e11, False)])
def test_a_network_faster_than_a_port_may_be_nvlinks(tmp_path: Path, busbw: float, shared: bool) -> None:
    """18 hosts of an NVL72 rack reach 800 GB/s, which is no network's; over ports of 50 GB/s 150 GB/s are usual."""
    devices = device_lines([f"n{i}" for i in range(18)], 4, "NVIDIA GB200")
    text = log_text("all_reduce", 72, lambda size: 2e-5 + size * 2 * 71 / 72 / busbw, devices=devices)
    words = r"than its port has \(50 GB/s\): if NVLinks join the nodes .* nodes: 1, devices_per_node: 72"
    assert told(reading_of(tmp_path, text), words) == shared


@pytest.mark.parametrize("layout", ["new", "old", "digits", "short"])
@pytest.mark.parametrize("prefix", ["", "0: ", "[1,0]<stdout>:", "2026-01-01T00:00:00Z ", "    ", "[pod/launcher] "])
def test_the_links_of_a_log_are_those_that_made_it(tmp_path: Path, layout: str, prefix: str) -> None:
    text = log_text("all_reduce", 8, all_reduce(8, 8), layout=layout, prefix=prefix, devices=ONE)
    link = cluster_of(reading_of(tmp_path, text)).pools[0].node_link
    assert link.reached_bytes_per_s == pytest.approx(NODE.reached_bytes_per_s, rel=0.01)
    assert link.latency_s == pytest.approx(NODE.latency_s, rel=0.02)


def test_a_log_over_nodes_gives_the_share_of_the_ports(tmp_path: Path) -> None:
    """Beside a node link that a table of one node shows, in the same import."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text(log_text("all_reduce", 8, all_reduce(8, 8), devices=ONE))
    two.write_text(log_text("all_reduce", 16, all_reduce(16, 8), devices=TWO))
    cluster = cluster_of(read_files([str(one), str(two)]), nodes=2)
    assert cluster.network_link.reached_bytes_per_s == pytest.approx(NETWORK.reached_bytes_per_s, rel=0.01)
    assert cluster.network_link.latency_s == pytest.approx(NETWORK.latency_s, rel=0.1)
    assert cluster.pools[0].node_link.reached_bytes_per_s == pytest.approx(NODE.reached_bytes_per_s, rel=0.01)


def test_messages_between_nodes_give_the_network_alone(tmp_path: Path) -> None:
    text = log_text("sendrecv", 16, lambda s: message_s(s, NETWORK), devices=TWO, named=True)
    cluster = reading_of(tmp_path, text.replace(A100, "NVIDIA GeForce RTX 5090")).fragment["cluster"]
    assert isinstance(cluster, dict) and list(cluster) == ["network"]
    assert float(cluster["network"]["bandwidth"].split()[0]) == pytest.approx(8, rel=0.01)


def test_a_network_that_does_not_show_is_told(tmp_path: Path) -> None:
    quick = replace(NETWORK, bytes_per_s=1e12)
    text = log_text("all_reduce", 16, lambda s: all_reduce_s(s, Group(16, 8), NODE, quick), devices=TWO)
    assert told(reading_of(tmp_path, text), "links inside nodes set its pace, so the network may be faster")
    slow = log_text("all_reduce", 16, all_reduce(16, 8), devices=TWO)
    assert not told(reading_of(tmp_path, slow), "set its pace")


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "sendrecv", "alltoall"])
def test_other_collectives_give_the_same_link(tmp_path: Path, collective: str) -> None:
    group = Group(8, 8)
    made = {"alltoall": lambda size: all_to_all_s(size, group, NODE, NETWORK), "sendrecv": lambda s: message_s(s, NODE)}
    time_s = made.get(collective, lambda size: gather_s(size, group, NODE, NETWORK))
    link = cluster_of(reading_of(tmp_path, log_text(collective, 8, time_s, devices=ONE, named=True))).pools[0].node_link
    assert link.reached_bytes_per_s == pytest.approx(NODE.reached_bytes_per_s, rel=0.01)


def test_single_slow_calls_and_slow_middle_sizes_move_neither_number(tmp_path: Path) -> None:
    draw = random.Random(0)

    def noisy(size: int) -> float:
        slow = 20.0 if draw.random() < 0.1 and size < 10_000 else 1.0
        return all_reduce(8, 8)(size) * slow * (1.8 if 100_000 < size < 10_000_000 else 1.0)

    link = cluster_of(reading_of(tmp_path, log_text("all_reduce", 8, noisy, devices=ONE))).pools[0].node_link
    assert link.reached_bytes_per_s == pytest.approx(NODE.reached_bytes_per_s, rel=0.05)
    assert link.latency_s == pytest.approx(NODE.latency_s, rel=0.1)


def test_without_a_list_of_devices_ranks_come_from_the_ratio_and_no_link_is_given(tmp_path: Path) -> None:
    reading = reading_of(tmp_path, log_text("all_reduce", 16, all_reduce(16, 8)))
    (record,) = reading.fragment["collectives"]  # type: ignore[attr-defined]
    assert (record["collective"], record["ranks"], record["nodes"]) == ("all_reduce", 16, None)
    assert reading.document.startswith("a record") and told(reading, "does not say how its ranks lie on nodes")
    placed = log_text("all_reduce", 16, all_reduce(16, 8)).replace("# nThread", "srun --ntasks-per-node=8\n# nThread")
    assert "network" in reading_of(tmp_path, placed).fragment["cluster"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("collective", "named"),
    [("all_reduce", False), ("reduce_scatter", False), ("all_gather", False), ("alltoall", False), ("broadcast", True)],
)
def test_the_collective_is_recognised_by_its_columns_or_its_program(
    tmp_path: Path, collective: str, named: bool
) -> None:
    text = log_text(collective, 8, lambda size: 1e-5 + size / 100e9, devices=ONE, named=named)
    assert told(reading_of(tmp_path, text), f"{collective} of 8 ranks")


def test_a_list_of_devices_that_is_cut_short_is_not_taken_for_all_ranks(tmp_path: Path) -> None:
    text = log_text("all_reduce", 16, all_reduce(16, 8), devices=[*TWO[:3], "..."])
    (record,) = reading_of(tmp_path, text).fragment["collectives"]  # type: ignore[attr-defined]
    assert (record["ranks"], record["nodes"]) == (16, None)
    assert told(reading_of(tmp_path, text), "the list of devices shows 2 of 16 ranks or more")
    assert told(reading_of(tmp_path, text.replace(TWO[2] + "\n", "")), "shows 1 of 16 ranks or more")


def test_an_open_collective_is_that_of_the_files_name_or_none(tmp_path: Path) -> None:
    text = log_text("all_gather", 8, lambda size: 1e-5 + size / 100e9, devices=ONE)
    text = re.sub(r" 0(?=\n|  )", " N/A", text)
    assert told(reading_of(tmp_path, text, "allgather.log"), "all_gather by the name of the file")
    assert told(reading_of(tmp_path, text, "x.log"), "the table fits all_gather, alltoall")


def test_dips_collapses_and_ends_that_rise_are_told(tmp_path: Path) -> None:
    def collapsing(size: int) -> float:
        return all_reduce(8, 8)(size) * (6.0 if size > 50e6 else 1.0)

    def dipping(size: int) -> float:
        return all_reduce(8, 8)(size) * (6.0 if 20e6 < size < 50e6 else 1.0)

    assert told(reading_of(tmp_path, log_text("all_reduce", 8, collapsing, devices=ONE)), "busbw collapses from")
    assert told(reading_of(tmp_path, log_text("all_reduce", 8, dipping, devices=ONE)), "busbw dips from")
    short = log_text("all_reduce", 8, all_reduce(8, 8), devices=ONE, sizes=SIZES[:10])
    assert told(reading_of(tmp_path, short), "still rises")


def test_slow_calls_are_told(tmp_path: Path) -> None:
    calls = iter(range(1000))

    def first_is_slow(size: int) -> float:
        return all_reduce(8, 8)(max(size, 2**27)) if next(calls) < 4 else all_reduce(8, 8)(size)

    text = log_text("all_reduce", 8, first_is_slow, devices=ONE, sizes=[2**26, 2**27, 2**28])
    assert told(reading_of(tmp_path, text), "64 MiB took as long as 128 MiB")
    uneven = re.sub(r"(?m)^( +2048 .* -1 +)\d+\.\d+ +0.\d+ +0.\d+", r"\g<1>99.90  0.02  0.04", GOOD)
    assert told(reading_of(tmp_path, uneven), "calls of 1 size differ by over 3 times \\(2 KiB: 15 us and 99.9 us\\)")


def test_a_run_that_failed_keeps_its_rows_and_says_so(tmp_path: Path) -> None:
    text = log_text("all_reduce", 8, all_reduce(8, 8), devices=ONE, extra=["n1: Test NCCL failure common.cu:1"])
    assert told(reading_of(tmp_path, text), "the run failed after its rows \\(line \\d+: n1: Test NCCL failure")
    wrong = log_text("all_reduce", 8, all_reduce(8, 8), devices=ONE, extra=["# Out of bounds values : 3 FAILED"])
    assert told(reading_of(tmp_path, wrong), "3 values of the results are wrong")


def test_tables_of_2017_are_in_milliseconds(tmp_path: Path) -> None:
    devices = "".join(f"#   Rank {rank:2d} on   dgx1 device {rank:2d} [0x06] Tesla V100-SXM2-16GB\n" for rank in (0, 1))
    titles = f"#      bytes             N    type      op{'     time  algbw  busbw      res' * 2}\n"
    row = "    67108864      16777216   float     sum    1.032  65.03  65.03    1e-07    1.020  65.79  65.79    1e-07\n"
    link = cluster_of(reading_of(tmp_path, devices + titles + row)).pools[0].node_link
    assert link.reached_bytes_per_s == pytest.approx(65.4e9, rel=0.02)


@pytest.mark.parametrize("sizes", [(8, 2**26, 2**27, 2**28), (2**14, 2**15, 2**27, 2**28)])
def test_one_or_two_small_messages_give_a_latency(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    cluster = cluster_of(reading_of(tmp_path, log_text("all_reduce", 8, all_reduce(8, 8), sizes=sizes, devices=ONE)))
    assert cluster.pools[0].node_link.latency_s == pytest.approx(NODE.latency_s, rel=0.05)


def test_tables_of_unlike_machines_are_no_cluster(tmp_path: Path) -> None:
    for name, device in (("a.log", A100), ("h.log", "NVIDIA H100 80GB HBM3")):
        text = log_text("all_reduce", 8, all_reduce(8, 8), devices=device_lines(["n1"], 8, device))
        (tmp_path / name).write_text(text)
    words = r"h\.log:\d+: this table is of H100-SXM, another of A100-SXM-80 \(a\.log\): import each machine's"
    with pytest.raises(InputError, match=words):
        read_files([str(tmp_path / "a.log"), str(tmp_path / "h.log")])


def test_collectives_without_a_link_do_not_keep_other_files_from_being_read(tmp_path: Path) -> None:
    (tmp_path / "unlisted.log").write_text(log_text("all_reduce", 16, all_reduce(16, 8)))
    (tmp_path / "topo.txt").write_text("\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n")
    reading = read_files([str(tmp_path / "unlisted.log"), str(tmp_path / "topo.txt")])
    assert "so it gives no link" in " ".join(reading.warnings)
    assert [text for text in reading.warnings if "write cluster.device" in text] == [
        text for text in reading.warnings if text.startswith("the device is not known: 18 NVLinks")
    ]
    assert dict(reading.fragment["cluster"])["devices_per_node"] == 2  # type: ignore[call-overload]


def test_several_tables_in_a_file_are_told_apart(tmp_path: Path) -> None:
    group = Group(8, 8)
    gather = log_text("all_gather", 8, lambda size: gather_s(size, group, NODE, NETWORK), devices=ONE, named=True)
    reading = reading_of(tmp_path, log_text("all_reduce", 8, all_reduce(8, 8), devices=ONE, named=True) + gather)
    assert told(reading, "all_gather of 8 ranks") and told(reading, "all_reduce of 8 ranks")


def test_tags_inside_of_rows_and_lines_between_them_are_passed_over(tmp_path: Path) -> None:
    text = log_text("all_reduce", 8, all_reduce(8, 8), devices=ONE)
    rows = re.sub(r"(?m)^( +\d+ +\d+ +float +sum +-1)( .*)$", r"[0]\1[0]\2[0]\nn1:1:2 [0] NCCL INFO comm 0x1", text)
    link = cluster_of(reading_of(tmp_path, rows)).pools[0].node_link
    assert link.reached_bytes_per_s == pytest.approx(NODE.reached_bytes_per_s, rel=0.01)


SINGLE = device_lines(["n1"], 1, A100)
GOOD = log_text("all_reduce", 8, all_reduce(8, 8), devices=ONE)
NAMED = log_text("all_reduce", 8, all_reduce(8, 8), devices=ONE, named=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (log_text("all_reduce", 1, lambda s: 1e-5 + s / 1e12, devices=SINGLE), "one rank: busbw is 0 GB/s"),
        (log_text("all_reduce", 1, lambda s: 1e-5 + s / 1e12), "one rank: busbw is 0 GB/s"),
        (log_text("all_reduce", 1, lambda s: 1e-5 + s / 1e12, devices=SINGLE) * 3, "3 tables of one rank each"),
        (
            "\n".join(line.replace("Pid 900", f"Pid {pid}") for pid in (1, 2, 3) for line in SINGLE)
            + "\n"
            + GOOD[:0]
            + log_text("all_reduce", 1, lambda s: 1e-5 + s / 1e12),
            "3 processes are rank 0, each for itself: build nccl-tests with MPI=1",
        ),
        (log_text("all_reduce", 8, lambda s: s / 700e9, devices=ONE), "than the links of A100-SXM-80 have: 300 GB/s"),
        (log_text("all_gather", 8, lambda s: s / 5e12, sizes=[2**30]), "more than the fastest link of the catalogue"),
        (re.sub(r"(\d+\.\d\d)  (\d+\.\d\d)(    0\b)", r"\1  \1\3", NAMED), "busbw .* is not 1.75 x algbw"),
        (re.sub(r"\d+\.\d\d  (\d+\.\d\d)(    0\b)", r"999.99  \1\2", GOOD), "is not .* bytes in .* us"),
        (re.sub(r"\d+\.\d+", "XXX.XX", GOOD), "placeholders stand where numbers should"),
        ("".join(line + "\n" for line in GOOD.split("\n")[:12]), "the log has no row of a table"),
        ("srun: error: no\nall_reduce_perf -b 8\n", "the log has no row of a table; the run failed: srun: error"),
        (GOOD.replace("Rank  3 ", "Rank  2 "), "rank 2 stands twice, on device 2 in line 6 and on 3"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        reading_of(tmp_path, text)


@given(st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_a_damaged_log_is_refused_or_gives_the_same_link(seed: int) -> None:
    """A line, a word or a digit lost or changed: medians and checks leave the link where it was."""
    draw = random.Random(seed)
    lines = GOOD.split("\n")
    at = draw.randrange(len(lines))
    words = lines[at].split(" ")
    place = draw.randrange(len(words))
    words[place : place + 1] = draw.choice([[], [words[place]] * 2, ["7" + words[place]], ["nan"]])
    lines[at : at + 1] = draw.choice([[" ".join(words)], [], [lines[at]] * 2])
    from mmplan.cost_models.formats.nccl_fit import fit_one_level

    for run in read_runs(lines[: draw.choice([None, draw.randrange(15, len(lines))])], Path("log")):
        try:
            sweep = sweep_of(run, 100e9)
        except InputError:
            continue
        if sweep.nodes == 1 and len(sweep.points) > 13:
            assert (sweep.collective, sweep.ranks) == ("all_reduce", (8, 8))
            link = fit_one_level(sweep, NODE, network=False).node
            assert link is not None
            assert abs(math.log(link.reached_bytes_per_s / NODE.reached_bytes_per_s)) < 0.05
            assert abs(math.log(link.latency_s / NODE.latency_s)) < 0.1


EXPECTED = GIVEN / "nccl_tests_expected.json"
CASES = json.loads(EXPECTED.read_text()) if EXPECTED.is_file() else {}
REFUSED = ("25_", "29_", "30_", "31_", "35_", "51_")


@pytest.mark.parametrize("name", CASES)
def test_given_logs_are_read_as_expected(name: str) -> None:
    path, expected = GIVEN / "nccl_tests" / name, CASES[name]
    best = expected["max_busbw_out_of_place_or_verdict"]
    if isinstance(best, str):
        with pytest.raises(InputError):
            read_files([str(path)])
        return
    (run,) = (run for run in read_runs(list(read_lines(path)), path) if run.rows)
    sweep = sweep_of(run, 100e9)
    assert (sweep.collective, sweep.ranks) == (expected["collective"], (expected["ranks"],) * 2)
    if best is not None:
        rates = [row.blocks[0].busbw for row in run.rows]
        assert best in (max(rates), rates[-1])  # of the largest size, where that is not the best


@pytest.mark.skipif(not GIVEN.is_dir(), reason="the shared data is not here")
def test_every_given_log_is_read_or_refused_and_its_links_predict_it() -> None:
    for path in sorted((GIVEN / "nccl_tests").iterdir()):
        if path.name.startswith(REFUSED):
            continue
        reading = read_files([str(path)])
        assert reading.kind == "nccl"
        for sentence in reading.read:
            if match := re.search(r"predicted / measured ([\d.]+) to ([\d.]+) where", sentence):
                assert 0.8 < float(match[1]) <= float(match[2]) < 1.3, path.name


@pytest.mark.skipif(not GIVEN.is_dir(), reason="the shared data is not here")
def test_the_links_of_every_given_log_load_as_a_cluster() -> None:
    for path in sorted((GIVEN / "nccl_tests").iterdir()):
        if path.name.startswith(REFUSED) or "cluster" not in (reading := read_files([str(path)])).fragment:
            continue
        device = {} if "device" in reading.fragment["cluster"] else {"device": "h100-sxm"}  # type: ignore[operator]
        assert cluster_of(reading, nodes=2, **device).network_link.bytes_per_s > 0


def test_a_bridge_that_is_faster_than_the_usual_link_is_written_out(tmp_path: Path) -> None:
    """Two A40 with four NVLinks of 14 GB/s, whose catalogue link is PCIe."""
    text = log_text("all_reduce", 2, lambda size: 2e-5 + size / 48e9, devices=device_lines(["n1"], 2, "NVIDIA A40"))
    link = cluster_of(reading_of(tmp_path, text)).pools[0].node_link
    assert link.reached_bytes_per_s == pytest.approx(48e9, rel=0.02)
