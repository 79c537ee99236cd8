"""The few operators a layer is made of: a small intermediate form that costs and torch modules are both derived from.

A layer is a list of operators over named values (packed rows, no padding). Every question about a layer, such as its
FLOPs, what autograd keeps of it, the bytes it moves, is one rule per operator in `counts.py` and `traffic.py`;
`runtime/layers.py` runs the same list in torch.
"""

from dataclasses import dataclass
from typing import Literal

from mmplan.cost_models.load import Load
from mmplan.cost_models.shard import Shard, as_shard

Parallel = Literal["none", "column", "row"]


@dataclass(frozen=True, slots=True)
class Rows:
    """A number of rows (or pairs) as a linear form of a load: `load.field * times / per`."""

    field: str
    times: int = 1
    per: int = 1

    def of(self, load: Load) -> float:
        count: float = getattr(load, self.field)
        return count * self.times / self.per


TOKENS = Rows("tokens")
CONTEXT = Rows("context_tokens")


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor [rows, width]; `sharded` values are split along width over the tensor-parallel ranks.

    unit: columns that stay together when the width is split (a head). Where the units do not divide by the degree,
    every rank holds as many as the fullest: padded heads, or heads that several ranks hold. `routed`: the rows are
    those that tokens send to experts, and width is split over `etp` instead of `tp`.
    """

    name: str
    rows: Rows
    width: int
    sharded: bool = False
    unit: int = 1
    routed: bool = False

    def local_rows(self, load: Load, shard: int | Shard = 1) -> float:
        """Rows on one rank."""
        return self.rows.of(load) * row_fraction(self.routed, as_shard(shard))

    def local_width(self, shard: int | Shard = 1) -> int:
        """Columns on one rank."""
        if not self.sharded:
            return self.width
        shard = as_shard(shard)
        return split(self.width, self.unit, shard.expert_tp if self.routed else shard.tp)

    def elements(self, load: Load, shard: int | Shard = 1) -> float:
        """Elements on one rank."""
        return self.local_rows(load, shard) * self.local_width(shard)


def split(width: int, unit: int, degree: int) -> int:
    """Width of one of `degree` equal parts made of whole units: ceil(units / degree) units."""
    return -(-width // (unit * degree)) * unit


def row_fraction(routed: bool, shard: Shard) -> float:
    """Rows on a rank, as part of the rows of the load (see `Shard`)."""
    return (shard.expert_tp / shard.tp if routed else 1.0) / shard.cp


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """y = x W^T (+ b). `column` splits W's outputs over tp ranks, `row` its inputs (Megatron, arXiv 1909.08053,
    section 3). `tied`: the weight is the token table of the same module, counted there."""

    name: str
    x: Value
    y: Value
    bias: bool
    trainable: bool
    parallel: Parallel = "none"
    tied: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Conv1d:
    """Convolution over the frames of each clip, padding (kernel - 1) / 2, with bias; never sharded."""

    name: str
    x: Value
    y: Value
    kernel: int
    stride: int
    trainable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """Layer norm (scale and shift) or RMS norm (scale) over each of `groups` equal parts of a row (heads for q and k);
    one scale [width / groups] serves all groups."""

    name: str
    x: Value
    y: Value
    kind: Literal["layer", "rms"]
    trainable: bool
    groups: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary embedding of each head by the row's position in its sequence; `dims`: of its last so many columns."""

    x: Value
    y: Value
    heads: int
    dims: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """softmax(q k^T / sqrt(head_dim)) v within each sequence, window, or between a sequence and its context.

    `pairs` counts query-key pairs; kv_heads < heads shares keys among heads (GQA). `value_dim`: width of a head of v
    and y where it is not `head_dim` (MLA). `sliding`: each row sees itself and the `window - 1` rows before it;
    otherwise windows are consecutive blocks.
    """

    q: Value
    k: Value
    v: Value
    y: Value
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    pairs: Rows
    window: int | None = None
    sliding: bool = False
    cross: bool = False
    value_dim: int | None = None

    @property
    def product_width(self) -> int:
        """Multiply-adds of a query-key pair in one head: q k^T, then the weighted sum of v."""
        return self.head_dim + (self.head_dim if self.value_dim is None else self.value_dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """Element-wise non-linearity."""

    kind: Literal["gelu", "silu"]
    x: Value
    y: Value


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Each column times a learned number (layer scale, arXiv 2103.17239)."""

    name: str
    x: Value
    y: Value
    trainable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiply:
    """Element-wise product."""

    a: Value
    b: Value
    y: Value


@dataclass(frozen=True, kw_only=True, slots=True)
class Add:
    """Element-wise sum."""

    a: Value
    b: Value
    y: Value


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """Rows of a table [size, width] by token id; the table is split over tp ranks by token id, in whole `unit`s."""

    name: str
    y: Value
    size: int
    trainable: bool
    unit: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassToken:
    """One learned row in front of every `period` rows, or of each sequence when `period` is None."""

    name: str
    x: Value
    y: Value
    period: int | None
    trainable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """Adds row i of a table to row i of each image or clip.

    size > 0: a stored table [size, width] that starts anew every `size` rows or sequence; 0: fixed sinusoids.
    `stretched`: row i of a sequence of n rows gets row i * size // n of the table.
    """

    name: str
    x: Value
    y: Value
    size: int
    trainable: bool
    stretched: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Interleave:
    """Places the rows of several inputs into one packed sequence, at positions that the microbatch gives.

    `keys` names each part's entry there: a producer module, or `text` for the module's own tokens.
    """

    parts: tuple[Value, ...]
    keys: tuple[str, ...]
    y: Value


@dataclass(frozen=True, kw_only=True, slots=True)
class DropClassToken:
    """Inverse of `ClassToken`: drops the first of every `period` rows, or of each sequence."""

    x: Value
    y: Value
    period: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeRows:
    """Concatenates `merge` neighbouring rows of a sequence; a remainder is dropped."""

    x: Value
    y: Value
    merge: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Averages `size` neighbouring rows of a sequence; a remainder is dropped."""

    x: Value
    y: Value
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Columns [start, start + size) of each of `groups` equal parts of a row, as a tensor of their own."""

    x: Value
    y: Value
    start: int
    groups: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinHeads:
    """Each head's columns of `a`, followed by the columns of `b` that all heads share (MLA's rotary key)."""

    a: Value
    b: Value
    y: Value
    heads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AddRows:
    """`a` with the rows of `b` added where the tokens of module `key` lie in the sequence (DeepStack, arXiv
    2406.04334)."""

    a: Value
    b: Value
    y: Value
    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK:
    """Experts of each token: the column numbers of the largest scores, integers without gradient."""

    x: Value
    y: Value


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Weights of the chosen experts from their scores, in fp32.

    softmax: over the chosen (Mixtral, Qwen3: equals softmax over all, chosen ones renormalised); softmax_all: over all
    experts, not renormalised (DeepSeek-V2); sigmoid: renormalised (DeepSeek-V3, arXiv 2412.19437, section 2.1.2);
    sigmoid_plain: not renormalised (Llama 4).
    """

    kind: Literal["softmax", "softmax_all", "sigmoid", "sigmoid_plain"]
    x: Value
    chosen: Value
    y: Value


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """Copies of each token's row for its experts, sorted by expert; with expert parallelism an all-to-all.

    `capacity`: every expert gets capacity * tokens * topk / experts rows; what is more is dropped, what is less is
    filled with zeros (GShard, arXiv 2006.16668). None: as many as the router sends. `imbalance`: rows of the busiest
    rank over the mean; counts are of the mean, seconds of the busiest (`Layer.imbalance`).
    """

    x: Value
    chosen: Value
    y: Value
    experts: int
    capacity: float | None = None
    imbalance: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedLinear:
    """One linear for each of `experts`, each on its own rows: [routed rows, in] -> [routed rows, out].

    Weights lie whole experts on ep ranks; `column` splits each one's outputs over etp ranks, `row` its inputs.
    """

    name: str
    x: Value
    chosen: Value
    y: Value
    experts: int
    trainable: bool
    parallel: Parallel
    capacity: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Combine:
    """Sum of each token's expert rows times their weights; with expert parallelism an all-to-all before it."""

    x: Value
    chosen: Value
    weights: Value
    y: Value
    experts: int
    capacity: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossEntropy:
    """Sum of token cross entropies in fp32, divided by the number of targets in the global batch: one number."""

    x: Value
    y: Value


Op = (
    Linear
    | Conv1d
    | Norm
    | Rope
    | Attention
    | Activation
    | Multiply
    | Add
    | Embedding
    | ClassToken
    | Positions
    | Interleave
    | DropClassToken
    | MergeRows
    | Pool
    | Scale
    | Slice
    | JoinHeads
    | AddRows
    | TopK
    | Route
    | Dispatch
    | GroupedLinear
    | Combine
    | CrossEntropy
)


def op_inputs(op: Op) -> tuple[Value, ...]:
    """The values an operator reads, raw inputs of the batch excluded when they are integers."""
    match op:
        case Attention():
            return (op.q, op.k, op.v)
        case Multiply() | Add() | JoinHeads() | AddRows():
            return (op.a, op.b)
        case Route() | Dispatch() | GroupedLinear():
            return (op.x, op.chosen)
        case Combine():
            return (op.x, op.chosen, op.weights)
        case Interleave():
            return op.parts
        case Embedding():
            return ()
        case _:
            return (op.x,)


def op_routed(op: Op) -> bool:
    """Whether the operator works on rows that were sent to experts."""
    return op.y.routed or any(value.routed for value in op_inputs(op))


def op_trainable(op: Op) -> bool:
    """Whether the operator has a parameter that is trained."""
    match op:
        case Linear() | GroupedLinear() | Conv1d() | Norm() | Scale() | Embedding() | ClassToken() | Positions():
            return op.trainable
        case _:
            return False
