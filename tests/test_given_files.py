"""Every given file gives the reading that its manifest and its hand-made reading say, or a right refusal."""

import ast
import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mmplan.commands.import_kinds import KINDS, read_files
from mmplan.errors import InputError
from mmplan.scenario.formats.launch.deepspeed import read_deepspeed
from mmplan.scenario.formats.nvidia_topo import read_nvidia_topo
from mmplan.scenario.formats.reading import Reading, read_lines
from mmplan.scenario.formats.topo_matrix import find_matrices

GIVEN = Path(__file__).parents[1].parent / "shared" / "data" / "files"
MANIFEST = GIVEN / "manifest.csv"
ROWS = list(csv.DictReader(MANIFEST.open(newline=""))) if MANIFEST.is_file() else []
OF_FOLDER = {
    "nccl_tests": ("nccl",),
    "nvidia_topo": ("nvidia-topo",),
    "rocm_topo": ("rocm-topo",),
    "hf_config": ("hf",),
    "kineto": ("kineto", "nccl-profiler"),
    "megatron_log": ("megatron-log",),
    "deepspeed": ("deepspeed",),
    "torchtitan": ("torchtitan",),
    "slurm_hosts": ("hosts",),
    "chakra": ("chakra",),
    "nsys": ("nsys",),
    "launch_megatron": ("megatron", "ms-swift"),
    "frameworks": ("nemo", "llama-factory", "veomni", "automodel"),
}
# What is refused, and the words that say why.
REFUSED = {
    "frameworks/14": "trains encoders for retrieval",
    "frameworks/15": "a draft model for speculative decoding",
    "frameworks/16": "a draft model for speculative decoding",
    "frameworks/17": "a draft model for speculative decoding",
    "launch_megatron/08": "state-space models",
    "launch_megatron/18": r"\$\{CP\}.*no line sets these values",
    "launch_megatron/19": r"\$\{PP\}.*no line sets these values",
    "launch_megatron/20": r"\$\{PP\}.*no line sets these values",
    "launch_megatron/22": "preprocesses data",
    "launch_megatron/23": r"global-batch-size \$bs': no line sets",
    "launch_megatron/24": "text generation",
    "launch_megatron/25": r"\$\{MIMO_LANGUAGE_TP\}.*no line sets these values",
    "launch_megatron/28": "no degrees, batch or sizes",
    "nccl_tests/25": "placeholders stand where numbers should",
    "nccl_tests/29": "busbw / algbw is .* and 0.9972 here: no number of ranks",
    "nccl_tests/30": "no row of a table; the run failed: .*More processors requested",
    "nccl_tests/31": "no row of a table; the run failed: .*no CUDA-capable device",
    "nccl_tests/35": "one rank: .*nothing is sent",
    "nccl_tests/51": "one rank: .*nothing is sent",
    "nsys/04": "SQL statements are not run",
    "nsys/05": "SQL statements are not run",
    "nvidia_topo/06": "topo -p2p",
    "nvidia_topo/30": "columns have run together",
}
# Of these the tests of models say which are read, and by what words the others are refused.
OPEN = ("hf_config/11", "hf_config/14", "hf_config/15", "hf_config/35")


def name_of(row: dict[str, str]) -> str:
    return re.match(r"\w+/\d+", row["file"])[0]  # type: ignore[index]


def read(row: dict[str, str]) -> Reading:
    return read_files([str(GIVEN / row["file"])])


def told(reading: Reading) -> str:
    return "\n".join((*reading.read, *reading.ignored, *reading.warnings))


def rows_of(kind: str) -> list[Any]:
    return [pytest.param(row, id=row["file"]) for row in ROWS if row["kind"] == kind and name_of(row) not in REFUSED]


@pytest.mark.skipif(not ROWS, reason="the shared data is not here")
def test_the_manifest_has_every_file() -> None:
    found = {str(path.relative_to(GIVEN)) for path in GIVEN.glob("*/*")}
    assert found == {row["file"] for row in ROWS}
    assert set(REFUSED) <= {name_of(row) for row in ROWS}
    assert set(OF_FOLDER) == {row["kind"] for row in ROWS}
    assert {kind for kinds in OF_FOLDER.values() for kind in kinds} <= KINDS.keys()


@pytest.mark.parametrize("row", ROWS, ids=[row["file"] for row in ROWS])
def test_a_given_file_is_read_as_its_kind_or_refused_with_the_right_words(row: dict[str, str]) -> None:
    words = REFUSED.get(name_of(row))
    try:
        reading = read(row)
    except InputError as error:
        assert name_of(row) in OPEN or (words is not None and re.search(words, str(error))), str(error)
        return
    assert words is None or name_of(row) in OPEN, f"expected a refusal: {words}"
    assert reading.kind in OF_FOLDER[row["kind"]]
    assert reading.fragment


@pytest.mark.parametrize("row", rows_of("deepspeed"))
def test_a_deepspeed_file_has_the_stage_the_offload_and_the_open_keys_of_the_manifest(row: dict[str, str]) -> None:
    setup = read_deepspeed(GIVEN / row["file"])
    stage, auto, offload = re.match(r"stage=(\w+) auto_keys=(\[.*?\]) offload=(\[.*?\])", row["special"]).groups()  # type: ignore[union-attr]
    if stage != "None":
        assert setup.text("sharding") == ("none", "optimizer", "gradients", "parameters")[int(stage)]
    zero = json.loads((GIVEN / row["file"]).read_text())["zero_optimization"] if stage != "None" else {}
    kept = [key for key in ast.literal_eval(offload) if zero[key].get("device") != "none"]
    expected = "parameters" if "offload_param" in kept else "optimizer" if kept else None
    assert setup.text("offload") == expected
    told_open = " ".join(setup.ignored)
    known = {"train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"}
    assert all(key in told_open for key in ast.literal_eval(auto) if key in known)


@pytest.mark.parametrize("row", rows_of("kineto"))
def test_a_trace_has_the_rank_the_world_and_the_kernels_of_the_manifest(row: dict[str, str]) -> None:
    reading = read(row)
    (rank,) = reading.fragment["ranks"]  # type: ignore[misc]
    for key in ("rank", "world_size"):
        if found := re.search(rf"'{key}': (\d+)", row["special"]):
            assert rank[key] == int(found[1])
    if "cats=" in row["special"] and "'kernel'" not in row["special"]:
        assert rank["kernels"] == rank["devices"] == []
    elif "'kernel'" in row["special"] and "excerpt" not in row["file"]:
        assert sum(kernel["count"] for kernel in rank["kernels"]) > 0
    if "excerpt" not in row["file"] and (nccl := re.search(r"ncclKernels=(\d+)", row["special"])):
        assert sum(message["count"] for message in rank["messages"]) >= int(nccl[1])


NCCL = json.loads((GIVEN / "nccl_tests_expected.json").read_text()) if ROWS else {}


@pytest.mark.parametrize("name", NCCL)
def test_a_log_of_collectives_says_what_its_hand_made_reading_says(name: str) -> None:
    """Of the verdicts the reason too; of the others the collective, its ranks, and the rate of the largest messages."""
    expected = NCCL[name]
    verdict = expected["max_busbw_out_of_place_or_verdict"]
    path = str(GIVEN / "nccl_tests" / name)
    if isinstance(verdict, str):
        words = {
            "reject: placeholders": "placeholders",
            "flag: busbw/algbw<1": r"busbw / algbw is .*0\.99",
            "no table": "no row of a table",
            "header only": "no row of a table",
            "reject: 1 rank": "one rank",
        }[verdict]
        with pytest.raises(InputError, match=words):
            read_files([path])
        return
    reading = read_files([path])
    assert f"{expected['collective']} of {expected['ranks']} ranks" in reading.read[0]
    if reading.document.startswith("a record"):
        (row,) = reading.fragment["collectives"]  # type: ignore[misc]
        assert (row["collective"], row["ranks"]) == (expected["collective"], expected["ranks"])
    if verdict is None or (beta := re.search(r"beta ([\d.]+) GB/s", reading.read[0])) is None:
        return
    factor = {"all_reduce": 2, "broadcast": None, "reduce": None}.get(expected["collective"], 1)
    ranks = expected["ranks"]
    busbw = float(beta[1]) * (1 if factor is None else factor * (ranks - 1) / ranks)
    assert busbw == pytest.approx(verdict, rel=0.12)  # the median over the largest sixteenfold range


TOPOLOGIES = json.loads((GIVEN / "nvidia_topo_expected.json").read_text()) if ROWS else {}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_topology_has_the_rows_the_maker_and_the_reason_of_its_hand_made_reading(name: str) -> None:
    path, expected = GIVEN / "nvidia_topo" / name, TOPOLOGIES[name]
    if "reject" in expected:
        words = {"p2p status matrix, not topo -m": "topo -p2p", "separators lost": "run together"}[expected["reject"]]
        with pytest.raises(InputError, match=words):
            read_nvidia_topo([path])
        return
    matrix = find_matrices(list(read_lines(path)), path)[0]
    rows = [gpu for gpu in matrix.gpus if gpu in matrix.cells]
    complete = expected["complete"]
    if complete is True:
        assert set(matrix.cells) == {*matrix.gpus, *matrix.nics} and matrix.cut == ""
    elif found := re.search(r"GPU rows 0-(\d+)", complete):
        whole = int(found[1]) + 1
        assert rows in ([f"GPU{i}" for i in range(whole)], [f"GPU{i}" for i in range(whole - 1)])  # its last may be cut
        assert matrix.cut
    elif complete == "NIC rows cut":
        assert rows == list(matrix.gpus) and matrix.cut
    elif complete == "GPU7 row cut":
        assert "GPU7" not in rows and matrix.cut
    reading = read_nvidia_topo([path])
    if expected.get("vendor") == "MetaX":
        assert "MetaX" in told(reading) or "metax" in str(reading.fragment).lower()
    if "ANSI" in expected.get("note", ""):
        pair = [matrix.link(f"GPU{gpu}", f"NIC{nic}") for gpu in (0, 1) for nic in (0, 1)]
        assert pair == ["PIX"] * 4 or pair.count("PIX") == 2
    assert reading.fragment["cluster"]["devices_per_node"] == expected["gpus"]  # type: ignore[index]
    assert len(find_matrices(list(read_lines(path)), path)) == expected.get("hosts", 1)
