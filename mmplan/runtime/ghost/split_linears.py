"""A block of which a rank has its part of some linear layers, set up from outside: its own forward stays as it is.

The input of the layers split by columns passes a mark whose gradient is summed over the ranks, once for all that read
it; the output of the layer split by rows is summed. What lies between is computed on each rank's heads or columns:
whole numbers of heads that the block's code reads are divided, shapes that it takes from its input are narrowed, and
the gradients of parameters met there are summed.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmplan.runtime.ghost.linear_flow import Pair
from mmplan.runtime.held import Cut
from mmplan.runtime.tensor_sums import TensorRanks, sum_gradients, sum_parts
from mmplan.runtime.weight_store import Postponed


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """A pair that ranks share. `heads`: numbers that are divided, as (module within the block, attribute); `narrowed`:
    the module whose forward says the width of the whole where a rank has its part of it; empty: none does."""

    pair: Pair
    heads: tuple[tuple[str, str], ...] = ()
    narrowed: str = ""

    @property
    def around(self) -> str:
        """The module around the first layers."""
        return self.pair.columns[0].rpartition(".")[0]


def cuts_of(block: nn.Module, splits: Sequence[Split], degree: int) -> dict[str, Cut]:
    """Parameters within the block of which each rank has its part."""
    cuts = {}
    for split in splits:
        cuts[f"{split.pair.row}.weight"] = Cut(1, 1, degree)
        for name in split.pair.columns:
            for key, _ in block.get_submodule(name).named_parameters():
                cuts[f"{name}.{key}"] = Cut(0, split.pair.sections, degree)
    return cuts


def set_up(block: nn.Module, splits: Sequence[Split], ranks: TensorRanks) -> None:
    """Replace forwards of the block's modules; its parameters are this rank's parts."""
    for split in splits:
        for entry in split.pair.entries:
            entrance = Entrance(len(entry.readers), ranks)
            for name in entry.readers:
                linear = block.get_submodule(name)
                linear.forward = _behind(entrance, linear.forward)
        row = block.get_submodule(split.pair.row)
        row.forward = _summed(row, ranks)
        divide(block, split, ranks)
    sum_gradients_of(block, {name for split in splits for name in split.pair.between}, ranks)


def divide(block: nn.Module, split: Split, ranks: TensorRanks) -> None:
    """Numbers of heads and shapes that are those of all ranks become this rank's."""
    for path, attribute in split.heads:
        module = block.get_submodule(path)
        setattr(module, attribute, getattr(module, attribute) // ranks.degree)
    if split.narrowed:
        module, row = block.get_submodule(split.narrowed), block.get_submodule(split.pair.row)
        module.forward = _narrowed(module.forward, row.get_parameter("weight").shape[1], ranks.degree)


def sum_gradients_of(block: nn.Module, names: Set[str], ranks: TensorRanks) -> None:
    """Parameters within the block of which every rank has the whole, and a part of the gradient."""
    owners: dict[str, list[str]] = {}
    for name in sorted(names):  # in one order on all ranks
        owner, _, own = name.rpartition(".")
        owners.setdefault(owner, []).append(own)
    for owner, inside in owners.items():
        module = block.get_submodule(owner)
        module.forward = _with_summed_gradients(module, inside, ranks)


class Entrance:
    """Marks the input of layers split by columns: the same input once, however many of these layers read it."""

    def __init__(self, readers: int, ranks: TensorRanks) -> None:
        self._readers, self._ranks = readers, ranks
        self._last: tuple[Tensor, Tensor] | None = None  # an input and its mark, until all have read it
        self._left = 0

    def __call__(self, x: Tensor) -> Tensor:
        if self._last is None or self._last[0] is not x:
            self._last, self._left = (x, sum_gradients(x, self._ranks)), self._readers
        marked = self._last[1]
        self._left -= 1
        if self._left == 0:
            self._last = None
        return marked


def _behind(entrance: Entrance, forward: Callable[..., Any]) -> Callable[[Tensor], Any]:
    return lambda x: forward(entrance(x))


def _summed(row: nn.Module, ranks: TensorRanks) -> Callable[[Tensor], Tensor]:
    """Its bias is added behind the sum, once; its weight's gradient may be postponed."""
    product = product_of(row)

    def forward(x: Tensor) -> Tensor:
        total = sum_parts(product(x), ranks)
        bias = dict(row.named_parameters()).get("bias")
        return total if bias is None else total + bias

    return forward


def product_of(row: nn.Module) -> Callable[[Tensor], Tensor]:
    """What a layer makes without its bias."""
    postponed = row.forward
    return postponed.product if isinstance(postponed, Postponed) else partial(_product, row)


def _product(row: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, row.get_parameter("weight"))


def _narrowed(forward: Callable[..., Any], width: int, degree: int) -> Callable[..., Any]:
    """Args: width: of this rank's part of what the row reads."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with _NarrowShapes(width, degree):
            return forward(*args, **kwargs)

    return called


class _NarrowShapes(TorchFunctionMode):
    """Where code joins heads to the width of its input, which is that of all ranks' heads, it joins this rank's."""

    def __init__(self, width: int, degree: int) -> None:
        super().__init__()
        self._width, self._degree = width, degree

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.reshape, Tensor.view, torch.reshape) and not kwargs:
            shape = args[1] if isinstance(args[1], tuple | list) else args[1:]
            own = (*shape[:-1], self._width)
            if shape[-1] == self._width * self._degree and math.prod(own) == args[0].numel():
                return func(args[0], own)
        return func(*args, **(kwargs or {}))


def _with_summed_gradients(module: nn.Module, names: Sequence[str], ranks: TensorRanks) -> Callable[..., Any]:
    original, inside = module.forward, False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return original(*args, **kwargs)
        inside = True
        try:
            shared = {name: sum_gradients(module.get_parameter(name), ranks) for name in names}
            return torch.func.functional_call(module, shared, args, kwargs)
        finally:
            inside = False

    return forward


def model_cuts(splits_of: Mapping[str, Sequence[Split]], model: nn.Module, degree: int) -> dict[str, Cut]:
    """The same of a model's parameters. Args: splits_of: by unit."""
    return {
        f"{unit}.{name}": cut
        for unit, splits in splits_of.items()
        for name, cut in cuts_of(model.get_submodule(unit), splits, degree).items()
    }
