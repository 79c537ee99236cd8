"""Names of GPUs and sources as people write them, and the device and software stack they stand for."""

import pytest

from mmplan.planner.measured import MeasuredRow
from mmplan.planner.row_stack import row_device, row_network, row_stack, row_technique

NAMES = {
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "H100 PCIe": "h100-pcie",
    "GH200": "gh200",
    "A100-SXM4-40GB": "a100-sxm-40",
    "A100 (80GB per paper)": "a100-sxm-80",
    "A100 PCIe 80GB": "a100-pcie-80",
    "V100-SXM2-16GB": "v100-sxm2-16",
    "GB200 NVL72": "gb200",
    "B200": "b200",
    "H20": "h20",
    "MI300X": "mi300x",
    "A10G": "a10",
}
SOURCES = {
    "NeMo 25.04 performance summary": "nemo-2025",
    "NVIDIA NeMo performance summary 24.07 final": "nemo-2024",
    "NVIDIA DGX Cloud Benchmarking recipes v24.11.1": "nemo-2024",
    "MaxText README": "jax-2025",
    "MosaicML LLM Foundry MPT training benchmarks": "llm-foundry-2023",
    "BigScience BLOOM-176B chronicles": "megatron-deepspeed-2022",
    "vTrain (MICRO-57 2024)": "megatron-deepspeed-2024",
    "Zero Bubble Pipeline Parallelism Table 4": "megatron-2021",
    "torchtitan docs": "torch-2025",
    "somebody's blog": "torch-2025",
}


def row(**texts: str) -> MeasuredRow:
    return MeasuredRow("t", 1, {"gpu": "H100", **texts}, {"tp": 2.0})


@pytest.mark.parametrize(("written", "name"), NAMES.items())
def test_gpu_names_lead_to_the_catalogue(written: str, name: str) -> None:
    entry = row_device(row(gpu=written))
    assert entry is not None and entry.device.name == name


def test_an_unknown_gpu_is_none() -> None:
    assert row_device(row(gpu="TPU v5e")) is None


@pytest.mark.parametrize(("source", "stack"), SOURCES.items())
def test_sources_lead_to_their_software_stack(source: str, stack: str) -> None:
    assert row_stack(row(source=source)) == stack


def test_a_named_stack_wins_over_the_source() -> None:
    assert row_stack(row(source="MaxText README", stack="nemo-2024")) == "nemo-2024"


def test_what_the_row_says_replaces_the_defaults_of_the_stack() -> None:
    said = row_technique(
        row(source="NeMo 24.07", recompute="full", attention="no flash", precision="FP8", sharding="FSDP FULL_SHARD")
    )
    assert (said.recompute, said.attention, said.fp8, said.sharding) == ("full", "math", "tensor", "parameters")
    blank = row_technique(row(source="NeMo 24.07"))
    assert (blank.recompute, blank.attention, blank.sharding) == ("none", "cudnn", "optimizer")
    assert blank.sequence_parallel


@pytest.mark.parametrize(
    ("network", "gigabits_per_gpu"),
    [
        ("4 Omni-Path links per node", 50),
        ("8x200Gbps HDR IB per node", 200),
        ("1600 Gbps node-node RoCE", 200),
        ("", 400),
    ],
)
def test_ports_of_a_node_are_shared_by_its_gpus(network: str, gigabits_per_gpu: float) -> None:
    entry = row_device(row())
    assert entry is not None
    link = row_network(row(network=network), entry, 8)
    assert link.bytes_per_s * 8 == pytest.approx(gigabits_per_gpu * 1e9)
