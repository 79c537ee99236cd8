"""Seconds of attention by implementation: fused kernels by FLOPs executed, `math` by two products and score traffic."""

from mmplan.cost_models.gemm import alignment, gemm_s
from mmplan.scenario.cluster import Device

# Gradient kernels of fused attention against forward, FLOP for FLOP: FlashAttention-2 0.85 (arXiv 2307.08691, figures
# 4 and 5, A100), FlashAttention-3 0.76 (2407.08608, figures 5 and 6, H100).
BACKWARD_RATE = 0.8
# Kernels skip masked tiles whole, so the diagonal costs half a tile more per row (2307.08691, section 3.1).
_TILE_ROWS = 128
# Exponentials: 16 per clock and SM (CUDA C++ Programming Guide, table of arithmetic throughput), boost 1.41-1.98 GHz.
_EXPONENTIALS_PER_SM_S = 16 * 1.7e9

# Bytes per score that softmax and dropout of Megatron's kernels move in 16 bit (megatron/fused_kernels): softmax reads
# and writes; dropout reads, writes and keeps a mask byte; their gradients read the saved tensors too.
_SOFTMAX_FORWARD_BYTES, _SOFTMAX_BACKWARD_BYTES, _DROPOUT_BYTES = 4, 6, 5


def fused_attention_s(
    flops: float,
    pairs: float,
    tokens: float,
    head_dim: int,
    causal: bool,
    device: Device,
    kind: str,
    peak_flops_per_s: float,
) -> float:
    """Forward seconds; `flops` and `pairs` (query-key pairs times heads) count the full square.

    Small heads need more exponentials per FLOP: a head of 128 has 512 FLOPs for each, which on H100 take twice the
    time of it (2407.08608, section 3.1); fractions in the catalogue are for heads of 128.
    """
    if flops == 0:
        return 0.0
    length = pairs / tokens if tokens else 0.0
    executed = 0.5 * (1 + _TILE_ROWS / max(length, _TILE_ROWS)) if causal else 1.0
    fraction = dict(device.attention).get(kind, device.attention_fraction)
    exponential_share = 512 * device.sm_count * _EXPONENTIALS_PER_SM_S
    share = peak_flops_per_s / exponential_share if device.sm_count > 1 else 0.0
    small_head = (1 + share * 128 / head_dim) / (1 + share)
    return max(flops * executed * small_head / (peak_flops_per_s * fraction), device.launch_s)


def math_attention_s(
    queries: float, keys: float, head_dim: float, heads: float, device: Device, rate_flops_per_s: float
) -> float:
    """Seconds of the two products of one pass over `heads` score matrices [queries, keys], masked half included."""
    rate_flops_per_s *= alignment(device, 2 * head_dim)
    scores = gemm_s(queries, keys, head_dim, device, rate_flops_per_s, 2, heads)
    return scores + gemm_s(queries, head_dim, keys, device, rate_flops_per_s, 2, heads)


def score_bytes(scores: float, dropout: bool, backward: bool) -> float:
    """Bytes that softmax (and dropout) of `scores` query-key pairs move when the matrix is stored."""
    softmax = _SOFTMAX_BACKWARD_BYTES if backward else _SOFTMAX_FORWARD_BYTES
    return scores * (softmax + (_DROPOUT_BYTES if dropout else 0))
