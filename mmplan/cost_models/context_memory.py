"""What a context-parallel rank holds beside its own rows while their attention is at work."""

from mmplan.cost_models.counts import FP32_BYTES
from mmplan.cost_models.load import Load
from mmplan.cost_models.ops import Attention
from mmplan.cost_models.shard import Shard
from mmplan.scenario.technique import ContextParallel


def others_rows_bytes(
    op: Attention, load: Load, shard: Shard, way: ContextParallel, element_bytes: int, *, backward: bool
) -> float:
    """Around a ring: keys and values at hand and those that come, of another rank each; results are added up in fp32,
    in the backward gradients of queries, of a rank's own keys and values and of those at hand, which come and are sent
    (arXiv 2310.01889, section 3). Gathered: keys and values of all rows, and their gradients."""
    if shard.cp == 1 or op.cross or way == "all-to-all":
        return 0.0
    keys = op.k.elements(load, shard) + op.v.elements(load, shard)
    if way == "gather":
        return shard.cp * keys * element_bytes * (2 if backward else 1)
    passing, wide = keys * element_bytes * min(2, shard.cp - 1), FP32_BYTES if element_bytes < FP32_BYTES else 0
    if not backward:
        return passing + op.y.elements(load, shard) * wide
    return 2 * passing + op.q.elements(load, shard) * wide + 2 * keys * FP32_BYTES
