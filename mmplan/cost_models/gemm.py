"""Seconds of a matrix product [rows, inner] x [inner, outer], by its shape.

A product is cut into tiles that the SMs of a device work on in waves; the last wave is partly empty (NVIDIA, "Matrix
Multiplication Background User's Guide", sections on tile and wave quantisation). Each tile walks the inner dimension
and has a start and an end that do not shrink with it. Data moved once bounds the time from below (roofline, Williams et
al., CACM 2009).
"""

import math

from mmplan.scenario.cluster import Device

# Output tiles of cuBLAS's large kernels and the rate of each against the largest: the smaller tile of 128 x 128 reads
# operands more often (1.5 x the bytes per FLOP), 64-wide ones again. Rates: same guide, figure of tile efficiency.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.65))

# Rates where a row of an operand (inner or outer dimension) is no multiple of 16, or of 128 bytes (same guide,
# "Requirements for using Tensor Cores"). Fit to BLOOM's topology search: head widths 108 and 150 against 144 and 216;
# widths of 1,800 against 1,792.
_UNALIGNED_RATE, _PARTLY_ALIGNED_RATE = 0.25, 0.85

STREAM_FRACTION = 0.85
"""Of data-sheet memory bandwidth by kernels that only stream (BabelStream on A100 and H100: 0.85-0.92)."""


def gemm_s(
    rows: float,
    outer: float,
    inner: float,
    device: Device,
    rate_flops_per_s: float,
    bytes_per_element: float,
    batch: float = 1.0,
) -> float:
    """Seconds of `batch` equal products; 0.0 when a dimension is empty.

    Args:
        rate_flops_per_s: what large products reach, peak x fraction of the type.
        bytes_per_element: of the operands; results are written in 16 bit at least.
    """
    if rows <= 0 or outer <= 0 or inner <= 0 or batch <= 0:
        return 0.0
    useful = batch * rows * outer
    best = math.inf
    for tall, wide, rate in _TILES:
        tiles = batch * math.ceil(rows / tall) * math.ceil(outer / wide)
        executed = math.ceil(tiles / device.sm_count) * device.sm_count * tall * wide if device.sm_count > 1 else useful
        best = min(best, executed / rate)
    compute_s = 2 * best * (inner + device.tile_depth) / rate_flops_per_s
    moved = batch * (rows * inner + outer * inner) * bytes_per_element + useful * max(bytes_per_element, 2)
    return max(compute_s, moved / (device.memory_bytes_per_s * STREAM_FRACTION), device.launch_s)


def alignment(device: Device, *row_bytes: float) -> float:
    """Part of the rate that operands and results with rows of so many bytes allow."""
    if device.sm_count == 1 or all(size % 128 == 0 for size in row_bytes):
        return 1.0
    return _PARTLY_ALIGNED_RATE if all(size % 16 == 0 for size in row_bytes) else _UNALIGNED_RATE
