"""A block on a tensor-parallel rank's rows (sequence parallelism), set up from outside: its own forward stays as it is.

What the block is given is the rank's rows. Before layers split by columns the rows of all ranks come together, for
these layers alone or for the whole module around them, whose code may read shapes; behind the layer split by rows each
rank has its rows of the sum (Megatron, arXiv 2205.05198, section 4.2.2). Parameters of which every rank has the whole
see some rows or some columns: their gradients are summed. Autograd keeps a rank's rows of what layers split by columns
read, and gathers once more where their weights are trained.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from mmplan.runtime.ghost.cut_rows import CutRows
from mmplan.runtime.ghost.linear_flow import Entry
from mmplan.runtime.ghost.split_linears import Entrance, Split, divide, product_of, sum_gradients_of
from mmplan.runtime.sequence_rows import SequenceRows, WholeRows, cut_rows, sum_to_rows, whole_rows
from mmplan.runtime.tensor_sums import TensorRanks, sum_parts
from mmplan.runtime.weight_store import Postponed, WeightStore


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceWay:
    """How a unit is run on a rank's rows. `cut`: arguments, by position, of which it is given these; `around`: of each
    of its splits the argument of the module around the first layers that is gathered; None: what the layers read is."""

    cut: frozenset[int]
    around: tuple[int | None, ...]

    def local(self, entry: Entry) -> bool:
        """Whether layers read what is made of a rank's rows."""
        return bool(entry.made_of & self.cut)


@dataclass(frozen=True, slots=True, eq=False)
class RowsOf:
    """The rows of a sequence that a tensor-parallel rank has, along the last dim but one of any tensor."""

    ranks: TensorRanks

    def own(self, rows: int) -> SequenceRows:
        return SequenceRows(rows, self.ranks.degree, self.ranks.index)

    def place(self, rows: int, device: torch.device) -> Tensor:
        """Of each row, where this rank has it, -1 elsewhere."""
        place, (first, end) = torch.full((rows,), -1, device=device), self.own(rows).ends
        place[first:end] = torch.arange(end - first, device=device)
        return place

    def cut(self, x: Tensor, rows: int) -> Tensor:
        """Of what all ranks have alike this rank's rows; gradients are gathered."""
        return self._along(x, lambda flat: cut_rows(flat, self.own(rows), self.ranks))

    def whole(self, x: Tensor, rows: int) -> Tensor:
        """All rows, for what all ranks compute alike."""
        return self._along(x, lambda flat: whole_rows(flat, self.own(rows), self.ranks))

    def gathered(self, x: Tensor, rows: int) -> Tensor:
        """All rows, for what each rank computes a part of: gradients are summed."""
        return self._along(x, lambda flat: WholeRows(self.own(rows), self.ranks, 0).of(flat))

    def summed(self, x: Tensor, rows: int) -> Tensor:
        """This rank's rows of the sum of all ranks' `x`."""
        return self._along(x, lambda flat: sum_to_rows(flat, self.own(rows), self.ranks))

    def again(self, x: Tensor, rows: int) -> Tensor:
        """All rows once more, in a backward."""
        return self._along(x, lambda flat: WholeRows(self.own(rows), self.ranks, 1).again(flat))

    @staticmethod
    def _along(x: Tensor, of_rows: Callable[[Tensor], Tensor]) -> Tensor:
        first = x.movedim(-2, 0)
        result = of_rows(first.reshape(first.shape[0], -1))
        return result.view(result.shape[0], *first.shape[1:]).movedim(0, -2)


class Gathered:
    """All rows of a tensor, while a unit runs, and a rank's own, which alone are kept."""

    def __init__(self, own: Tensor, rows: RowsOf, count: int) -> None:
        self.whole: Tensor | None = rows.gathered(own, count)
        self.own, self._rows, self._count = own.detach(), rows, count
        self.readers = 0  # that will ask for all rows once more
        self._again: Tensor | None = None

    def again(self) -> Tensor:
        """All rows in a backward, for one reader after the other."""
        if self._again is None:
            self._again = self._rows.again(self.own, self._count)
        again, self.readers = self._again, self.readers - 1
        if not self.readers:
            self._again = None
        return again


@dataclass(slots=True, eq=False)
class AtWork:
    """What modules inside of a unit have to know while it runs. `gathered`: by them; `kept_own`: names of layers that
    have read such tensors as they are."""

    rows: RowsOf
    way: SequenceWay | None = None
    count: int = 0
    gathered: list[Gathered] = field(default_factory=list)
    kept_own: set[str] = field(default_factory=set)

    def gather(self, own: Tensor) -> Tensor:
        self.gathered.append(Gathered(own, self.rows, self.count))
        assert self.gathered[-1].whole is not None
        return self.gathered[-1].whole

    def end(self) -> None:
        for one in self.gathered:
            one.whole = None
        self.way, self.gathered = None, []


def on_sequence_rows(
    forward: Callable[..., Any], args: Any, kwargs: Any, way: SequenceWay, count: int, at: AtWork
) -> tuple[Callable[..., Any], Any, Any]:
    """The forward of a unit that is set up, and its arguments cut to the rank's rows.

    Raises:
        ValueError: an argument has another number of rows.
    """
    leaves, spec = tree_flatten((args, kwargs))
    for position in way.cut:
        leaf = leaves[position]
        if isinstance(leaf, CutRows):
            leaves[position] = leaf.local
        elif leaf.shape[-2] == count:
            leaves[position] = at.rows.cut(leaf, count)
        else:
            raise ValueError(f"argument {position} has the shape {tuple(leaf.shape)}, and the sequence {count} rows")

    def run(*args: Any, **kwargs: Any) -> Any:
        at.way, at.count = way, count
        try:
            return forward(*args, **kwargs)
        finally:
            at.end()

    return run, *tree_unflatten(leaves, spec)


def set_up_rows(block: nn.Module, splits: Sequence[Split], summed: Set[str], at: AtWork) -> None:
    """Replace forwards of the block's modules, whose parameters are this rank's parts. Args: summed: names of
    parameters within the block whose gradients are."""
    for index, split in enumerate(splits):
        for entry in split.pair.entries:
            shared = _Shared(entry, index, at)
            for name in entry.readers:
                linear = block.get_submodule(name)
                linear.forward = partial(_reading, name, linear, linear.forward, shared, at)
        row = block.get_submodule(split.pair.row)
        row.forward = partial(_giving, row, product_of(row), split, at)
        divide(block, split, at.rows.ranks)
        around = block.get_submodule(split.around)
        around.forward = partial(_around, around.forward, index, at)
    sum_gradients_of(block, summed, at.rows.ranks)


class _Shared:
    """What some layers split by columns read, made ready once for all of them."""

    def __init__(self, entry: Entry, split: int, at: AtWork) -> None:
        self._entry, self._split, self._at = entry, split, at
        self._mark = Entrance(len(entry.readers), at.rows.ranks)
        self._last: tuple[Tensor, Tensor] | None = None
        self._left = 0

    def __call__(self, x: Tensor) -> Tensor:
        way = self._at.way
        assert way is not None
        if not way.local(self._entry):
            return self._mark(x)
        if way.around[self._split] is not None:
            return x
        if self._last is None or self._last[0] is not x:
            self._last, self._left = (x, self._at.gather(x)), len(self._entry.readers)
        whole = self._last[1]
        self._left -= 1
        if self._left == 0:
            self._last = None
        return whole


def _reading(
    name: str, linear: nn.Module, forward: Callable[[Tensor], Tensor], shared: _Shared, at: AtWork, x: Tensor
) -> Tensor:
    """A layer split by columns."""
    whole = shared(x)
    known = next((one for one in at.gathered if one.whole is whole), None)
    if known is None:
        return forward(whole)
    at.kept_own.add(name)
    parameters = dict(linear.named_parameters())
    weight = parameters["weight"]
    known.readers += weight.requires_grad and torch.is_grad_enabled()
    store = forward.store if isinstance(forward, Postponed) else None
    result: Tensor = _LinearOfGathered.apply(whole, weight, parameters.get("bias"), known, linear, store)  # type: ignore[no-untyped-call]
    return result


def _giving(row: nn.Module, product: Callable[[Tensor], Tensor], split: Split, at: AtWork, x: Tensor) -> Tensor:
    """The layer split by rows; its bias is added behind the sum, once."""
    assert at.way is not None
    if any(at.way.local(entry) for entry in split.pair.entries):
        total = at.rows.summed(product(x), at.count)
    else:
        total = sum_parts(product(x), at.rows.ranks)
    bias = dict(row.named_parameters()).get("bias")
    return total if bias is None else total + bias


def _around(forward: Callable[..., Any], split: int, at: AtWork, *args: Any, **kwargs: Any) -> Any:
    position = None if at.way is None else at.way.around[split]
    if position is None:
        return forward(*args, **kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    leaves[position] = at.gather(leaves[position])
    args, kwargs = tree_unflatten(leaves, spec)
    return forward(*args, **kwargs)


class _LinearOfGathered(torch.autograd.Function):
    """x W^T + b, of which a rank keeps its own rows of x. Weight gradients may be postponed (`weight_store.py`)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gathered: Gathered,
        linear: nn.Linear,
        store: WeightStore | None,
    ) -> Tensor:
        ctx.save_for_backward(gathered.own, weight)
        ctx.gathered, ctx.linear, ctx.store = gathered, linear, store
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (_, weight), gathered, linear, store = ctx.saved_tensors, ctx.gathered, ctx.linear, ctx.store
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_x = gradient @ weight if needs_x else None
        x = gathered.again() if needs_weight else None
        if x is not None and store is not None and store.takes(linear, x, gradient, bias=needs_bias):
            return of_x, None, None, None, None, None
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_weight = None if x is None else rows.t() @ x.reshape(-1, x.shape[-1])
        of_bias = rows.sum(0) if needs_bias else None
        return of_x, of_weight, of_bias, None, None, None
