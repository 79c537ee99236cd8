"""The hardware catalogue is complete, sourced and physically plausible."""

import pytest

from mmplan.scenario.catalogue import catalogue_device, catalogue_link, device_hint, device_names, link_names

PROMISED = {
    "v100-sxm2-16",
    "v100-sxm2-32",
    "a100-sxm-40",
    "a100-sxm-80",
    "a100-pcie-40",
    "a100-pcie-80",
    "h100-sxm",
    "h100-pcie",
    "h100-nvl",
    "h200",
    "b200",
    "gb200",
    "l40s",
    "rtx-4090",
    "rtx-3090",
    "a800-sxm-80",
    "a40",
    "a10",
    "h800-sxm",
    "h20",
    "gh200",
    "gb300",
    "mi325x",
    "mi250x",
    "mi300x",
    "cpu-core",
}


def test_every_promised_device_is_there() -> None:
    assert set(device_names()) == PROMISED


@pytest.mark.parametrize("name", device_names())
def test_a_device_is_sourced_plausible_and_linked(name: str) -> None:
    entry = catalogue_device(name)
    device = entry.device
    assert device.source
    assert device.reserved_bytes < device.memory_bytes
    for fraction in (device.gemm_fraction, device.attention_fraction, device.memory_fraction):
        assert 0 < fraction <= 1
    for dtype in ("bf16", "fp16"):
        rate = device.flops_per_s(dtype)
        assert rate is None or rate >= device.fp32_flops_per_s
    assert catalogue_link(entry.node_link).bytes_per_s * 8 >= catalogue_link(entry.network).bytes_per_s


def test_dense_peaks_are_those_of_the_data_sheets() -> None:
    """NVIDIA prints 1,979 and 624 TFLOP/s with sparsity; dense is half."""
    assert catalogue_device("h100-sxm").device.flops_per_s("bf16") == pytest.approx(1979e12 / 2, rel=1e-3)
    assert catalogue_device("a100-sxm-80").device.flops_per_s("bf16") == pytest.approx(624e12 / 2, rel=1e-3)
    assert catalogue_device("v100-sxm2-32").device.flops_per_s("bf16") is None


@pytest.mark.parametrize("name", link_names())
def test_a_link_is_sourced_and_has_a_latency(name: str) -> None:
    link = catalogue_link(name)
    assert link.source
    assert 0 < link.latency_s < 1e-3
    assert 0 < link.fraction <= 1


def test_an_unknown_device_is_likened_by_its_chip_first() -> None:
    for name, hint in (
        ("b200-sxm", "'b200'"),
        ("h100-sxm5", "'h100-sxm'"),
        ("nvidia-h200-141gb", "'h200'"),
        ("H100", "'h100-sxm', 'h100-pcie', 'h100-nvl'"),
        ("a100-sxm", "'a100-sxm-40', 'a100-sxm-80'"),
        ("l40", "'l40s'"),
        ("gh20", "'gh200'"),
    ):
        assert device_hint(name) == f"; did you mean {hint}?"
    assert device_hint("abacus").startswith("; known: 'v100-sxm2-16'")
