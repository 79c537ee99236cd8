"""A model whose layers were recorded: no shape of a transformer says what they compute, a forward without weights did.

All numbers are sums over `samples` samples that were looked at; a plan counts each of its samples as their mean.
"""

from dataclasses import dataclass
from typing import Literal

Weight = Literal["none", "trained", "frozen"]
Reads = Literal["none", "inputs", "weights", "both"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductOnRank:
    """A product as each of `tp` ranks that share its layer computes it."""

    tp: int
    rows: int
    inner: int
    outer: int
    groups: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """`groups` matrix products [rows, inner] x [inner, outer].

    Attributes:
        operands: tensors among the two that have a gradient and are no weight.
        weight: whether one of the two is a parameter, and whether the model trains it.
        reads: what the gradients that flow on reach: inputs of the layer, its trained weights, or both.
        on_ranks: where ranks that share the layer compute less.
    """

    rows: int
    inner: int
    outer: int
    groups: int = 1
    operands: int = 1
    weight: Weight = "none"
    reads: Reads = "both"
    on_ranks: tuple[ProductOnRank, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedAttention:
    """Calls of torch's `scaled_dot_product_attention`; rows and pairs are those of one head. `on_ranks`: heads that
    each of so many ranks has which share the layer, (tp, heads)."""

    rows: int
    pairs: int
    heads: int
    head_dim: int
    value_dim: int
    causal: bool = False
    on_ranks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What autograd keeps for a backward: numbers in the type of the model, and bytes of all other types."""

    numbers: int = 0
    other_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardSum:
    """A sum over ranks of so many numbers, where what it reads has a gradient: inputs of the layer, its weights."""

    numbers: int
    reads: Reads


@dataclass(frozen=True, kw_only=True, slots=True)
class KindOnRank:
    """What each of `tp` ranks has of a layer that they share, by those of its linear layers that a trial found they can
    split; the rest is as in `RecordedKind`.

    Attributes:
        forward_sums: numbers of each sum over the ranks in a forward.
        backward_sums: those of a backward.
    """

    tp: int
    parameters: int = 0
    trained: int = 0
    moved: int = 0
    kept: Kept = Kept()
    kept_frozen: Kept = Kept()
    kept_first: Kept = Kept()
    forward_sums: tuple[int, ...] = ()
    backward_sums: tuple[BackwardSum, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedKind:
    """Layers of one kind do the same.

    Attributes:
        parameters, trained: how many it has, and how many of them the model trains.
        moved, kernels: numbers that operators other than products and attention read and write, and how many run.
        output: numbers that it hands on.
        kept: where inputs and weights have gradients; `kept_frozen`: where inputs alone, `kept_first`: weights alone.
        on_ranks: by the degrees of tensor parallelism that split some of it; at others each rank does all of it.
    """

    parameters: int = 0
    trained: int = 0
    products: tuple[Product, ...] = ()
    attentions: tuple[FusedAttention, ...] = ()
    moved: int = 0
    kernels: int = 0
    output: int = 0
    kept: Kept = Kept()
    kept_frozen: Kept = Kept()
    kept_first: Kept = Kept()
    on_ranks: tuple[KindOnRank, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRead:
    """Of the outputs of a layer, so many numbers are read."""

    layer: str
    numbers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedLayer:
    """`pieces`: the modules and parameters of the model that it is made of, by their names there; `block`: they are
    one of a list of modules alike."""

    id: str
    kind: str
    pieces: tuple[str, ...]
    reads: tuple[RecordedRead, ...] = ()
    block: bool = False

    @property
    def module(self) -> str:
        return self.id.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """Layers in the order of their use; the last one, without pieces, is what follows all of them up to the loss."""

    samples: int
    kinds: tuple[tuple[str, RecordedKind], ...]
    layers: tuple[RecordedLayer, ...]

    def kind(self, name: str) -> RecordedKind:
        return dict(self.kinds)[name]

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """Of tensor parallelism, that split some layer."""
        return tuple(sorted({on_rank.tp for _, kind in self.kinds for on_rank in kind.on_ranks}))
