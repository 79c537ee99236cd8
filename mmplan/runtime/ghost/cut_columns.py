"""Logits of which each tensor-parallel rank has its columns, in the hands of a model's own glue.

As rows (`cut_rows.py`): what glue holds has the whole shape, is NaN without memory, and carries the rank's columns.
Functions that compute every number of itself, choose rows or join dims of rows are followed; cross entropy is computed
of the parts. Whoever does anything else needs them whole: a recording says so, and the head then stays whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from mmplan.runtime.ghost.cut_rows import ALIKE, CHOICES, LOOKS


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FollowColumns:
    """size: how many columns there are.

    whole: is told that they are needed whole; what it raises ends a run.
    total: of a rank's columns [rows, columns] and labels, -100 where there is none, the sum of cross entropies.
    """

    size: int
    whole: Callable[[], None]
    total: Callable[[Tensor, Tensor], Tensor]


class CutColumns(Tensor):
    """[..., columns]. Attributes: local: the rank's."""

    local: Tensor
    follow: FollowColumns

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                seen = func(*args, **kwargs)
            if not isinstance(seen, Tensor):
                return seen
        first, others = (args or (None,))[0], tree_leaves((args[1:], kwargs))
        if isinstance(first, CutColumns) and not any(isinstance(leaf, CutColumns) for leaf in others):
            followed: Tensor | None = None
            if name in ALIKE and not any(isinstance(leaf, Tensor) for leaf in others):
                followed = cut_columns(func(first.local, *args[1:], **kwargs), first.follow)
            elif name in CHOICES:
                followed = _chosen(first, func, name, args[1:], kwargs)
            elif func is F.cross_entropy:
                followed = _cross_entropy(first, *args[1:], **kwargs)
            if followed is not None:
                return followed
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, CutColumns):
                leaf.follow.whole()
        args, kwargs = tree_map(_plain, (args, kwargs))
        return func(*args, **kwargs)


def cut_columns(local: Tensor, follow: FollowColumns) -> CutColumns:
    """What glue holds of a rank's columns."""
    shape = (*local.shape[:-1], follow.size)
    made = local.detach().new_full((), torch.nan).expand(shape).as_subclass(CutColumns)
    made.local, made.follow = local, follow
    return made


def _plain(value: Any) -> Any:
    """Of a recording, where one rank has all columns."""
    return value.local if isinstance(value, CutColumns) else value


def _chosen(x: CutColumns, func: Any, name: str, args: Any, kwargs: Any) -> CutColumns | None:
    """Other rows, or the same in another shape; None: that is not all that is asked for."""
    if kwargs or CHOICES[name](args, x.dim(), x.follow.size) is None:
        return None
    if name in ("view", "reshape"):
        shape = tuple(args[0]) if len(args) == 1 else tuple(args)
        args = ((*shape[:-1], x.local.shape[-1]),)
    return cut_columns(func(x.local, *args), x.follow)


def _cross_entropy(
    x: CutColumns,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """None: it is no mean or sum of plain cross entropies over rows."""
    known = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    if not known or label_smoothing or x.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return None
    counted = target.ne(ignore_index)
    total = x.follow.total(x.local, target.masked_fill(~counted, -100).to(x.local.device))
    return total / counted.sum() if reduction == "mean" else total
