"""Shapes and PartitionSpecs of a layer's parameters: one rule per operator, as `counts.op_parameters` counts them.

Weights are [inputs, outputs], those of experts [experts, inputs, outputs]. Where a width is filled up to a multiple of
tp (vocabulary, heads), the shape is the filled one, because JAX splits evenly or not at all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from mmplan.cost_models.delta_ops import CausalConv, DeltaRule
from mmplan.cost_models.expert_ops import GroupedLinear
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.ops import (
    ClassToken,
    Conv1d,
    Convolution,
    Embedding,
    Linear,
    Norm,
    Op,
    Positions,
    Scale,
    Stored,
    op_trainable,
)
from mmplan.cost_models.shard import Shard
from mmplan.cost_models.values import Value, split
from mmplan.planner.formats.jax_mesh import Axes, MeshAxes

Spec = tuple[Axes, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One array: the axes that each dim of its weights, gradients and optimizer state is split over."""

    name: str
    shape: tuple[int, ...]
    weights: Spec
    gradients: Spec
    state: Spec
    trained: bool


@dataclass(frozen=True, slots=True)
class _Array:
    name: str
    shape: tuple[int, ...]
    spec: Spec
    expert: bool = False


def layer_parameters(layer: Layer, layout: Layout, axes: MeshAxes) -> tuple[Parameter, ...]:
    """The parameters of a layer under a layout; those of a tied head are the token table's."""
    shard, spread = layout.shard(layer), layer.module in layout.spread
    inner = replace(axes, tp=()) if spread else axes
    found = []
    for op in layer.ops:
        for array in _arrays(op, shard, inner):
            shared = axes.expert_replicas if array.expert else (*axes.dp, *axes.cp, *(axes.tp if spread else ()))
            over = _over(array, shared, axes)
            found.append(
                Parameter(
                    name=array.name,
                    shape=array.shape,
                    weights=over if layout.sharding == "parameters" else array.spec,
                    gradients=over if layout.sharding in ("gradients", "parameters") else array.spec,
                    state=array.spec if layout.sharding == "none" else over,
                    trained=op_trainable(op),
                )
            )
    return tuple(found)


def _over(array: _Array, shared: Axes, axes: MeshAxes) -> Spec:
    """Split further over ranks that would hold the same, along the longest dim that divides; else whole."""
    count = axes.size(shared)
    if count == 1:
        return array.spec
    parts = [size // axes.size(names) for size, names in zip(array.shape, array.spec, strict=True)]
    fitting = [place for place, size in enumerate(parts) if size % count == 0]
    if not fitting:
        return array.spec
    place = max(fitting, key=lambda index: parts[index])
    return tuple((*names, *shared) if index == place else names for index, names in enumerate(array.spec))


def _arrays(op: Op, shard: Shard, axes: MeshAxes) -> Iterator[_Array]:
    match op:
        case Linear() if not op.tied:
            ends = (op.x, op.y)
            shape, spec = tuple(_full(end, shard) for end in ends), tuple(_on(end, axes) for end in ends)
            yield _Array(f"{op.name}.weight", shape, spec)
            if op.bias:
                yield _Array(f"{op.name}.bias", shape[1:], spec[1:])
        case GroupedLinear():
            experts, ends = split(op.experts, 1, shard.ep) * shard.ep, (op.x, op.y)
            shape, spec = tuple(_full(end, shard) for end in ends), tuple(_on(end, axes) for end in ends)
            yield _Array(f"{op.name}.weight", (experts, *shape), (axes.ep, *spec), expert=True)
        case Conv1d():
            yield _Array(f"{op.name}.weight", (op.kernel, op.x.width, op.y.width), ((), (), ()))
            yield _Array(f"{op.name}.bias", (op.y.width,), ((),))
        case Convolution():
            yield _Array(f"{op.name}.weight", (op.taps, op.x.width // op.groups, op.y.width), ((), (), ()))
            if op.bias:
                yield _Array(f"{op.name}.bias", (op.y.width,), ((),))
        case Norm():
            width, on = (_full(op.x, shard), _on(op.x, axes)) if op.groups == 1 else (op.x.width // op.groups, ())
            for part in ("scale", "bias") if op.kind == "layer" and op.bias else ("scale",):
                yield _Array(f"{op.name}.{part}", (width,), (on,))
        case CausalConv():
            yield _Array(f"{op.name}.weight", (op.kernel, _full(op.x, shard)), ((), _on(op.x, axes)))
        case DeltaRule():
            for part, value in (("decay", op.step), ("bias", op.gate)):
                yield _Array(f"{op.name}.{part}", (_full(value, shard),), (_on(value, axes),))
        case Embedding():
            yield _Array(f"{op.name}.weight", (split(op.size, op.unit, shard.tp) * shard.tp, op.y.width), (axes.tp, ()))
        case ClassToken() | Scale():
            yield _Array(f"{op.name}.weight", (op.y.width,), ((),))
        case Positions() if op.size:
            yield _Array(f"{op.name}.weight", (op.size, op.y.width), ((), ()))
        case Stored():
            yield _Array(f"{op.name}.weight", (op.size,), ((),))


def _full(value: Value, shard: Shard) -> int:
    """Width over all ranks, filled up."""
    degree = (shard.expert_tp if value.routed else shard.tp) if value.sharded else 1
    return value.local_width(shard) * degree


def _on(value: Value, axes: MeshAxes) -> Axes:
    if not value.sharded:
        return ()
    return axes.etp if value.routed else axes.tp


def local_parameters(parameter: Parameter, axes: MeshAxes) -> int:
    """Numbers of the weights on one rank."""
    sizes = (size // axes.size(names) for size, names in zip(parameter.shape, parameter.weights, strict=True))
    return prod(sizes)
