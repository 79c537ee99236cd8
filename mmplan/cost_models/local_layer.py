"""What one rank runs of a layer that ranks share: operators on its columns, with every communication written out.

Megatron-LM's scheme (arXiv 1909.08053, section 3): a row-parallel product gives parts that are summed over the ranks;
what all ranks hold alike and split operators read has its gradient summed. Experts on ep ranks get their rows by an
all-to-all (GShard, arXiv 2006.16668); where each lies whole on one of the tp ranks, every tp rank sends the rows
of its part of the tokens (Megatron Core's parallel folding, arXiv 2504.14960). The runtime runs these operators, and
the bytes that the ranks exchange follow from the same list.
"""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TypeGuard, TypeVar

from mmplan.cost_models.attention_traffic import attended_elements, gathered_elements, returned_elements
from mmplan.cost_models.copied_heads import summed_copies
from mmplan.cost_models.counts import FP32_BYTES
from mmplan.cost_models.delta_ops import DeltaRule
from mmplan.cost_models.expert_ops import Combine, Dispatch, GroupedLinear
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load
from mmplan.cost_models.ops import (
    Add,
    AddRows,
    Attention,
    CrossEntropy,
    Embedding,
    JoinHeads,
    Linear,
    Multiply,
    Norm,
    Op,
    Pool,
    Rope,
    Slice,
    Stored,
    op_inputs,
)
from mmplan.cost_models.rank_ops import FromExperts, JoinRows, OwnRows, SumGradients, SumParts, ToExperts
from mmplan.cost_models.recorded_ops import RecordedRest
from mmplan.cost_models.sequence_values import summed_weights, values_in_rows
from mmplan.cost_models.shard import Shard, as_shard
from mmplan.cost_models.strided import strided, strided_elements
from mmplan.cost_models.values import CONTEXT, Value, rows_of_context_rank, rows_of_sequence_rank, split
from mmplan.scenario.scenario import DTYPE_BYTES, Dtype

INDEX_BYTES = 8  # of the number of a chosen expert
LOSS_STATISTICS = 3  # fp32 numbers of each row: largest logit, sum of exponentials, logit of the label

AnyOp = TypeVar("AnyOp", bound=Op)


def local_layer(layer: Layer, degrees: int | Shard) -> Layer:
    """The layer as each rank runs it; every rank has the same widths. With ep of 1 experts are split over tp like
    everything else.

    Raises:
        ValueError: a layer norm reaches over all heads, which no rank has.
    """
    shard = as_shard(degrees)
    local = _split_layer(layer, shard) if shard.tp > 1 else layer
    return _with_exchanges(local, shard.ep) if shard.ep > 1 and layer.has_experts else local


def _split_layer(layer: Layer, shard: Shard) -> Layer:
    """The layer over tp; where experts lie whole on ranks of tp, these see a part of the tokens."""
    grads, ops = list(layer.grad_values), list[Op]()
    copies: dict[str, Value] = {}
    own_tokens, own = tokens_are_dealt(shard), values_in_rows(layer, shard)
    for op in layer.ops:
        local, routes = _local(op, shard), own_tokens and isinstance(op, Dispatch | Combine)
        if routes and own:  # tokens are dealt out already
            ops.append(local)
            continue
        for field in (*_read_whole(op, own, own_tokens), *(("chosen",) if routes else ())):
            value: Value = getattr(op, field)
            gathered = value.name in own and not routes
            if not routes and not gathered and value.name not in layer.grad_values:
                continue
            name = f"{value.name}.{'own' if routes else 'copy'}"
            if name not in copies:
                copies[name] = replace(value, name=name, routed=routes)
                copy = OwnRows if routes else partial(SumGradients, rows=gathered)
                ops.append(copy(x=value, y=copies[name]))
                grads += [name] if value.name in layer.grad_values else []
            local = replace(local, **{field: copies[name]})  # type: ignore[arg-type]
        if _gives_parts(op):
            parts = replace(op.y, name=f"{op.y.name}.parts", routed=routes)
            total = _sum_of(op, parts, rows=op.y.name in own)
            ops += [replace(local, y=parts), JoinRows(x=parts, y=op.y) if routes else total]
            grads += [parts.name] if op.y.name in layer.grad_values else []
        else:
            ops.append(local)
    return replace(layer, ops=tuple(ops), grad_values=tuple(grads))


def _with_exchanges(layer: Layer, ep: int) -> Layer:
    """Rows go to the ranks of their experts behind each dispatch, and come back before they are combined."""
    grads, ops = list(layer.grad_values), list[Op]()
    for op in layer.ops:
        if isinstance(op, Dispatch):
            rows = replace(op.y, name=f"{op.y.name}.sorted")
            there = ToExperts(x=rows, chosen=op.chosen, y=op.y, experts=op.experts, capacity=op.capacity)
            ops += [replace(op, y=rows), there]
            grads += [rows.name] if op.y.name in layer.grad_values else []
        elif isinstance(op, Combine):
            rows = replace(op.x, name=f"{op.x.name}.back")
            ops += [FromExperts(x=op.x, y=rows), replace(op, x=rows)]
            grads += [rows.name] if op.x.name in layer.grad_values else []
        elif isinstance(op, GroupedLinear):
            ops.append(replace(op, experts=op.experts // ep))
        else:
            ops.append(op)
    return replace(layer, ops=tuple(ops), grad_values=tuple(grads))


def tokens_are_dealt(shard: Shard) -> bool:
    """Whether each tp rank sends to experts the rows of its part of the tokens: where these lie whole on such ranks."""
    return shard.ep > 1 and shard.expert_tp < shard.tp


def forward_sum_bytes(layer: Layer, load: Load, precision: Dtype, degrees: int | Shard) -> int:
    """Bytes that a rank exchanges with those that share the layer in its forward: buffers of sums and gathers, and the
    rows of its own tokens that go to experts and come back."""
    shard = as_shard(degrees)
    return _sum_bytes(layer, local_layer(layer, shard).ops, load, precision, shard)


def recomputed_sum_bytes(layer: Layer, load: Load, precision: Dtype, degrees: int | Shard) -> int:
    """The same when the forward runs once more for a backward: up to the last operator that keeps something, where
    `torch.utils.checkpoint` stops."""
    shard = as_shard(degrees)
    if not layer.has_backward:
        return 0
    if isinstance(layer.ops[-1], RecordedRest):  # a job runs blocks that are shared to their end again
        return forward_sum_bytes(layer, load, precision, shard)
    local = local_layer(layer, shard)
    keeping = [index for index, op in enumerate(local.ops) if _keeps(op, local.grad_values)]
    return _sum_bytes(layer, local.ops[: max(keeping, default=0)], load, precision, shard)


def attention_again_bytes(layer: Layer, load: Load, precision: Dtype, degrees: int | Shard) -> int:
    """The same when attention alone runs once more for a backward: of exchanges all but the way back, which keeps
    nothing; gathers are done once more in any case."""
    shard = as_shard(degrees)
    if shard.cp == 1 or shard.context_parallel == "gather":
        return 0
    local, elements = local_layer(layer, shard), 0
    for op in local.ops:
        if isinstance(op, Attention) and not op.cross and op.y.name in local.grad_values:
            back = gathered_elements(op.y, load, shard) // shard.cp if shard.context_parallel == "all-to-all" else 0
            elements += attended_elements(op, load, shard) - back
    return elements * DTYPE_BYTES[precision]


def backward_sum_bytes(layer: Layer, load: Load, precision: Dtype, degrees: int | Shard) -> int:
    """The same in its backward. A norm of each head sums its own gradients, because every rank has other heads; a norm
    over all heads sums one number of each row; ranks with copies of a key head sum the gradients of its weights."""
    shard = as_shard(degrees)
    local = local_layer(layer, shard)
    states = [value for value in _states_read(layer, shard) if value.name in layer.grad_values]
    elements = float(sum(gathered_elements(value, load, shard) for value in states))
    elements += _returned_rows(layer, local, load, shard) if shard.sequence and shard.tp > 1 else 0
    elements += sum(summed for summed, _ in summed_copies(layer, load, shard))
    statistics, wide = 0.0, norms_over_heads(layer, shard)
    for op in local.ops:
        if isinstance(op, RecordedRest):
            elements += sum(op.backward_sums(layer.grad_values, load, shard.tp))
        elif isinstance(op, SumGradients) and not op.rows:
            elements += _rows(layer, op.x, load, shard) * op.x.width
        elif isinstance(op, OwnRows) and op.x.name in local.grad_values:
            elements += _joined_elements(layer, op.x, load, shard)
        elif isinstance(op, Attention) and shard.cp > 1 and not op.cross:
            elements += returned_elements(op, local.grad_values, load, shard)
        elif isinstance(op, ToExperts | FromExperts) and op.x.name in local.grad_values:
            elements += _routed_elements(layer, op, load, shard)
        elif shard.cp > 1 and strided(op, layer):
            elements += strided_elements(op, load, shard) if op.x.name in local.grad_values else 0
        elif shard.tp > 1 and isinstance(op, Norm) and op.name in wide:
            statistics += _rows(layer, op.x, load, shard) if op.x.name in layer.grad_values else 0
        elif shard.tp > 1 and norm_of_heads(op) and op.trainable and op.x.rows.of(load) > 0:
            elements += op.x.width // op.groups * (2 if op.kind == "layer" else 1)
    return round(elements * DTYPE_BYTES[precision] + statistics * FP32_BYTES)


def _returned_rows(layer: Layer, local: Layer, load: Load, shard: Shard) -> float:
    """Elements that tp ranks with rows exchange in a backward: they gather gradients of their rows of sums, and for
    weights their rows of what products read once more, of which they sum the gradients; they sum those of weights that
    all have alike. The token table's rows, and those that are added, were cut from all."""
    products = [op for op in local.ops if isinstance(op, Linear) and op.trainable]
    elements = 0.0
    for op in local.ops:
        if isinstance(op, SumGradients) and op.rows:
            times = (op.x.name in local.grad_values) + any(product.x.name == op.y.name for product in products)
            elements += times * _joined_elements(layer, op.x, load, shard)
            continue
        returned = op.y if isinstance(op, SumParts) and op.rows else op.b if isinstance(op, AddRows) else None
        if returned is not None and returned.name in local.grad_values:
            elements += _joined_elements(layer, op.y, load, shard)
    elements += sum(summed_weights(layer, shard).values())
    if layer.kind == "token_embed" and layer.has_backward:
        rows = rows_of_context_rank(layer.output.rows.of(load), shard.cp)
        elements += shard.tp * rows_of_sequence_rank(rows, shard.tp) * layer.output.width
    return elements


def _sum_bytes(layer: Layer, ops: Sequence[Op], load: Load, precision: Dtype, shard: Shard) -> int:
    """Of the first operators that a rank runs of a layer."""
    total, wide = 0.0, norms_over_heads(layer, shard)
    total += _joined_states(layer, load, shard) * DTYPE_BYTES[precision]
    total += sum(gathered_elements(value, load, shard) for value in _states_read(layer, shard)) * DTYPE_BYTES[precision]
    for op in ops:
        if isinstance(op, RecordedRest):
            total += sum(op.forward_sums(load, shard.tp)) * DTYPE_BYTES[precision]
        elif isinstance(op, ToExperts | FromExperts):
            total += _routed_elements(layer, op, load, shard) * DTYPE_BYTES[precision]
        elif isinstance(op, JoinRows):
            total += _joined_elements(layer, op.y, load, shard) * DTYPE_BYTES[precision]
        elif isinstance(op, Attention) and shard.cp > 1 and not op.cross:
            total += attended_elements(op, load, shard) * DTYPE_BYTES[precision]
        elif shard.cp > 1 and strided(op, layer):
            total += strided_elements(op, load, shard) * DTYPE_BYTES[precision]
        elif shard.tp == 1:
            continue
        elif isinstance(op, SumParts | SumGradients) and op.rows:
            chosen = any(isinstance(other, Dispatch) and other.chosen.name == op.x.name for other in layer.ops)
            width = INDEX_BYTES if chosen else DTYPE_BYTES[precision]
            total += _joined_elements(layer, op.y, load, shard) * width
        elif isinstance(op, SumParts | Embedding):
            total += _rows(layer, op.y, load, shard) * op.y.width * DTYPE_BYTES[precision]
        elif isinstance(op, CrossEntropy):
            total += _rows(layer, op.x, load, shard) * LOSS_STATISTICS * FP32_BYTES
        elif isinstance(op, Norm) and op.name in wide:
            total += _rows(layer, op.x, load, shard) * FP32_BYTES
    return round(total)


def _routed_elements(layer: Layer, op: ToExperts | FromExperts, load: Load, shard: Shard) -> int:
    """Of the rows that a rank's tokens (the first rank's, where they are dealt out) have at experts."""
    dispatch = next(one for one in layer.ops if isinstance(one, Dispatch))
    tokens = round(_rows(layer, dispatch.chosen, load, shard))
    own = math.ceil(tokens / shard.tp) if tokens_are_dealt(shard) else tokens
    rows = own * dispatch.chosen.width
    if dispatch.capacity is not None:
        rows = dispatch.experts * math.ceil(dispatch.capacity * rows / dispatch.experts)
    return rows * op.x.width


def _joined_elements(layer: Layer, value: Value, load: Load, shard: Shard) -> int:
    """Of a gather over tp, which has equal parts."""
    return math.ceil(_rows(layer, value, load, shard) / shard.tp) * shard.tp * value.width


def _joined_states(layer: Layer, load: Load, shard: Shard) -> int:
    """Elements of another language model's states of which tp ranks have their rows and need all."""
    if not shard.sequence or shard.tp == 1:
        return 0
    rows = [(rows_of_context_rank(value.rows.of(load), shard.cp), value.width) for value in _states(layer)]
    return sum(shard.tp * rows_of_sequence_rank(count, shard.tp) * width for count, width in rows)


def _states_read(layer: Layer, shard: Shard) -> list[Value]:
    """The same of which cp ranks have their rows and need all."""
    return _states(layer) if shard.cp > 1 else []


def _states(layer: Layer) -> list[Value]:
    """States of another language model that enter a sequence."""
    if layer.kind != "token_embed":
        return []
    names = {source.value for source in layer.sources}
    read = {value.name: value for op in layer.ops for value in op_inputs(op) if value.name in names}
    return [value for value in read.values() if value.rows == CONTEXT]


def _rows(layer: Layer, value: Value, load: Load, shard: Shard) -> float:
    """Of a value on one rank: its part of the tokens behind the token table, which puts the sequence together."""
    rows = value.rows.of(load)
    if shard.cp == 1 or layer.kind == "token_embed" or value.rows.field != "tokens":
        return rows
    return rows_of_context_rank(load.tokens, shard.cp) * value.rows.times / value.rows.per


def _keeps(op: Op, grad_values: Sequence[str]) -> bool:
    """Whether autograd keeps a tensor of the operator, weights and indices included; sums and means need none."""
    if isinstance(op, Add | SumParts | SumGradients | OwnRows | JoinRows | Pool | Stored):
        return False
    return (op.b if isinstance(op, AddRows) else op.y).name in grad_values


def norm_of_heads(op: Op) -> TypeGuard[Norm]:
    """Whether the operator normalises heads, of which each rank has some."""
    return isinstance(op, Norm) and op.x.sharded


def norms_over_heads(layer: Layer, degrees: int | Shard) -> dict[str, int]:
    """Width of each norm of a whole layer that takes heads of several ranks as one, by name (InternViT's q and k)."""
    return {
        op.name: op.x.width for op in layer.ops if norm_of_heads(op) and op.groups == 1 and op.x.copies(degrees) == 1
    }


def _read_whole(op: Op, own: frozenset[str], own_tokens: bool) -> tuple[str, ...]:
    """Fields of an operator whose value all ranks hold alike, while its result differs from rank to rank. Of values in
    `own` a rank has its rows: experts that are split over tp read which were chosen for all."""
    chosen = ("chosen",) if own and not own_tokens else ()
    match op:
        case Linear() if op.parallel == "column":
            return ("x",)
        case Dispatch():
            return ("x", *chosen)
        case GroupedLinear():
            return chosen
        case Combine():
            return ("weights", *chosen)
        case JoinHeads():
            return ("b",)
        case _:
            return ()


def _gives_parts(op: Op) -> TypeGuard[Linear | Combine]:
    return isinstance(op, Combine) or (isinstance(op, Linear) and op.parallel == "row")


def _sum_of(op: Linear | Combine, parts: Value, *, rows: bool) -> SumParts:
    if isinstance(op, Combine):
        return SumParts(name="", x=parts, y=op.y, bias=False, trainable=False, rows=rows)
    return SumParts(name=f"{op.name}_sum", x=parts, y=op.y, bias=op.bias, trainable=op.trainable, rows=rows)


def _local(op: AnyOp, shard: Shard) -> AnyOp:
    """The operator on one rank's columns; a bias behind a sum is left to the sum."""

    def heads(count: int, value: Value) -> int:
        return value.local_width(shard) // (value.width // count)

    changes: dict[str, object] = {}
    for field in fields(op):
        value = getattr(op, field.name)
        if isinstance(value, Value) and value.sharded:
            changes[field.name] = replace(value, width=value.local_width(shard), heads=None)
    match op:
        case Linear() if op.parallel == "row":
            changes["bias"] = False
        case Attention():
            changes |= {"heads": heads(op.heads, op.q), "kv_heads": heads(op.kv_heads, op.k)}
        case DeltaRule():
            changes |= {"key_heads": heads(op.key_heads, op.k), "value_heads": heads(op.value_heads, op.v)}
        case Multiply() if op.groups and op.a.sharded:
            changes["groups"] = heads(op.groups, op.a)
        case Rope():
            changes["heads"] = heads(op.heads, op.x)
        case JoinHeads():
            changes["heads"] = heads(op.heads, op.a)
        case Slice():
            changes["groups"] = heads(op.groups, op.x)
        case Norm() if op.x.sharded:
            if op.groups == 1 and op.kind == "layer" and op.x.copies(shard) == 1:
                raise ValueError(f"norm {op.name} reaches over all heads, and tensor parallelism splits them")
            changes["groups"] = 1 if op.groups == 1 else heads(op.groups, op.x)
        case Embedding():
            changes["size"] = split(op.size, op.unit, shard.tp)
    return replace(op, **changes)  # type: ignore[arg-type]
