"""What ranks with copies of a key head sum in a backward (`head_groups.py`)."""

from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load
from mmplan.cost_models.ops import Linear
from mmplan.cost_models.shard import Shard


def summed_copies(layer: Layer, load: Load, shard: Shard) -> list[tuple[int, int]]:
    """Elements and ranks of each sum over those that hold copies of a key head: of the gradients of its weights each
    has what its own queries give."""
    return [
        ((op.x.width + op.bias) * op.y.local_width(shard), op.y.copies(shard))
        for op in layer.ops
        if isinstance(op, Linear) and op.trainable and op.y.copies(shard) > 1 and op.x.rows.of(load) > 0
    ]
