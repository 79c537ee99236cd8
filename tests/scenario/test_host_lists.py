"""Lists of hosts: Slurm expressions expand as scontrol does, hostfiles keep their slots, and nonsense is refused."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.commands.import_kinds import read_files
from mmplan.errors import InputError
from mmplan.scenario.formats.host_list import expand_hosts
from mmplan.scenario.formats.reading import Reading

GIVEN = Path(__file__).parents[2].parent / "shared" / "data" / "files" / "slurm_hosts"


def reading_of(folder: Path, text: str, kind: str | None = None) -> Reading:
    file = folder / "hosts"
    file.write_text(text)
    return read_files([kind, str(file)] if kind else [str(file)])


@pytest.mark.parametrize(
    ("expression", "hosts"),
    [
        ("node[001-003,007]", "node001 node002 node003 node007"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[09-11]", "n09 n10 n11"),
        ("rack[1-2]n[01-02]", "rack1n01 rack1n02 rack2n01 rack2n02"),
        ("gpu[1-2]-ib,login1", "gpu1-ib gpu2-ib login1"),
        ("a[7,14,5-6]", "a7 a14 a5 a6"),
        ("p4-[1-2]-[3-4]", "p4-1-3 p4-1-4 p4-2-3 p4-2-4"),
        ("localhost", "localhost"),
    ],
)
def test_expressions_expand_in_their_own_order(expression: str, hosts: str) -> None:
    assert expand_hosts(expression) == hosts.split()


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("node[1-3", "opens a bracket that it does not close"),
        ("node1]", "closes a bracket that it does not open"),
        ("node[[1]]", "a bracket inside a bracket"),
        ("node[5-2]", "the range 5-2 of 'node\\[5-2\\]' runs backwards"),
        ("node[1-1000000000]", "names 1,000,000,000 hosts, a cluster has at most 100,000 nodes"),
        ("n[1-99999][1-99999][1-99999][1-99999]", "more than a billion billion hosts"),
        ("node[1-" + "9" * 5000 + "]", "expected numbers or ranges"),
        ("node[]", "found ''"),
        ("node[a-c]", "found 'a-c'"),
        ("node1,,node2", "a comma with no host beside it"),
        ("12", "'12' is no host"),
        ("é1", "is no host"),
    ],
)
def test_what_is_wrong_with_an_expression_is_said(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand_hosts(expression)


@given(st.integers(0, 9_999), st.integers(0, 60), st.integers(1, 6), st.sampled_from(["", "-ib", ".cluster"]))
@settings(max_examples=30, deadline=None)
def test_a_range_has_every_number_of_its_width(first: int, more: int, width: int, suffix: str) -> None:
    start, last = f"{first:0{width}d}", first + more
    hosts = expand_hosts(f"n[{start}-{last}]{suffix}")
    assert hosts == [f"n{number:0{len(start)}d}{suffix}" for number in range(first, last + 1)]


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("worker-1 slots=4\nworker-2 slots=4\n", {"nodes": 2, "devices_per_node": 4}),
        ("# mpirun\nnode01:8  # first\nnode02:8\n", {"nodes": 2, "devices_per_node": 8}),
        ("node01*8\n10.0.0.2 slots = 8 max_slots=16\n", {"nodes": 2, "devices_per_node": 8}),
        ("node01:8,node02:8\n", {"nodes": 2, "devices_per_node": 8}),
        ("node01 slots=8\nnode02 slots=4\n", {"pools": [{"nodes": 1, "devices_per_node": n} for n in (8, 4)]}),
        ("node01\nnode02\n", {"nodes": 2}),
        ("n1 8 all.q@n1 UNDEFINED\nn2 8 all.q@n2 UNDEFINED\n", {"nodes": 2, "devices_per_node": 8}),
        ("SLURM_JOB_NODELIST: n[1-3]\n", {"nodes": 3}),
        ("$ scontrol show hostnames 'n[1-2],m1'\n", {"nodes": 3}),
        (
            "SLURM_JOB_NODELIST=n[1-4]\nSLURM_NNODES=4\nSLURM_GPUS_ON_NODE=8\nHOME=/x\n",
            {"nodes": 4, "devices_per_node": 8},
        ),
        ("   JobId=7\n   NodeList=n[1-2]\n   TresPerNode=gres/gpu:h100:4\n", {"nodes": 2, "devices_per_node": 4}),
    ],
)
def test_hosts_become_nodes_and_slots_devices(tmp_path: Path, text: str, cluster: dict[str, object]) -> None:
    reading = reading_of(tmp_path, text)
    assert (reading.kind, reading.fragment) == ("hosts", {"cluster": cluster})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n1 slots=8\nn1 slots=4\n", ":2: 'n1' has 4 slots here and 8 in line 1"),
        ("n1 slots=0\n", ":1: expected 1 to 1024 slots, found '0'"),
        ("n1 slots=8 np=4\n", "gives 8 slots and 4 slots"),
        ("n1 slot=8\n", "expected 'slots=', found 'slot'"),
        ("SLURM_JOB_NODELIST=n[1-4]\nSLURM_NNODES=5\n", ":2: SLURM_NNODES: 5 nodes are said, the list names 4"),
        ("hello world\n", ":1: expected a host with slots"),
        ("# nothing\n", "expected host names, found none"),
        ("n1=8\n", "expected a host or a variable"),
        ("n1:1\nn2:2\nn3:3\nn4:4\n", "hosts of 4 sizes .* a cluster has at most 3 pools"),
        ("n[1-60000]\nm[1-60000]\n", "120,000 hosts; a cluster has at most 100,000 nodes"),
    ],
)
def test_a_wrong_list_is_refused_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        reading_of(tmp_path, text, "hosts")


def test_a_host_that_is_named_again_is_counted_once(tmp_path: Path) -> None:
    reading = reading_of(tmp_path, "n1\nn1\nn2\nn2\n")
    assert reading.fragment == {"cluster": {"nodes": 2}}
    assert "every host is named 2 times" in reading.warnings[0]


def test_slots_that_only_some_hosts_have_are_not_spread_over_all(tmp_path: Path) -> None:
    reading = reading_of(tmp_path, "n1 slots=8\nn2\n")
    assert reading.fragment == {"cluster": {"nodes": 2}}
    assert "1 of 2 hosts (n2) give no slots" in reading.warnings[0]


def test_slots_that_look_like_cores_are_told(tmp_path: Path) -> None:
    assert "if they are cores" in reading_of(tmp_path, "n1 slots=64\nn2 slots=64\n").warnings[0]


@given(st.lists(st.sampled_from(["n1", "[", "1-3", "]", ",", " ", "slots=", "8", ":", "\n", "#", "SLURM_NNODES="])))
@settings(max_examples=60, deadline=None)
def test_any_mixture_is_read_or_refused(pieces: list[str]) -> None:
    from mmplan.scenario.formats.host_lines import host_line

    for number, line in enumerate("".join(pieces).split("\n"), start=1):
        try:
            host_line(line, Path("hosts"), number)
        except InputError as error:
            assert error.line == number and "\n" not in error.message


@pytest.mark.skipif(not GIVEN.is_dir(), reason="the shared data is not here")
@pytest.mark.parametrize(("number", "nodes"), [("01", 1), ("02", 2), ("04", 31), ("05", 22)])
def test_given_lists_have_their_hosts(number: str, nodes: int) -> None:
    (file,) = GIVEN.glob(f"{number}_*")
    cluster = read_files([str(file)]).fragment["cluster"]
    assert isinstance(cluster, dict) and cluster["nodes"] == nodes
