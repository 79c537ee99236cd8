"""nvidia-smi topo -m: what the matrices of real machines give, and that a damaged one is never another matrix."""

import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bad_scenarios import GOOD
from topo_texts import LEGEND, cube_link, matrix_text

from mmplan.commands.import_kinds import read_files
from mmplan.errors import InputError
from mmplan.scenario.formats.reading import Reading, read_lines
from mmplan.scenario.formats.topo_links import gpu_pairs
from mmplan.scenario.formats.topo_matrix import find_matrices
from mmplan.scenario.load import load_scenario

GIVEN = Path(__file__).parents[2].parent / "shared" / "data" / "files"
DGX = matrix_text(8, lambda i, j: "NV12", [["PXB" if i // 2 == k else "SYS" for i in range(8)] for k in range(4)])
NAME = "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-1)\n"


def reading_of(folder: Path, text: str) -> Reading:
    file = folder / "topo.txt"
    file.write_text(text)
    return read_files([str(file)])


def cluster_of(reading: Reading) -> dict[str, object]:
    cluster = reading.fragment["cluster"]
    assert isinstance(cluster, dict)
    return cluster


def told(reading: Reading, words: str) -> bool:
    return any(re.search(words, sentence) for sentence in (*reading.read, *reading.ignored, *reading.warnings))


def test_nvlinks_through_switches_become_the_link_of_their_count(tmp_path: Path) -> None:
    reading = reading_of(tmp_path, DGX)
    assert cluster_of(reading) == {"devices_per_node": 8, "node_link": "nvlink3"}
    assert told(reading, "12 NVLinks of 25 GB/s through switches = 300 GB/s")
    assert told(reading, "write cluster.device") and told(reading, "A100-SXM-40, A100-SXM-80")
    assert told(reading, "4 ports .* for 8 GPUs: each has 4/8 of a port; write cluster.network")


def test_a_device_that_the_text_names_is_taken_with_its_share_of_the_ports(tmp_path: Path) -> None:
    cluster = cluster_of(reading_of(tmp_path, NAME + DGX))
    assert (cluster["device"], cluster["node_link"]) == ("a100-sxm-80", "nvlink3")
    assert cluster["network"] == {
        "link": "hdr-200",
        "bandwidth": "12.5 GB/s",
        "source": "4 ports of hdr-200 for 8 GPUs",
    }


def test_a_device_outside_the_catalogue_has_its_own_nvlinks(tmp_path: Path) -> None:
    text = "GPU 0: NVIDIA B300 SXM6 AC\n" + matrix_text(8, lambda i, j: "NV18")
    reading = reading_of(tmp_path, text)
    assert cluster_of(reading) == {"devices_per_node": 8, "node_link": "nvlink5"}
    assert told(reading, "the catalogue has no B300: write cluster.device")


def test_a_node_of_a_rack_of_nvlinks_is_told(tmp_path: Path) -> None:
    reading = reading_of(tmp_path, "GPU 0: NVIDIA GB200 (UUID: GPU-1)\n" + matrix_text(4, lambda i, j: "NV18"))
    assert (cluster_of(reading)["device"], cluster_of(reading)["node_link"]) == ("gb200", "nvlink5")
    assert told(reading, "write a rack as one node of 72 devices")


def test_several_devices_in_a_text_are_named_and_none_is_taken(tmp_path: Path) -> None:
    reading = reading_of(tmp_path, NAME + "GPU 1: NVIDIA H200 (UUID)\n" + DGX)
    assert "device" not in cluster_of(reading)
    assert told(reading, "several devices \\(A100-SXM-80, H200\\)")


def test_a_hybrid_mesh_is_priced_by_its_rings_and_its_thinnest_pair(tmp_path: Path) -> None:
    """Six links a GPU, all of them used by rings through all eight; pairs such as 0-1 have one of these."""
    link = cluster_of(reading_of(tmp_path, matrix_text(8, cube_link)))["node_link"]
    assert isinstance(link, dict)
    assert (link["bandwidth"], link["direct_peers"], link["nvls"]) == ("150 GB/s", 6, False)


def test_direct_links_between_four_give_a_third_to_each(tmp_path: Path) -> None:
    link = cluster_of(reading_of(tmp_path, NAME + matrix_text(4, lambda i, j: "NV4")))["node_link"]
    assert isinstance(link, dict)
    assert (link["bandwidth"], link["direct_peers"]) == ("300 GB/s", 3)


def test_bridges_between_pairs_are_priced_over_pcie_with_another_way_to_write_them(tmp_path: Path) -> None:
    text = matrix_text(8, lambda i, j: "NV4" if i // 2 == j // 2 else "SYS" if i // 4 != j // 4 else "NODE")
    reading = reading_of(tmp_path, "NVIDIA A40\n" + text)
    link = cluster_of(reading)["node_link"]
    assert isinstance(link, dict) and (link["link"], link["bandwidth"]) == ("pcie4", "10 GB/s")
    assert told(reading, "only 4 groups of GPUs \\(0-1, 2-3, 4-5, 6-7\\).*nodes: 4, devices_per_node: 2")


@pytest.mark.parametrize(("path", "link"), [("PIX", "pcie3"), ("PHB", "pcie3"), ("NODE", "pcie3")])
def test_without_nvlinks_the_slowest_pcie_is_taken_where_no_device_is_named(
    tmp_path: Path, path: str, link: str
) -> None:
    reading = reading_of(tmp_path, matrix_text(2, lambda i, j: path))
    assert cluster_of(reading)["node_link"] == link
    assert told(reading, "slowest generation of PCIe")


def test_a_hidden_fabric_is_suspected(tmp_path: Path) -> None:
    nics = [["PHB" if i == k else "SYS" for i in range(8)] for k in range(8)]
    text = matrix_text(8, lambda i, j: "SYS", nics)
    assert told(reading_of(tmp_path, text), "a virtual machine may hide their NVLinks")
    assert told(reading_of(tmp_path, "NVIDIA H200\n" + text), "H200 has 18 NVLinks and the matrix shows none")


def test_unlike_counts_and_a_matrix_that_is_not_symmetric_are_told(tmp_path: Path) -> None:
    reading = reading_of(tmp_path, DGX.replace("NV12", "NV11", 1))
    assert told(reading, "GPU0 and GPU1 are joined by NV11 and by NV12 \\(lines 2 and 3\\); the slower one")
    assert told(reading, "unlike numbers of NVLinks \\(11 to 12\\)")
    link = cluster_of(reading)["node_link"]
    assert isinstance(link, dict) and link["bandwidth"] == "275 GB/s"


def test_nics_on_the_far_socket_and_virtual_functions_are_told(tmp_path: Path) -> None:
    far = matrix_text(2, lambda i, j: "SYS", [["PIX", "SYS"]])
    assert told(reading_of(tmp_path, far), "GPU1: every NIC is across sockets")
    alone = matrix_text(2, lambda i, j: "SYS", [["SYS", "SYS"]])
    assert told(reading_of(tmp_path, alone), "1 port .* for 2 GPUs: each has 1/2 of a port")
    functions = matrix_text(2, lambda i, j: "NODE", [["PIX", "NODE"], *([["NODE", "PIX"]] * 6)], nic_link="PIX")
    assert told(reading_of(tmp_path, functions), "6 NICs from NIC1 to NIC6 are alike: functions of one card")


def test_equal_hosts_are_counted_and_unlike_ones_become_pools(tmp_path: Path) -> None:
    two = f"$ ssh n1 nvidia-smi topo -m\n{DGX}\n$ ssh n2 nvidia-smi topo -m\n{DGX}"
    assert cluster_of(reading_of(tmp_path, two))["nodes"] == 2
    unlike = reading_of(tmp_path, DGX + matrix_text(4, lambda i, j: "NODE"))
    pools = cluster_of(unlike)["pools"]
    assert isinstance(pools, list) and [pool["devices_per_node"] for pool in pools] == [8, 4]


def test_each_file_has_its_own_device(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    files[0].write_text(NAME + DGX)
    files[1].write_text("NVIDIA H200\n" + DGX.replace("NV12", "NV18"))
    pools = cluster_of(read_files([str(file) for file in files]))["pools"]
    assert isinstance(pools, list) and [pool["device"] for pool in pools] == ["a100-sxm-80", "h200"]


def test_hosts_that_tag_their_lines_are_told_apart(tmp_path: Path) -> None:
    mixed = "".join(f"{host}: {line}\n" for line in DGX.split("\n") for host in ("n1", "n2"))
    assert cluster_of(reading_of(tmp_path, mixed))["nodes"] == 2


@pytest.mark.parametrize(
    "text",
    [
        re.sub(r"[ \t]+", " ", DGX).lstrip(),
        "".join(f"    {line}\n" for line in DGX.expandtabs(8).split("\n")),
        f"loss 1.0\n\x1b[4m{DGX.replace(chr(10), chr(27) + '[0m' + chr(10), 1)}step 2\n",
        "".join(f"[1,0]<stdout>:{line}\n" for line in DGX.split("\n")),
        "".join(f"2026-01-01T00:00:00Z {line}\n" for line in DGX.split("\n")),
        re.sub(r"(?m)^(.{40}\t)(.+)$", r"\1\n\2", DGX),
    ],
)
def test_the_same_matrix_is_read_however_it_was_copied(tmp_path: Path, text: str) -> None:
    assert cluster_of(reading_of(tmp_path, text)) == {"devices_per_node": 8, "node_link": "nvlink3"}


@pytest.mark.parametrize("width", [38, 52, 70])
def test_a_terminal_may_have_broken_lines_inside_of_words(tmp_path: Path, width: int) -> None:
    text = matrix_text(8, lambda i, j: "NV18", between="    ", legend="")
    lines = [line[start : start + width] for line in text.split("\n") for start in range(0, len(line), width)]
    assert cluster_of(reading_of(tmp_path, "\n".join(lines)))["node_link"] == "nvlink4"


def test_a_truncated_matrix_is_read_as_far_as_its_rows_go(tmp_path: Path) -> None:
    cut = DGX.split("\nGPU6\t")[0] + "\nGPU6\tNV12\tNV"
    reading = reading_of(tmp_path, cut)
    assert cluster_of(reading) == {"devices_per_node": 8, "node_link": "nvlink3"}
    assert told(reading, "the row of GPU6 in line 8 is cut off") and told(reading, "1 pair of GPUs in no whole row")
    mesh = matrix_text(8, cube_link).split("\nGPU6\t")[0]
    assert cluster_of(reading_of(tmp_path, mesh)) == {"devices_per_node": 8}
    assert told(reading_of(tmp_path, mesh), "1 of 28 pairs of GPUs are in no whole row: node_link is left out")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LEGEND, ":5: the legend of a matrix without the matrix"),
        ("GPU0GPU1CPU Affinity\nGPU0XSYS\n", ":1: the columns have run together"),
        ("\tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\tX\n", ":2: .*topo -p2p"),
        (DGX.replace("\tNV12", "", 1), ":2: the row of GPU0 has"),
        (DGX.replace("\tGPU3", "", 1), ":1: the columns .* GPU3 is missing"),
        (DGX.replace("\tGPU7", "", 1), ":2: the row of GPU0 has"),
        (DGX.replace("\nGPU5\t", "\nGPU4\t"), ":7: the row of GPU4 stands twice"),
        (DGX.replace("NV12", "NV99", 1), ":2: NV99 between GPU0 and GPU1: a device has 1 to 18"),
        ("\tGPU0\tGPU1\tCPU Affinity\n", ":1: a matrix without a whole row"),
        ("GPU0 GPU1 GPU0\n", "stands twice"),
        ("\tNPU0\tNPU1\nGPU0 GPU1 x\n", "found 'x'"),
    ],
)
def test_what_is_no_matrix_or_a_damaged_one_is_refused_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        reading_of(tmp_path, text)


def test_a_matrix_of_some_gpus_is_read_and_told(tmp_path: Path) -> None:
    """`nvidia-smi topo -m -i 4,5,6,7` and a container see a part of the node."""
    part = matrix_text(4, lambda i, j: "NV18")
    for index in range(3, -1, -1):
        part = part.replace(f"GPU{index}", f"GPU{index + 4}")
    reading = reading_of(tmp_path, part)
    assert cluster_of(reading)["devices_per_node"] == 4
    assert told(reading, "the matrix begins at GPU4: the 4 GPUs that it shows")
    with pytest.raises(InputError, match="do not count from GPU4: GPU6 is missing"):
        reading_of(tmp_path, part.replace("GPU6", "GPU8"))


P2P = "\n".join(["\tGPU0\tGPU1", "GPU0\tX\tOK", "GPU1\tOK\tX", "", "Legend:", "  OK   = Status Ok", ""])


@pytest.mark.parametrize("text", [NAME + DGX + P2P, P2P + NAME + DGX])
def test_a_peer_to_peer_matrix_beside_the_links_is_passed_over(tmp_path: Path, text: str) -> None:
    assert reading_of(tmp_path, text).fragment == reading_of(tmp_path, NAME + DGX).fragment


def test_mig_instances_are_told_or_refused(tmp_path: Path) -> None:
    listed = "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-1)\n  MIG 3g.40gb     Device  0: (UUID: MIG-2)\n"
    assert told(reading_of(tmp_path, listed + DGX), r"cut into MIG instances \(1 are listed\)")
    with pytest.raises(InputError, match="a matrix of MIG instances, which no link joins"):
        reading_of(tmp_path, "\tMIG 0/0\tMIG 0/1\tCPU Affinity\nMIG 0/0\t X \tPIX\nMIG 0/1\tPIX\t X \n")


def damaged(text: str, draw: random.Random) -> str:
    """A line, a word or the end lost, or a word doubled."""
    lines = text.split("\n")
    at = draw.randrange(len(lines))
    words = lines[at].split("\t")
    change = draw.randrange(4)
    if change == 0:
        del lines[at]
    elif change == 1:
        del words[draw.randrange(len(words))]
        lines[at] = "\t".join(words)
    elif change == 2:
        place = draw.randrange(len(words))
        words[place:place] = [words[place]]
        lines[at] = "\t".join(words)
    else:
        return text[: draw.randrange(len(text))]
    return "\n".join(lines)


@given(st.integers(0, 10**9), st.booleans())
@settings(max_examples=120, deadline=None)
def test_a_damaged_matrix_is_refused_or_says_of_every_pair_what_the_whole_one_says(seed: int, mesh: bool) -> None:
    nics = [["PIX" if i == k else "SYS" for i in range(8)] for k in range(3)]
    text = matrix_text(8, cube_link if mesh else lambda i, j: "NV12", nics)
    (whole,) = find_matrices(text.split("\n"), Path("whole"))
    try:
        found = find_matrices(damaged(text, random.Random(seed)).split("\n"), Path("damaged"))
    except InputError:
        return
    for matrix in found:
        assert matrix.gpus == whole.gpus[: len(matrix.gpus)]
        pairs, unknown, differences = gpu_pairs(matrix)
        assert not differences
        assert pairs.items() <= gpu_pairs(whole)[0].items()
        assert len(pairs) + len(unknown) == len(matrix.gpus) * (len(matrix.gpus) - 1) // 2
        assert (set(matrix.gpus) | set(matrix.nics) == set(matrix.cells)) == (matrix.cut == "")


def test_the_fragment_loads_as_a_part_of_a_scenario(tmp_path: Path) -> None:
    for text in (NAME + DGX, "Tesla V100-SXM2-32GB\n" + matrix_text(8, cube_link)):
        path = tmp_path / "scenario.yaml"
        reading = reading_of(tmp_path, text)
        cluster = json.dumps(reading.fragment["cluster"])
        good = GOOD.replace("{device: h100-sxm, nodes: 2, devices_per_node: 4}", cluster)
        path.write_text(good.replace("precision: bf16", "precision: fp16"))
        assert load_scenario(path).cluster.pools[0].devices_per_node == 8


EXPECTED = GIVEN / "nvidia_topo_expected.json"
CASES = json.loads(EXPECTED.read_text()) if EXPECTED.is_file() else {}


@pytest.mark.parametrize("name", CASES)
def test_given_matrices_are_read_as_expected(name: str) -> None:
    path, expected = GIVEN / "nvidia_topo" / name, CASES[name]
    if "reject" in expected:
        with pytest.raises(InputError):
            read_files([str(path)])
        return
    matrices = find_matrices(list(read_lines(path)), path)
    first = matrices[0]
    assert (len(first.gpus), len(first.nics)) == (expected["gpus"], expected["nics"])
    for key, link in expected.items():
        if key.startswith("link"):
            assert first.link(f"GPU{key[4]}", f"GPU{key[5]}") == link
    assert (first.cut == "") == (expected["complete"] is True or "first host yes" in str(expected["complete"]))
    assert len(matrices) == expected.get("hosts", 1)
    assert [int(node) for node in first.numa.values()] == expected.get("numa", [int(n) for n in first.numa.values()])
    assert cluster_of(read_files([str(path)]))["devices_per_node"] == expected["gpus"]
