"""What ranks that share a layer hand each other (part of `ops.Op`).

These stand in what one rank runs (`local_layer.py`), never in a layer of the graph.
"""

from dataclasses import dataclass

from mmplan.cost_models.values import Value


@dataclass(frozen=True, kw_only=True, slots=True)
class SumParts:
    """The sum over tp ranks of what each has of a row, then a bias if the model has one; gradients pass as they are.
    `rows`: each rank gets its rows of the sum alone, and gradients are gathered."""

    name: str
    x: Value
    y: Value
    bias: bool
    trainable: bool
    rows: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SumGradients:
    """A copy for operators of which each tp rank has a part: its gradient is summed over the ranks. `rows`: of x a rank
    has its rows, which are gathered, and it gets its rows of the sum; who reads y keeps x and gathers it again."""

    x: Value
    y: Value
    rows: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ToExperts:
    """Sorted rows go to the ranks of their experts; there they lie expert by expert. An all-to-all over ep."""

    x: Value
    chosen: Value
    y: Value
    experts: int
    capacity: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FromExperts:
    """The way back of what came by `ToExperts`."""

    x: Value
    y: Value


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRows:
    """A tp rank's part of rows that all of them hold alike; its gradient is gathered."""

    x: Value
    y: Value


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRows:
    """The rows of all tp ranks, each of which has its part; a rank's gradient is that of its part."""

    x: Value
    y: Value
