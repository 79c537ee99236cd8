"""rocm-smi and amd-smi topologies: fabric and PCIe of real machines, and damaged matrices."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_nvidia_topo import cluster_of, reading_of, told

from mmplan.commands.import_kinds import read_files
from mmplan.errors import InputError
from mmplan.scenario.formats.rocm_matrix import read_rocm

GIVEN = Path(__file__).parents[2].parent / "shared" / "data" / "files" / "rocm_topo"


def rocm_text(gpus: int, kind: Callable[[int, int], str], hops: Callable[[int, int], int] = lambda i, j: 1) -> str:
    """What rocm-smi --showtopo prints: weights, hops, types and NUMA nodes."""

    def matrix(title: str, cell: Callable[[int, int], object]) -> str:
        head = "       " + "".join(f"{f'GPU{i}':13}" for i in range(gpus))
        rows = [
            f"{f'GPU{i}':7}" + "".join(f"{0 if i == j else cell(i, j)!s:13}" for j in range(gpus)) for i in range(gpus)
        ]
        return "\n".join([f"==== {title} ====", head, *rows, "", ""])

    text = matrix("Weight between two GPUs", lambda i, j: 15) + matrix("Hops between two GPUs", hops)
    text += matrix("Link Type between two GPUs", kind) + "==== Numa Nodes ====\n"
    for i in range(gpus):
        text += f"GPU[{i}]\t\t: (Topology) Numa Node: {i * 2 // gpus}\n"
        text += f"GPU[{i}]\t\t: (Topology) Numa Affinity: {i * 2 // gpus}\n"
    return text + "==== End of ROCm SMI Log ====\n"


MESH = rocm_text(8, lambda i, j: "XGMI")


def test_a_mesh_of_fabric_links_gives_a_group_its_share(tmp_path: Path) -> None:
    reading = reading_of(tmp_path, "Card series: AMD Instinct MI300X\n" + MESH)
    link = cluster_of(reading)["node_link"]
    assert isinstance(link, dict)
    assert (cluster_of(reading)["device"], link["link"], link["direct_peers"]) == ("mi300x", "infinity-fabric3", 7)
    assert "bandwidth" not in link and told(reading, "4\\+4 on NUMA nodes 0, 1")


def test_pcie_across_sockets_is_priced_as_such(tmp_path: Path) -> None:
    reading = reading_of(tmp_path, rocm_text(4, lambda i, j: "PCIE", lambda i, j: 3))
    link = cluster_of(reading)["node_link"]
    assert isinstance(link, dict) and (link["link"], link["bandwidth"]) == ("pcie3", "10 GB/s")
    assert told(reading, "the driver does not see it")


def test_fabric_inside_groups_only_is_priced_over_pcie(tmp_path: Path) -> None:
    text = rocm_text(8, lambda i, j: "XGMI" if i // 4 == j // 4 else "PCIE", lambda i, j: 1 if i // 4 == j // 4 else 2)
    reading = reading_of(tmp_path, text)
    assert cluster_of(reading)["node_link"] == "pcie3"
    assert told(reading, "joins only 2 groups of GPUs \\(0-1-2-3, 4-5-6-7\\)")


def test_dies_of_mi250x_are_two_to_a_device(tmp_path: Path) -> None:
    reading = reading_of(tmp_path, "AMD Instinct MI250X\n" + MESH)
    assert cluster_of(reading) == {"device": "mi250x", "devices_per_node": 4}


def test_amd_smi_prints_the_same_by_addresses(tmp_path: Path) -> None:
    labels = ["0000:0c:00.0", "0000:22:00.0"]
    table = f"{'':13}{labels[0]} {labels[1]}\n{labels[0]} SELF XGMI\n{labels[1]} XGMI SELF\n"
    access = (
        f"ACCESS TABLE:\n{'':13}{labels[0]} {labels[1]}\n{labels[0]} ENABLED ENABLED\n{labels[1]} ENABLED ENABLED\n\n"
    )
    reading = reading_of(tmp_path, f"{access}LINK TYPE TABLE:\n{table}")
    link = cluster_of(reading)["node_link"]
    assert isinstance(link, dict) and (link["bandwidth"], link["direct_peers"]) == ("46 GB/s", 1)


def test_hosts_of_one_kind_are_counted(tmp_path: Path) -> None:
    assert cluster_of(reading_of(tmp_path, MESH + MESH))["nodes"] == 2
    tagged = "".join(f"{host}: {line}\n" for line in MESH.split("\n") for host in "01")
    assert cluster_of(reading_of(tmp_path, tagged))["nodes"] == 2
    with pytest.raises(InputError, match="another topology than that in line"):
        reading_of(tmp_path, MESH + rocm_text(8, lambda i, j: "PCIE"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (re.sub(r"(?m)^(GPU0 .*)XGMI", r"\1", MESH), ":25: the row of GPU0 has 7 cells for 8 columns"),
        (re.sub(r"(?m)^GPU3  .*\n", "", MESH), "expected the row of GPU3, found a row of 'GPU4'"),
        (MESH.replace("XGMI", "PCIE", 1), "GPU1 and GPU0 are joined by PCIE and by XGMI"),
        (MESH.replace("XGMI", "NVLK", 1), "expected XGMI or PCIE in the row of GPU0, found 'NVLK'"),
        (re.sub(r"GPU\[3\].*\n", "", MESH), "GPU\\[3\\] is missing"),
        ("==== Link Type between two GPUs ====\nGPU0GPU1\n", "run together"),
        ("==== Weight between two GPUs ====\nnothing\n", "found no matrix between two GPUs"),
    ],
)
def test_a_damaged_matrix_is_refused_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        reading_of(tmp_path, text)


@given(st.integers(0, 10**9))
@settings(max_examples=80, deadline=None)
def test_a_damaged_matrix_never_gives_another_link(seed: int) -> None:
    draw = random.Random(seed)
    lines = rocm_text(4, lambda i, j: "XGMI" if i // 2 == j // 2 else "PCIE").split("\n")
    whole = read_rocm(lines, Path("whole"))[0]
    at = draw.randrange(len(lines))
    words = lines[at].split() or [""]
    del words[draw.randrange(len(words))]
    damaged = [*lines[:at], *draw.choice([[], [" ".join(words)], [lines[at]] * 2]), *lines[at + 1 :]]
    try:
        found = read_rocm(damaged[: draw.choice([None, draw.randrange(len(lines))])], Path("damaged"))
    except InputError:
        return
    for topology in found:
        assert topology.types.items() <= whole.types.items()
        assert topology.types == whole.types or topology.cut or not topology.types
        assert topology.gpus == whole.gpus or not topology.types


@pytest.mark.skipif(not GIVEN.is_dir(), reason="the shared data is not here")
@pytest.mark.parametrize(
    ("number", "devices", "link"),
    [("01", 8, "infinity-fabric3"), ("02", 12, None), ("03", 12, None), ("04", 4, "pcie3"), ("08", 2, "pcie3")],
)
def test_given_topologies_are_read(number: str, devices: int, link: str | None) -> None:
    (file,) = GIVEN.glob(f"{number}_*")
    cluster = cluster_of(read_files([str(file)]))
    found = cluster.get("node_link")
    assert cluster["devices_per_node"] == devices
    assert (found["link"] if isinstance(found, dict) else found) == link


def amd_smi(gpus: int, kind: Callable[[int, int], str]) -> list[dict[str, object]]:
    """What `amd-smi topology --json` prints."""

    def link(i: int, j: int) -> dict[str, object]:
        values = {"gpu": j, "bdf": f"0000:{j:02x}:00.0", "weight": 0 if i == j else 15, "link_status": "ENABLED"}
        return values | {"link_type": "SELF" if i == j else kind(i, j), "num_hops": int(i != j), "bandwidth": "N/A"}

    return [{"gpu": i, "bdf": f"0000:{i:02x}:00.0", "links": [link(i, j) for j in range(gpus)]} for i in range(gpus)]


def test_the_json_of_amd_smi_says_what_its_text_says(tmp_path: Path) -> None:
    def kind(i: int, j: int) -> str:
        return "XGMI" if i // 4 == j // 4 else "PCIE"

    for kinds in (kind, lambda i, j: "XGMI"):
        text = reading_of(tmp_path, rocm_text(8, kinds, lambda i, j: 1)).fragment
        for indent in (None, 4):
            assert reading_of(tmp_path, json.dumps(amd_smi(8, kinds), indent=indent)).fragment == text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda gpus: gpus[2]["links"].pop(), "the links of '0000:02:00.0' are 3 of 4"),
        (lambda gpus: gpus.pop(), "'0000:03:00.0' is no GPU of the list"),
        (lambda gpus: gpus[1]["links"][0].update(link_type="PCIE"), "joined by XGMI and by PCIE"),
        (lambda gpus: gpus[1].update(bdf="0000:00:00.0"), "the same bdf stands twice"),
        (lambda gpus: gpus[1].pop("links"), "expected a mapping with 'links'"),
    ],
)
def test_damaged_json_of_amd_smi_is_refused(
    tmp_path: Path, damage: Callable[[list[Any]], object], message: str
) -> None:
    gpus = amd_smi(4, lambda i, j: "XGMI")
    damage(gpus)
    with pytest.raises(InputError, match=message):
        reading_of(tmp_path, json.dumps(gpus))
