"""Operators of layers that were recorded: sums of a recording, from which the same rules derive costs.

A recording does not say which tensor is made of which; it says of every product whether its gradient reaches the
layer's inputs or its trained weights. Two values stand for these, so that what is frozen costs no backward.
"""

from dataclasses import dataclass

from mmplan.cost_models.values import Rows, Value
from mmplan.scenario.recorded import Kept


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldWeights:
    """`size` parameters; y has a gradient where they are trained."""

    name: str
    y: Value
    size: int
    trainable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Entered:
    """All inputs of the layer and its trained weights as one value."""

    inputs: tuple[Value, ...]
    y: Value


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedProduct:
    """A product of which `inputs` may want gradients, so many of its operands have one."""

    inputs: tuple[Value, ...]
    y: Value
    rows: Rows
    inner: int
    outer: int
    groups: int
    operands: int
    trainable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRest:
    """Everything else: `kernels` that move `moved` numbers, and what the whole layer keeps."""

    inputs: tuple[Value, ...]
    weights: Value
    y: Value
    moved: Value
    kernels: int
    kept: Kept
    kept_frozen: Kept
    kept_first: Kept

    def keeps(self, grads: tuple[str, ...]) -> Kept:
        """What is kept where values of these names have gradients."""
        read = any(value.name in grads for value in self.inputs)
        trained = self.weights.name in grads
        if read and trained:
            return self.kept
        return self.kept_frozen if read else self.kept_first if trained else Kept()
