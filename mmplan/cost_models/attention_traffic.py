"""Elements that context-parallel ranks hand over for the attention of a layer, by the way in which keys and values come
together."""

from collections.abc import Sequence

from mmplan.cost_models.load import Load
from mmplan.cost_models.ops import Attention
from mmplan.cost_models.shard import Shard
from mmplan.cost_models.values import Value, rows_of_context_rank


def attended_elements(op: Attention, load: Load, shard: Shard) -> int:
    """Of what a cp rank hands over for attention: keys and values of its own and others' rows but one, from hand to
    hand; or of all rows to gathers; or of its own rows these and queries for all rows of some heads, and the result of
    these for its own rows."""
    if shard.context_parallel == "all-to-all":
        return sum(gathered_elements(value, load, shard) for value in (op.q, op.k, op.v, op.y)) // shard.cp
    return sum(_passed_elements(value, load, shard) for value in (op.k, op.v))


def returned_elements(op: Attention, grad_values: Sequence[str], load: Load, shard: Shard) -> int:
    """The same in the backward: keys and values once more, and gradients of what came; around a ring those of keys and
    values together, where one has any."""
    again = attended_elements(op, load, shard) if op.y.name in grad_values else 0
    if shard.context_parallel == "all-to-all":
        return again
    returned = [value for value in (op.k, op.v) if value.name in grad_values]
    returned = [op.k, op.v] if returned and shard.context_parallel == "ring" else returned
    return again + sum(_passed_elements(value, load, shard) for value in returned)


def _passed_elements(value: Value, load: Load, shard: Shard) -> int:
    """Of keys or values on their way to all ranks."""
    everything = gathered_elements(value, load, shard)
    return everything * (shard.cp - 1) // shard.cp if shard.context_parallel == "ring" else everything


def gathered_elements(value: Value, load: Load, shard: Shard) -> int:
    """Of all rows, of which each of cp ranks has its own."""
    return shard.cp * rows_of_context_rank(value.rows.of(load), shard.cp) * value.width
