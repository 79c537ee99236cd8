"""Projectors that join or average every few rows, and encoders of sound that average them behind their last block,
where ranks have some of the rows (a strided reduce-scatter): each rank makes what its own rows give of all results,
zeros elsewhere, and their sum is dealt out.

So a rank gets its rows of the results however the cuts fall: inside a group of rows, or behind rows that fill none.
"""

from typing import TypeGuard

from mmplan.cost_models.layer import Layer, splits_rows
from mmplan.cost_models.load import Load
from mmplan.cost_models.ops import MergeRows, Op, Pool
from mmplan.cost_models.shard import Shard
from mmplan.cost_models.values import rows_of_context_rank


def strided(op: Op, layer: Layer) -> TypeGuard[Pool | MergeRows]:
    """Whether the operator makes one row of several, which ranks with some of them have together."""
    if splits_rows(layer) or layer.kind not in ("projector", "block"):
        return False
    behind = layer.kind == "projector" or op.y.rows.field == "outputs"
    return behind and ((isinstance(op, Pool) and op.size > 1) or (isinstance(op, MergeRows) and op.merge > 1))


def strided_elements(op: Pool | MergeRows, load: Load, shard: Shard) -> int:
    """Of all results, with what fills up the last rank's."""
    return shard.cp * rows_of_context_rank(op.y.rows.of(load), shard.cp) * op.y.width
