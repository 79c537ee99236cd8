"""Matrix products by shape on a made-up device with 100 SMs, 100 TFLOP/s reached and 1 TB/s."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import DEVICE

from mmplan.cost_models.gemm import STREAM_FRACTION, alignment, gemm_s

GPU = replace(DEVICE, sm_count=100, tile_depth=0.0, launch_s=0.0)
RATE = 100e12


def test_full_waves_of_whole_tiles_take_flops_over_rate() -> None:
    """100 tiles of 256 x 128 fill 100 SMs once: nothing is wasted."""
    rows, outer, inner = 256 * 10, 128 * 10, 4096
    assert gemm_s(rows, outer, inner, GPU, RATE, 2) == pytest.approx(2 * rows * outer * inner / RATE)


def test_one_tile_more_than_a_wave_costs_another_wave_of_the_best_tile() -> None:
    """101 tiles of 256 x 128 take 2 waves of 100, 202 of 128 x 128 take 3 at 0.92 of the rate, 404 of 128 x 64 take 5
    at 0.8: the last are the cheapest."""
    executed = 5 * 100 * 128 * 64 / 0.8
    assert executed < min(2 * 100 * 256 * 128, 3 * 100 * 128 * 128 / 0.92)
    assert gemm_s(256 * 101, 128, 4096, GPU, RATE, 2) == pytest.approx(2 * executed * 4096 / RATE)


def test_start_and_end_of_a_tile_weigh_more_in_shallow_products() -> None:
    deep, shallow = (2560 * 1280 * 2 * inner / RATE for inner in (4096, 128))
    tiled = replace(GPU, tile_depth=128.0)
    assert gemm_s(2560, 1280, 4096, tiled, RATE, 2) == pytest.approx(deep * (1 + 128 / 4096))
    assert gemm_s(2560, 1280, 128, replace(tiled, memory_bytes_per_s=1e15), RATE, 2) == pytest.approx(2 * shallow)


def test_few_rows_wait_for_memory() -> None:
    moved = (1 * 8192 + 8192 * 8192) * 2 + 1 * 8192 * 2
    assert gemm_s(1, 8192, 8192, GPU, 1e18, 2) == pytest.approx(moved / (1e12 * STREAM_FRACTION))


def test_rows_that_break_alignment_lose_rate() -> None:
    assert alignment(GPU, 2 * 144, 2 * 4096) < alignment(GPU, 2 * 128, 2 * 4096) == 1.0
    assert alignment(GPU, 2 * 108) < alignment(GPU, 2 * 104)


@given(rows=st.integers(1, 20_000), more=st.integers(0, 5_000), outer=st.integers(1, 9_000))
def test_more_rows_never_take_less_time(rows: int, more: int, outer: int) -> None:
    assert gemm_s(rows, outer, 512, GPU, RATE, 2) <= gemm_s(rows + more, outer, 512, GPU, RATE, 2)
