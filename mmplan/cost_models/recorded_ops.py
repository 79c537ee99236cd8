"""Operators of layers that were recorded: sums of a recording, from which the same rules derive costs.

A recording does not say which tensor is made of which; it says of every product whether its gradient reaches the
layer's inputs or its trained weights. Two values stand for these, so that what is frozen costs no backward. What each
of several tensor-parallel ranks does was recorded by their degree; at others each does everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.cost_models.load import Load
from mmplan.cost_models.values import Rows, Value
from mmplan.scenario.recorded import Kept, KindOnRank, ProductOnRank


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldWeights:
    """`size` parameters; y has a gradient where they are trained. `on_ranks`: (tp, those on a rank)."""

    name: str
    y: Value
    size: int
    trainable: bool
    on_ranks: tuple[tuple[int, int], ...] = ()

    def on_rank(self, tp: int) -> int:
        return dict(self.on_ranks).get(tp, self.size)


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
    on_ranks: tuple[ProductOnRank, ...] = ()

    def sizes(self, load: Load, tp: int) -> tuple[float, int, int, int]:
        """Rows, inner and outer size, and how many, on a rank."""
        for own in self.on_ranks:
            if own.tp == tp:
                rows = Rows(self.rows.field, times=own.rows, per=self.rows.per)
                return rows.of(load), own.inner, own.outer, own.groups
        return self.rows.of(load), self.inner, self.outer, self.groups


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
    on_ranks: tuple[KindOnRank, ...] = ()

    def kept_value(self, grads: Sequence[str]) -> Value:
        """The numbers that are kept where values of these names have gradients."""
        return Value(
            "kept",
            self.moved.rows,
            self._of(self, grads).numbers,
            on_ranks=tuple((own.tp, self._of(own, grads).numbers) for own in self.on_ranks),
        )

    def kept_bytes(self, grads: Sequence[str], load: Load, tp: int) -> float:
        """Bytes of other types that are kept there, on a rank."""
        own = self._on_rank(tp) or self
        return self.moved.rows.of(load) * self._of(own, grads).other_bytes

    def forward_sums(self, load: Load, tp: int) -> tuple[float, ...]:
        """Numbers of each sum over the ranks in a forward."""
        own = self._on_rank(tp)
        return () if own is None else tuple(self.moved.rows.of(load) * numbers for numbers in own.forward_sums)

    def backward_sums(self, grads: Sequence[str], load: Load, tp: int) -> tuple[float, ...]:
        """The same in a backward."""
        own, rows = self._on_rank(tp), self.moved.rows.of(load)
        found = {"none": False, "inputs": self._reads(grads), "weights": self.weights.name in grads}
        found["both"] = found["inputs"] or found["weights"]
        return () if own is None else tuple(rows * one.numbers for one in own.backward_sums if found[one.reads])

    def _on_rank(self, tp: int) -> KindOnRank | None:
        return next((own for own in self.on_ranks if own.tp == tp), None)

    def _reads(self, grads: Sequence[str]) -> bool:
        return any(value.name in grads for value in self.inputs)

    def _of(self, own: "RecordedRest | KindOnRank", grads: Sequence[str]) -> Kept:
        read, trained = self._reads(grads), self.weights.name in grads
        if read and trained:
            return own.kept
        return own.kept_frozen if read else own.kept_first if trained else Kept()
