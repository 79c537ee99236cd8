"""The few operators a layer is made of: a small intermediate form that costs and torch modules are both derived from.

A layer is a list of operators over named values (packed rows, no padding). Every question about a layer, such as its
FLOPs, what autograd keeps of it, the bytes it moves, is one rule per operator in `counts.py` and `traffic.py`;
`runtime/layers.py` runs the same list in torch.
"""

from dataclasses import dataclass
from typing import Literal

from mmplan.cost_models.delta_ops import CausalConv, DeltaRule
from mmplan.cost_models.expert_ops import Combine, Dispatch, GroupedLinear, Route, TopK
from mmplan.cost_models.rank_ops import FromExperts, JoinRows, OwnRows, SumGradients, SumParts, ToExperts
from mmplan.cost_models.recorded_ops import Entered, HeldWeights, RecordedProduct, RecordedRest
from mmplan.cost_models.values import Parallel, Rows, Value


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
class Conv2d:
    """Convolution of kernel 3, stride 2 and padding 1 over frames and mel bins of each chunk of `frames` rows.

    A row holds channels * bins numbers, channel by channel: [chunks * frames, inputs * bins] -> half of both; bias.
    """

    name: str
    x: Value
    y: Value
    inputs: int
    outputs: int
    frames: int
    trainable: bool

    @property
    def bins(self) -> int:
        """Mel bins that are left behind it."""
        return self.y.width // self.outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolution:
    """A kernel of `taps` rows over an image, a clip or a video, within each of `groups` of columns; never sharded.

    The rows of y say what its strides leave; transposed, each row of x gives several. A depthwise one does a few
    multiply-adds per number: it takes the time of its bytes.
    """

    name: str
    x: Value
    y: Value
    taps: int
    groups: int
    bias: bool
    trainable: bool
    transposed: bool = False

    @property
    def inner(self) -> int:
        """Numbers that each product of a row sums."""
        return self.taps * self.x.width // self.groups


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
    bias: bool = True  # of a layer norm


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
    otherwise windows are consecutive blocks. `kept_apart`: another operator counts what it keeps.
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
    kept_apart: bool = False

    @property
    def product_width(self) -> int:
        """Multiply-adds of a query-key pair in one head: q k^T, then the weighted sum of v."""
        return self.head_dim + (self.head_dim if self.value_dim is None else self.value_dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """Element-wise non-linearity."""

    kind: Literal["gelu", "silu", "sigmoid"]
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
class Stored:
    """Passes rows on and holds `size` numbers whose arithmetic is not counted; their gradient is zero."""

    name: str
    x: Value
    y: Value
    size: int
    trainable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiply:
    """Element-wise product; with `groups` b has one column for each of so many equal parts of a row of a."""

    a: Value
    b: Value
    y: Value
    groups: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Add:
    """Element-wise sum."""

    a: Value
    b: Value
    y: Value


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """Rows of a table [size, width] by token id; the table is split over tp ranks by token id, in whole `unit`s.
    `tied`: it is another module's and counted there."""

    name: str
    y: Value
    size: int
    trainable: bool
    unit: int = 1
    tied: bool = False


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
class CrossEntropy:
    """Sum of token cross entropies in fp32, divided by the number of targets in the global batch: one number."""

    x: Value
    y: Value


Op = (
    Linear
    | Conv1d
    | Conv2d
    | Convolution
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
    | Stored
    | CausalConv
    | DeltaRule
    | SumParts
    | SumGradients
    | ToExperts
    | FromExperts
    | OwnRows
    | JoinRows
    | CrossEntropy
    | HeldWeights
    | Entered
    | RecordedProduct
    | RecordedRest
)


def op_inputs(op: Op) -> tuple[Value, ...]:
    """The values an operator reads, raw inputs of the batch excluded when they are integers."""
    match op:
        case Linear() | Norm():  # most operators, asked for millions of times
            return (op.x,)
        case Attention():
            return (op.q, op.k, op.v)
        case Multiply() | Add() | JoinHeads() | AddRows():
            return (op.a, op.b)
        case Route() | Dispatch() | GroupedLinear() | ToExperts():
            return (op.x, op.chosen)
        case Combine():
            return (op.x, op.chosen, op.weights)
        case DeltaRule():
            return (op.q, op.k, op.v, op.gate, op.step)
        case Interleave():
            return op.parts
        case Embedding() | HeldWeights():
            return ()
        case Entered() | RecordedProduct():
            return op.inputs
        case RecordedRest():
            return (*op.inputs, op.weights)
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
        case Conv2d() | Convolution() | Stored() | CausalConv() | DeltaRule():
            return op.trainable
        case HeldWeights() | RecordedProduct():
            return op.trainable
        case SumParts():
            return op.bias and op.trainable
        case _:
            return False
