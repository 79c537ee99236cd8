"""Bytes of compressed gradients, by hand, and what the reported 128 -> 6.2 MB is made of."""

import pytest

from mmplan.cost_models.compressed_bytes import TOP_K_FP8, TOP_K_SIGN, GradientFormat, bitmap_bytes, offset_bytes

MB = 10**6


def test_five_percent_of_128_mb_in_five_bits_is_four_megabytes_and_not_the_reported_six() -> None:
    elements = 128 * MB // 4
    kept = TOP_K_SIGN.kept(elements)
    assert kept == 1_600_000
    # signs 200,000 + magnitudes 800,000 + scales 4 x 6,250
    assert TOP_K_SIGN.value_bytes(kept) == 1_025_000
    # two bytes for each and four for each of 489 segments; a bitmap would be 4,000,000
    assert offset_bytes(elements, kept) == 3_201_956 and bitmap_bytes(elements) == 4_000_000
    assert TOP_K_SIGN.wire_bytes(elements) == 4_226_956
    # With indices of 4 bytes it would be 7.4 MB: more than reported. 25 bits an index, which 32 million elements need
    # at least if each is written out, and a scale for every 32 values are 6.2 MB.
    assert TOP_K_SIGN.value_bytes(kept) + 4 * kept == 7_425_000
    assert kept * (25 + 5) // 8 + 4 * kept // 32 == 6_200_000
    # Of 128 MB in bf16 there are twice as many elements.
    assert TOP_K_SIGN.wire_bytes(2 * elements) == 8_453_908


def test_an_all_gather_of_messages_saves_less_the_more_ranks_there_are() -> None:
    dense, message = 128 * MB, TOP_K_SIGN.wire_bytes(32 * MB)

    def saving(ranks: int) -> float:
        return 2 * (ranks - 1) / ranks * dense / ((ranks - 1) * message)  # ring all-reduce over all-gather

    assert saving(2) == pytest.approx(30.3, abs=0.05)
    assert saving(8) == pytest.approx(7.57, abs=0.01)
    assert saving(60) > 1 > saving(61)


def test_a_fifth_in_fp8_has_a_bitmap() -> None:
    # 200 values in two scales of 128, and a bit for each of 1,000 elements rounded up; but that is a small tensor
    assert TOP_K_FP8.wire_bytes(1000) == 4000
    assert TOP_K_FP8.wire_bytes(10_000) == 2000 + 4 * 16 + 1250


def test_all_elements_need_no_indices() -> None:
    assert GradientFormat(values="fp8", fraction=1, block=128).wire_bytes(4096) == 4096 + 4 * 32


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5, float("nan")])
def test_a_fraction_is_above_zero_and_at_most_one(fraction: float) -> None:
    with pytest.raises(ValueError, match="expected more than 0 and at most 1"):
        GradientFormat(values="fp8", fraction=fraction, block=128)
