"""Outputs of units whose rows lie on several ranks (context parallelism), in the hands of a model's own glue.

A rank has some rows; what the glue holds has the whole shape, is NaN without memory, and carries them along. Functions
that treat rows alike are followed on the rank's rows, choices of rows on their numbers, and the loss of the rows that a
rank has is summed over the ranks. Whoever does anything else to such an output needs it whole: a recording says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

# By name. The first two sets look at a tensor's form, or compute each number of itself and plain numbers alone.
LOOKS = {"__get__", "size", "dim", "numel", "is_floating_point", "is_complex", "stride", "data_ptr", "__len__"}
ALIKE = {"float", "half", "bfloat16", "double", "to", "contiguous", "clone", "tanh", "clamp"}
ALIKE |= {"mul", "div", "true_divide", "__mul__", "__rmul__", "__truediv__"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Follow:
    """What the rows are cut of.

    place: of each row of a sequence, where the rank has it; -1: another one has.
    whole: is told that the output is needed whole, as in the recording; what it raises ends a run.
    total: the sum of a loss over the ranks; None: nobody has a part of it, nor of the gradient of a weight in glue.
    """

    place: Tensor
    whole: Callable[[], None]
    total: Callable[[Tensor], Tensor] | None


class CutRows(Tensor):
    """[..., rows, width]. Attributes: local: the rank's rows, in the shape of the unit's output; ids: the number that
    each row had there, None: all in their order."""

    local: Tensor
    ids: Tensor | None
    follow: Follow

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                seen = func(*args, **kwargs)
            if not isinstance(seen, Tensor):
                return seen
        first, others = (args or (None,))[0], tree_leaves((args[1:], kwargs))
        if isinstance(first, CutRows) and not any(isinstance(leaf, CutRows) for leaf in others):
            plain = not any(isinstance(leaf, Tensor) for leaf in others)
            followed: Tensor | None = None
            if name in ALIKE and plain:
                followed = cut_rows(func(first.local, *args[1:], **kwargs), first.ids, first.follow)
            elif name in CHOICES:
                followed = _chosen(first, name, args[1:], kwargs)
            elif func is F.linear and first.follow.total is not None:
                followed = cut_rows(func(first.local, *args[1:], **kwargs), first.ids, first.follow)
            elif func is F.cross_entropy:
                followed = _cross_entropy(first, *args[1:], **kwargs)
            if followed is not None:
                return followed
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, CutRows):
                leaf.follow.whole()
        args, kwargs = tree_map(plain_of, (args, kwargs))
        return func(*args, **kwargs)


def cut_rows(local: Tensor, ids: Tensor | None, follow: Follow) -> CutRows:
    """What glue holds of a rank's rows. Args: ids: of the rows that are meant, in any shape; None: all."""
    leading = (*local.shape[:-2], follow.place.shape[0]) if ids is None else ids.shape
    made = local.detach().new_full((), torch.nan).expand(*leading, local.shape[-1]).as_subclass(CutRows)
    made.local, made.ids, made.follow = local, ids, follow
    return made


def plain_of(value: Any) -> Any:
    """A whole tensor without values in the place of cut rows; as it is everything else."""
    if not isinstance(value, CutRows):
        return value
    whole = value.ids is None and value.local.shape == value.shape  # in a recording, where one rank has all rows
    return value.local if whole else value.as_subclass(Tensor).contiguous()


def _chosen(x: CutRows, name: str, args: Sequence[Any], kwargs: Any) -> CutRows | None:
    """Other rows, or the same in another shape; None: that is not all that is asked for."""
    width = x.local.shape[-1]
    wanted = None if kwargs else CHOICES[name](args, x.dim(), width)
    if wanted is None:
        return None
    ids = _ids(x)
    reshaped = ids.flatten if name == "flatten" else ids.reshape  # numbers of rows may be copied where rows are viewed
    chosen = ids[wanted] if name == "__getitem__" else reshaped(*wanted)
    same = x.ids is None and torch.equal(chosen, ids)
    return cut_rows(x.local, None if same else chosen, x.follow)


def _ids(x: CutRows) -> Tensor:
    leading = x.shape[:-1]
    return torch.arange(leading.numel(), device=x.follow.place.device).view(leading) if x.ids is None else x.ids


def _index(args: Sequence[Any], dims: int, width: int) -> Any:
    """The same index without the last dim, of which all has to be taken."""
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if any(isinstance(one, list) for one in index):
        return None
    used = sum((one.dim() if one.dtype == torch.bool else 1) if isinstance(one, Tensor) else 1 for one in index
               if one is not None and one is not Ellipsis)  # fmt: skip
    full = (slice(None),) * (dims - used)
    at = next((i for i, one in enumerate(index) if one is Ellipsis), len(index))
    every = (*index[:at], *full, *index[at + 1 :])
    last = every[-1]
    whole = isinstance(last, slice) and last.indices(width) == (0, width, 1)
    return every[:-1] if whole else None


def _shape(args: Sequence[Any], dims: int, width: int) -> Any:
    shape = tuple(args[0]) if len(args) == 1 and isinstance(args[0], Sequence) else tuple(args)
    if not shape or not all(isinstance(size, int) for size in shape):
        return None
    return (shape[:-1],) if shape[-1] == width and len(shape) > 1 else None


def _flat(args: Sequence[Any], dims: int, width: int) -> Any:
    first = args[0] % dims if args else 0
    end = args[1] % dims if len(args) > 1 else dims - 1
    return (first, end) if end < dims - 1 else None


CHOICES: dict[str, Callable[[Sequence[Any], int, int], Any]] = {
    "__getitem__": _index,
    "view": _shape,
    "reshape": _shape,
    "flatten": _flat,
}


def _cross_entropy(
    x: CutRows,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The loss over all rows, of which each rank computes its own; None: it is no mean or sum over single rows."""
    known = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    if x.follow.total is None or not known or x.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return None
    place, ids = x.follow.place, _ids(x)
    sequence, row = ids // place.shape[0], place[ids % place.shape[0]]
    mine = (row >= 0).nonzero().squeeze(1)
    at = (sequence * x.local.shape[-2] + row)[mine]
    rows = x.local.reshape(-1, x.local.shape[-1]).index_select(0, at.to(x.local.device))
    own = F.cross_entropy(
        rows,
        target[mine.to(target.device)],
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    total = x.follow.total(own)
    return total / target.ne(ignore_index).sum() if reduction == "mean" else total
