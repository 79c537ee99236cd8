"""A model whose layers were recorded: no shape of a transformer says what they compute, a forward without weights did.

All numbers are sums over `samples` samples that were looked at; a plan counts each of its samples as their mean.
"""

from dataclasses import dataclass
from typing import Literal

Weight = Literal["none", "trained", "frozen"]
Reads = Literal["none", "inputs", "weights", "both"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """`groups` matrix products [rows, inner] x [inner, outer].

    Attributes:
        operands: tensors among the two that have a gradient and are no weight.
        weight: whether one of the two is a parameter, and whether the model trains it.
        reads: what the gradients that flow on reach: inputs of the layer, its trained weights, or both.
    """

    rows: int
    inner: int
    outer: int
    groups: int = 1
    operands: int = 1
    weight: Weight = "none"
    reads: Reads = "both"


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedAttention:
    """Calls of torch's `scaled_dot_product_attention`; rows and pairs are those of one head."""

    rows: int
    pairs: int
    heads: int
    head_dim: int
    value_dim: int
    causal: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What autograd keeps for a backward: numbers in the type of the model, and bytes of all other types."""

    numbers: int = 0
    other_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedKind:
    """Layers of one kind do the same.

    Attributes:
        parameters, trained: how many it has, and how many of them the model trains.
        moved, kernels: numbers that operators other than products and attention read and write, and how many run.
        output: numbers that it hands on.
        kept: where inputs and weights have gradients; `kept_frozen`: where inputs alone, `kept_first`: weights alone.
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
