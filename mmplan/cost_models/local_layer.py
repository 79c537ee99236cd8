"""What one tensor-parallel rank runs of a layer: operators on its columns, with every communication written out.

Megatron-LM's scheme (arXiv 1909.08053, section 3): a row-parallel product gives parts that are summed over the ranks;
what all ranks hold alike and split operators read has its gradient summed. The runtime runs these operators, and the
bytes that the ranks sum follow from the same list.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeGuard, TypeVar

from mmplan.cost_models.counts import FP32_BYTES
from mmplan.cost_models.delta_ops import DeltaRule
from mmplan.cost_models.expert_ops import Combine, Dispatch
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
    SumGradients,
    SumParts,
)
from mmplan.cost_models.values import Value, split
from mmplan.scenario.scenario import DTYPE_BYTES, Dtype

LOSS_STATISTICS = 3  # fp32 numbers of each row: largest logit, sum of exponentials, logit of the label

AnyOp = TypeVar("AnyOp", bound=Op)


def local_layer(layer: Layer, tp: int) -> Layer:
    """The layer as each of `tp` ranks runs it, experts split like everything else; every rank has the same widths.

    Raises:
        ValueError: a layer norm reaches over all heads, which no rank has.
    """
    grads, ops = list(layer.grad_values), list[Op]()
    copies: dict[str, Value] = {}
    for op in layer.ops:
        local = _local(op, tp)
        for field in _read_whole(op):
            value: Value = getattr(op, field)
            if value.name in layer.grad_values:
                if value.name not in copies:
                    copies[value.name] = replace(value, name=f"{value.name}.copy")
                    ops.append(SumGradients(x=value, y=copies[value.name]))
                    grads.append(copies[value.name].name)
                local = replace(local, **{field: copies[value.name]})  # type: ignore[arg-type]
        if _gives_parts(op):
            parts = replace(op.y, name=f"{op.y.name}.parts")
            ops += [replace(local, y=parts), _sum_of(op, parts)]
            grads += [parts.name] if op.y.name in layer.grad_values else []
        else:
            ops.append(local)
    return replace(layer, ops=tuple(ops), grad_values=tuple(grads))


def forward_sum_bytes(layer: Layer, load: Load, precision: Dtype, tp: int) -> int:
    """Bytes that each rank gives to sums (or a maximum) over the `tp` ranks in the layer's forward."""
    return _sum_bytes(layer, local_layer(layer, tp).ops, load, precision) if tp > 1 else 0


def recomputed_sum_bytes(layer: Layer, load: Load, precision: Dtype, tp: int) -> int:
    """The same when the forward runs once more for a backward: up to the last operator that keeps something, where
    `torch.utils.checkpoint` stops."""
    if tp == 1 or not layer.has_backward:
        return 0
    local = local_layer(layer, tp)
    keeping = [index for index, op in enumerate(local.ops) if _keeps(op, local.grad_values)]
    return _sum_bytes(layer, local.ops[: max(keeping, default=0)], load, precision)


def backward_sum_bytes(layer: Layer, load: Load, precision: Dtype, tp: int) -> int:
    """The same in its backward. A norm of each head sums its own gradients, because every rank has other heads; a norm
    over all heads sums one number of each row."""
    if tp == 1:
        return 0
    elements, statistics, wide = 0.0, 0.0, norms_over_heads(layer)
    for op in local_layer(layer, tp).ops:
        if isinstance(op, SumGradients):
            elements += op.x.rows.of(load) * op.x.width
        elif isinstance(op, Norm) and op.name in wide:
            statistics += op.x.rows.of(load) if op.x.name in layer.grad_values else 0
        elif norm_of_heads(op) and op.trainable and op.x.rows.of(load) > 0:
            elements += op.x.width // op.groups * (2 if op.kind == "layer" else 1)
    return round(elements * DTYPE_BYTES[precision] + statistics * FP32_BYTES)


def _sum_bytes(layer: Layer, ops: Sequence[Op], load: Load, precision: Dtype) -> int:
    """Of the first operators that a rank runs of a layer."""
    total, wide = 0.0, norms_over_heads(layer)
    for op in ops:
        if isinstance(op, SumParts | Embedding):
            total += op.y.rows.of(load) * op.y.width * DTYPE_BYTES[precision]
        elif isinstance(op, CrossEntropy):
            total += op.x.rows.of(load) * LOSS_STATISTICS * FP32_BYTES
        elif isinstance(op, Norm) and op.name in wide:
            total += op.x.rows.of(load) * FP32_BYTES
    return round(total)


def _keeps(op: Op, grad_values: Sequence[str]) -> bool:
    """Whether autograd keeps a tensor of the operator, weights and indices included; sums and means need none."""
    if isinstance(op, Add | SumParts | SumGradients | Pool | Stored):
        return False
    return (op.b if isinstance(op, AddRows) else op.y).name in grad_values


def norm_of_heads(op: Op) -> TypeGuard[Norm]:
    """Whether the operator normalises heads, of which each rank has some."""
    return isinstance(op, Norm) and op.x.sharded


def norms_over_heads(layer: Layer) -> dict[str, int]:
    """Width of each norm of a whole layer that takes all heads as one, by name (InternViT's q and k)."""
    return {op.name: op.x.width for op in layer.ops if norm_of_heads(op) and op.groups == 1}


def _read_whole(op: Op) -> tuple[str, ...]:
    """Fields of an operator whose value all ranks hold alike, while its result differs from rank to rank."""
    match op:
        case Linear() if op.parallel == "column":
            return ("x",)
        case Dispatch():
            return ("x",)
        case Combine():
            return ("weights",)
        case JoinHeads():
            return ("b",)
        case _:
            return ()


def _gives_parts(op: Op) -> TypeGuard[Linear | Combine]:
    return isinstance(op, Combine) or (isinstance(op, Linear) and op.parallel == "row")


def _sum_of(op: Linear | Combine, parts: Value) -> SumParts:
    if isinstance(op, Combine):
        return SumParts(name="", x=parts, y=op.y, bias=False, trainable=False)
    return SumParts(name=f"{op.name}_sum", x=parts, y=op.y, bias=op.bias, trainable=op.trainable)


def _local(op: AnyOp, tp: int) -> AnyOp:
    """The operator on one rank's columns; a bias behind a sum is left to the sum."""

    def heads(count: int, value: Value) -> int:
        return value.local_width(tp) // (value.width // count)

    changes: dict[str, object] = {}
    for field in fields(op):
        value = getattr(op, field.name)
        if isinstance(value, Value) and value.sharded:
            changes[field.name] = replace(value, width=value.local_width(tp))
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
            if op.groups == 1 and op.kind == "layer":
                raise ValueError(f"norm {op.name} reaches over all heads, and tensor parallelism splits them")
            changes["groups"] = 1 if op.groups == 1 else heads(op.groups, op.x)
        case Embedding():
            changes["size"] = split(op.size, op.unit, tp)
    return replace(op, **changes)  # type: ignore[arg-type]
