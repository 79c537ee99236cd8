"""Which outputs of units, and which parameters, tensors in a model's glue are made of.

Results of torch functions between units inherit what their arguments are made of; a unit's outputs are sources anew.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from mmplan.errors import InputError
from mmplan.runtime.ghost.unit_rows import AttendedRow, attended_row

_READS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy"}
_LOOKS = {"__get__", "size", "dim", "numel", "is_floating_point", "stride", "data_ptr"}  # at a tensor's form alone
_LIKE_FIRST = {"zeros_like", "ones_like", "empty_like", "full_like"} | {  # of the first argument its form alone
    f"new_{name}" for name in ("zeros", "ones", "empty", "full", "tensor")
}
_LIKE_SECOND = {"expand_as", "view_as", "reshape_as", "type_as"}


@dataclass(frozen=True, slots=True, order=True)
class Source:
    """Leaf `slot` of what the call number `call` of a unit returned."""

    unit: str
    call: int
    slot: int


@dataclass(frozen=True, slots=True)
class Whole(Source):
    """Of a call of a module whose images ranks take in turn: a leaf that is made whole."""


class Flow(TorchFunctionMode):
    """Follows tensors through glue: which outputs of units, and which parameters, each is made of."""

    def __init__(self, parameters: Mapping[int, str]) -> None:
        super().__init__()
        self.inside = False
        self.touched: set[int] = set()  # by the unit that runs
        self.linears: dict[str, tuple[int, int]] = {}  # weight -> elements of input and output, in that unit
        self.attentions: list[AttendedRow] = []  # in that unit
        self.read: set[str] = set()  # parameters, by glue
        self._parameters = parameters
        self._of: dict[int, tuple[frozenset[Source], frozenset[str]]] = {}
        self._alive: list[Any] = []  # an id is a tensor's own only while it lives

    @contextmanager
    def unit(self) -> Iterator[None]:
        self.inside, self.touched, self.linears, self.attentions = True, set(), {}, []
        try:
            yield
        finally:
            self.inside = False

    def begin(self, unit: str, number: int, leaves: list[Any]) -> None:
        """The outputs of a call are made of nothing else."""
        for slot, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._keep(leaf, (frozenset({Source(unit, number, slot)}), frozenset()))

    def sources(self, values: Any) -> tuple[frozenset[Source], frozenset[str]]:
        """Of all tensors in some values together."""
        reads: frozenset[Source] = frozenset()
        parameters: frozenset[str] = frozenset()
        for leaf in tree_leaves(values):
            if id(leaf) in self._of:
                more, others = self._of[id(leaf)]
                reads, parameters = reads | more, parameters | others
            if id(leaf) in self._parameters:
                parameters |= {self._parameters[id(leaf)]}
        return reads, parameters

    def join(self, whole: Tensor, own: Tensor, source: Whole) -> frozenset[Source]:
        """A tensor that ranks make whole of what each has of it; what this is made of, outputs of units."""
        reads, parameters = self.sources(own)
        self._keep(whole, (reads | {source}, parameters))
        return of_units(reads)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.inside:
            if name not in _LOOKS:
                self.touched |= {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            result = func(*args, **kwargs)
            if func is F.linear and len(args) > 1 and id(args[1]) in self._parameters:
                self.linears[self._parameters[id(args[1])]] = args[0].numel(), result.numel()
            if func is F.scaled_dot_product_attention:
                self.attentions.append(attended_row(args, kwargs, result))
            return result
        valued = args[1:] if name in _LIKE_FIRST else args[:1] if name in _LIKE_SECOND else args
        reads, parameters = self.sources((valued, kwargs))
        if name not in _LOOKS:
            self.read |= parameters & {self._parameters.get(id(leaf)) for leaf in tree_leaves((args, kwargs))}
        if reads and name in _READS:
            raise InputError(_told_read(name, reads))
        try:
            result = func(*args, **kwargs)
        except NotImplementedError as error:  # a result whose shape depends on values: rows chosen by a mask
            if not reads:
                raise
            raise InputError(_told_read(name, reads)) from error
        if not (reads or parameters):
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf, reads, parameters)
        if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i"):
            for changed in (args[0], getattr(args[0], "_base", None)):
                if isinstance(changed, Tensor):
                    self._add(changed, reads, parameters)
        return result

    def _add(self, tensor: Tensor, reads: frozenset[Source], parameters: frozenset[str]) -> None:
        known = self._of.get(id(tensor), (frozenset(), frozenset()))
        self._keep(tensor, (known[0] | reads, known[1] | parameters))

    def _keep(self, tensor: Tensor, sources: tuple[frozenset[Source], frozenset[str]]) -> None:
        self._of[id(tensor)] = sources
        self._alive.append(tensor)


def of_units(reads: frozenset[Source]) -> frozenset[Source]:
    return frozenset(source for source in reads if not isinstance(source, Whole))


def joined_of(reads: frozenset[Source]) -> frozenset[Whole]:
    return frozenset(source for source in reads if isinstance(source, Whole))


def _told_read(name: str, reads: frozenset[Source]) -> str:
    """Where in the model's code a value is read that another stage may have to compute."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "torch" in Path(frame.f_code.co_filename).parts:
        frame = frame.f_back
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"
    units = ", ".join(sorted({source.unit for source in reads})[:3])
    return f"{place}: `{name}` reads the value of a tensor that {units} computes; another stage cannot know it"
