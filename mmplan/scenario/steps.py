"""Layers that are no usual transformer block, as steps: each reads what the last one gave.

Convolutional towers, conformers, query transformers, necks and resamplers are lists of these few steps. Operators, and
with them FLOPs, parameters and bytes, follow in `cost_models/step_ops.py` (docs/decisions/010).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias

Function = Literal["gelu", "silu", "sigmoid"]
NormKind = Literal["layer", "rms"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """One linear to `width`."""

    what: Literal["dense"] = "dense"
    width: int
    bias: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolve:
    """A convolution whose kernel has `taps` positions, over `groups` of channels. Strides make one row of `joins` rows;
    scaling before it, or a `transposed` stride, makes `spreads` rows of one."""

    what: Literal["convolve"] = "convolve"
    width: int
    taps: int
    groups: int = 1
    bias: bool = True
    joins: int = 1
    spreads: int = 1
    transposed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Normed:
    """A norm over each row; a batch or group norm with weights counts as `layer`."""

    what: Literal["normed"] = "normed"
    kind: NormKind = "layer"
    bias: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Active:
    what: Literal["active"] = "active"
    function: Function = "gelu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Halve:
    """The first half of each row times a function of the second (GLU)."""

    what: Literal["halve"] = "halve"
    function: Function = "sigmoid"


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """`rows` neighbouring rows become one, side by side."""

    what: Literal["join"] = "join"
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Average:
    """`rows` neighbouring rows become their mean or maximum."""

    what: Literal["average"] = "average"
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Widen:
    """Each row `times` times beside itself: one stream becomes several (hyper-connections, arXiv 2409.19606)."""

    what: Literal["widen"] = "widen"
    times: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """The sum or mean of `parts` equal parts of each row."""

    what: Literal["fold"] = "fold"
    parts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Each row becomes its `parts` equal parts, one after the other; `Join` undoes it."""

    what: Literal["split"] = "split"
    parts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Aside:
    """Work on the rows whose result does not take their place: biases of attention's scores, a second reading."""

    what: Literal["aside"] = "aside"
    steps: "tuple[Step, ...]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """The rows, and beside each what the steps make of it."""

    what: Literal["beside"] = "beside"
    steps: "tuple[Step, ...]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Doubled:
    """As many learned rows stand behind those that are read; their numbers are kept elsewhere."""

    what: Literal["doubled"] = "doubled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Numbers whose arithmetic is not counted."""

    what: Literal["kept"] = "kept"
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Attend:
    """Attention as the module's `transformer` has it, to its own rows or, `across`, to those that the module reads.
    `shared`: keys and values are those of an earlier block; their bytes count again."""

    what: Literal["attend"] = "attend"
    across: bool = False
    shared: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp:
    """The MLP of the module's `transformer`, or one of another width."""

    what: Literal["mlp"] = "mlp"
    ffn: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The experts of the module's `transformer`, on rows of width `latent` between two linears where it is given."""

    what: Literal["experts"] = "experts"
    latent: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """Mamba 2's mixer (arXiv 2405.21060): a state [state, head_dim] per head, keys and queries of `groups` of heads, a
    causal convolution of `kernel` rows on them and on values, a gate."""

    what: Literal["scan"] = "scan"
    heads: int
    head_dim: int
    state: int
    groups: int
    kernel: int
    chunk: int
    bias: bool = False
    conv_bias: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Choose:
    """An index of its own scores all rows for each row, so that attention reads the best alone; or every `pool` rows
    together. `low`: its queries are made of rows so wide, those that attention's queries pass."""

    what: Literal["choose"] = "choose"
    heads: int
    head_dim: int
    pool: int = 1
    low: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Usual:
    """The whole block as the module's `transformer` has it."""

    what: Literal["usual"] = "usual"


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """A row of a table for each token id, in place of what went before."""

    what: Literal["look"] = "look"
    size: int
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """Two lists of steps read the same rows; their results are added or multiplied. A narrower right side is added to
    as many of the left's columns; in a product it has one number for each of as many equal parts of the left."""

    what: Literal["fork"] = "fork"
    left: "tuple[Step, ...]"
    right: "tuple[Step, ...]"
    product: bool = False


Step: TypeAlias = (
    Dense
    | Convolve
    | Normed
    | Active
    | Halve
    | Join
    | Average
    | Widen
    | Fold
    | Split
    | Aside
    | Beside
    | Doubled
    | Kept
    | Attend
    | Mlp
    | Experts
    | Scan
    | Choose
    | Usual
    | Look
    | Fork
)
Steps: TypeAlias = tuple[Step, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Layers of a module that steps describe.

    Attributes:
        front: in place of the usual first layer (patches, frames), of a projector, or of nothing (an `encoder`).
        raw_width: numbers of a row at its start, where raw data enter: channels of a pixel, bins of a frame.
        blocks: in place of the usual blocks, the steps of `times` blocks after another; the last serve all that follow.
        queries: learned rows that stand for each sequence which an `encoder` reads, or each `window` rows of one.
        together: keys of queries, or of a language model's cross layers, are those of what they read and their own (a
            perceiver, arXiv 2103.03206; T5Gemma 2).
        streams: the rows that each block reads are so many times as wide as the blocks, () where all are once; what
            the last block gives is as wide as a block.
    """

    front: Steps = ()
    raw_width: int | None = None
    blocks: tuple[tuple[int, Steps], ...] = ()
    queries: int = 0
    window: int | None = None
    together: bool = False
    streams: tuple[int, ...] = ()

    @property
    def scans(self) -> bool:
        """Whether a state runs through all rows of a sequence."""
        return any(uses(steps, Scan) for _, steps in self.blocks)

    def read_by_queries(self, rows: int) -> tuple[int, int]:
        """Query rows of a sequence of so many rows, and key rows that each of them attends to."""
        window = rows if self.window is None else min(self.window, rows)
        count = 1 if self.window is None else -(-rows // self.window)
        return count * self.queries, window + (self.queries if self.together else 0)

    def block(self, index: int) -> Steps:
        """Steps of block `index`, () where it is a usual one."""
        last: Steps = ()
        for times, last in self.blocks:
            if index < times:
                return last
            index -= times
        return last


def residual(*steps: Step) -> Fork:
    """Rows plus what the steps make of them."""
    return Fork(left=(), right=steps)


def conv(width: int, side: int, *, stride: int = 1, groups: int = 1, bias: bool = True) -> Convolve:
    """A convolution with a square kernel and stride over images."""
    return Convolve(width=width, taps=side**2, groups=groups, bias=bias, joins=stride**2)


def row_ratio(steps: Iterable[Step]) -> Fraction:
    """Rows that steps give of one row."""
    ratio = Fraction(1)
    for step in steps:
        match step:
            case Convolve():
                ratio *= Fraction(step.spreads, step.joins)
            case Join() | Average():
                ratio /= step.rows
            case Split():
                ratio *= step.parts
            case Doubled():
                ratio *= 2
            case Fork():
                ratio *= row_ratio(step.left)
    return ratio


def width_after(steps: Iterable[Step], width: int) -> int:
    """Width of the rows that steps give of rows so wide; `Attend`, `Mlp` and `Usual` keep it."""
    for step in steps:
        match step:
            case Dense() | Convolve() | Look():
                width = step.width
            case Halve():
                width //= 2
            case Join():
                width *= step.rows
            case Widen():
                width *= step.times
            case Fold() | Split():
                width //= step.parts
            case Beside():
                width += width_after(step.steps, width)
            case Fork():
                width = width_after(step.left, width)
    return width


def numbers(steps: Iterable[Step], width: int) -> int:
    """Numbers that steps on rows so wide hold; ValueError for those whose sizes are a module's."""
    total = 0
    for step in steps:
        match step:
            case Dense():
                total += (width + step.bias) * step.width
            case Convolve():
                total += (width // step.groups * step.taps + step.bias) * step.width
            case Normed():
                total += width * (2 if step.kind == "layer" and step.bias else 1)
            case Kept():
                total += step.size
            case Fork():
                total += numbers(step.left, width) + numbers(step.right, width)
            case Aside() | Beside():
                total += numbers(step.steps, width)
            case Active() | Halve() | Join() | Average() | Widen() | Fold() | Split() | Doubled():
                pass
            case _:
                raise ValueError(f"the numbers of '{step.what}' are those of a module")
        width = width_after((step,), width)
    return total


def uses(steps: Iterable[Step], *kinds: type) -> bool:
    """Whether one of the steps, inner ones included, is of these kinds."""
    return any(
        isinstance(step, kinds)
        or (isinstance(step, Fork) and uses((*step.left, *step.right), *kinds))
        or (isinstance(step, Aside | Beside) and uses(step.steps, *kinds))
        for step in steps
    )
