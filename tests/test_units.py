"""Units are converted once, at the border."""

import pytest

from mmplan import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80 GiB", 80 * 2**30), ("80GB", 80 * 10**9), ("512 B", 512), ("1.5 KiB", 1536), ("2e3 MB", 2 * 10**9)],
)
def test_sizes_are_bytes(text: str, expected: int) -> None:
    assert units.parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("900 GB/s", 9e11), ("400 Gb/s", 5e10), ("400 Gbps", 5e10), ("3.35 TB/s", 3.35e12)]
)
def test_a_small_b_is_bits(text: str, expected: float) -> None:
    assert units.parse_bytes_per_s(text) == pytest.approx(expected)


@pytest.mark.parametrize(("text", "expected"), [("10 us", 1e-5), ("1.5 ms", 1.5e-3), ("2 min", 120.0), ("30s", 30.0)])
def test_times_are_seconds(text: str, expected: float) -> None:
    assert units.parse_seconds(text) == pytest.approx(expected)


def test_rates_are_flop_per_second() -> None:
    assert units.parse_flops_per_s("989 TFLOP/s") == 9.89e14
    assert units.parse_flops_per_s("312 TFLOPS") == 3.12e14


@pytest.mark.parametrize("text", ["80", "80 gb", "GiB", "80 GiB/s", "--1 GB", "", "1 XB", "0x10 GB", "1_0 GB"])
def test_a_size_without_a_known_unit_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size such as '80 GiB', found"):
        units.parse_bytes(text)


@pytest.mark.parametrize("text", ["900 GB", "900", "900 gb/s", "fast"])
def test_a_bandwidth_needs_a_time(text: str) -> None:
    with pytest.raises(ValueError, match="expected a bandwidth"):
        units.parse_bytes_per_s(text)


def test_printed_quantities_carry_their_unit() -> None:
    assert units.format_bytes(80 * 2**30) == "80 GiB"
    assert units.format_bytes(123) == "123 B"
    assert units.format_bytes(0) == "0 B"
    assert units.format_seconds(0.0123) == "12.3 ms"
    assert units.format_seconds(0.0) == "0 ns"
    assert units.format_flops(2.0616e12) == "2.06 TFLOP"
    assert units.format_bytes_per_s(9e11) == "900 GB/s"


def test_other_counts_are_converted_by_name() -> None:
    assert units.microseconds(0.25) == pytest.approx(250_000)
    assert units.seconds_of_milliseconds(250) == pytest.approx(0.25)
    assert units.gibibytes(3 * 2**30) == 3.0
