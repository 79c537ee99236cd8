"""Which arguments and outputs of a unit have a row for each position of a sequence."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from mmplan.runtime.ghost.half_meta import META


def rows_of_call(arguments: Sequence[Any], sources: Callable[[Any], tuple[Any, Any]]) -> tuple[int, int] | None:
    """The position of the first argument that units have made, and how many rows it has. Args: sources: of a tensor,
    the outputs of units it is made of, and something else."""
    for position, leaf in enumerate(arguments):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1 and sources(leaf)[0]:
            return position, leaf.shape[-2]
    return None


def has_rows(leaf: Any, rows: int) -> bool:
    """Whether a unit's output has a row for each row of that argument."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1 and leaf.shape[-2] == rows


def pattern_of(arguments: Any) -> tuple[Any, ...]:
    """What calls of one form may differ in beside sizes: which arguments are tensors, and of how many dims."""
    leaves, spec = tree_flatten(arguments)
    kinds = [
        (leaf.dim(), leaf.is_floating_point(), leaf.dtype == torch.bool) if isinstance(leaf, Tensor) else None
        for leaf in leaves
    ]
    return str(spec), tuple(kinds)


def shapes_of(arguments: Any) -> list[Any]:
    return [tuple(leaf.shape) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def attended(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a call of `scaled_dot_product_attention`."""
    given = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs)
    return given["query"], given["key"], given["value"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttendedRow:
    """Of a call of `scaled_dot_product_attention`: bytes of a row of queries, of keys and values, and of results, and
    how many heads queries and keys have; 0: there are no heads."""

    queries: int
    keys: int
    results: int
    query_heads: int
    key_heads: int


def attended_row(args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> AttendedRow:
    query, key, value = attended(args, kwargs)
    return AttendedRow(
        queries=query.nbytes // max(1, query.shape[-2]),
        keys=(key.nbytes + value.nbytes) // max(1, key.shape[-2]),
        results=result.nbytes // max(1, result.shape[-2]),
        query_heads=heads_of(query),
        key_heads=heads_of(key),
    )


def heads_of(x: Tensor) -> int:
    """[batch, heads, rows, width] -> heads; 0 in another form."""
    return x.shape[1] if x.dim() == 4 else 0


def as_shape(value: Any) -> Any:
    """A tensor without storage in the place of one; nothing in the place of what is no tensor."""
    return torch.empty_like(value, device=META) if isinstance(value, Tensor) else None
