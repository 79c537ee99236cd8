"""A unit run on the rows that a context-parallel rank has: its own forward stays as it is.

Arguments with a dim of the sequence are cut to the rank's rows, in every such dim. Where the forward reaches torch's
`scaled_dot_product_attention` over the sequence, keys and values of all rows come together as the plan says: around a
ring, gathered, or rows are exchanged for heads; and the mask is that of the whole argument. Everything else computes
each row of itself; a trial says so (`row_trials.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from mmplan.runtime.block_attention import Pair
from mmplan.runtime.context import OwnRowsOf, rows_of, whole_states
from mmplan.runtime.ghost.cut_rows import CutRows
from mmplan.runtime.ghost.unit_rows import heads_of
from mmplan.runtime.network import all_reduce
from mmplan.runtime.ring_attention import ring_attention
from mmplan.runtime.row_heads import to_heads, to_rows
from mmplan.runtime.row_pairs import pairs_under, pairs_with
from mmplan.runtime.tensor_sums import Peers, TensorRanks
from mmplan.scenario.technique import ContextParallel


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """A call of `scaled_dot_product_attention` in a unit.

    over_rows: its keys are those of the sequence; mask: the argument that is its mask; made_of, keys_of: arguments, by
    position, and parameters that it is computed of, and that its keys and values are.
    """

    over_rows: bool
    mask: int | None
    made_of: frozenset[str | int]
    keys_of: frozenset[str | int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWay:
    """How a unit is run on some rows. Attributes: dims: of arguments, by position, that the sequence lies along,
    counted from the last."""

    dims: Mapping[int, tuple[int, ...]]
    attentions: tuple[Attention, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RowRanks:
    """The ranks that have other rows; `ranks` counts what they exchange."""

    ranks: TensorRanks
    peers: Peers

    def way(self, query_heads: int, key_heads: int) -> ContextParallel:
        """How keys and values of an attention of so many heads come together: those that cannot be dealt out pass
        around."""
        way, cp = self.ranks.context_parallel, self.peers.degree
        divide = min(query_heads, key_heads) > 0 and query_heads % cp == key_heads % cp == 0
        return "ring" if way == "all-to-all" and not divide else way

    def own(self, rows: int) -> OwnRowsOf:
        return rows_of([rows], self.peers)

    def place(self, rows: int, device: torch.device) -> Tensor:
        """Of each row, where this rank has it, -1 elsewhere."""
        everything = torch.full((rows,), -1, device=device)
        mine, at = self.own(rows).among(torch.arange(rows, device=device))
        everything[mine] = at
        return everything

    def whole(self, x: Tensor, rows: int) -> Tensor:
        """[..., own rows, width] -> all rows in their order; gradients are summed over the ranks. Collective."""
        first = x.movedim(-2, 0)
        everything = whole_states(first.flatten(1), [rows], self.ranks, self.peers)
        return everything.view(rows, *first.shape[1:]).movedim(0, -2)

    def total(self, x: Tensor) -> Tensor:
        """The sum of a number over the ranks, and of its gradient. Collective."""
        result: Tensor = _Total.apply(x, self)  # type: ignore[no-untyped-call]
        return result


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: RowRanks) -> Tensor:
        ctx.ranks = ranks
        return _summed(x, ranks, backward=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _summed(gradients[0], ctx.ranks, backward=True), None


def _summed(x: Tensor, ranks: RowRanks, *, backward: bool) -> Tensor:
    total = x.clone()
    all_reduce(total, ranks.peers.group)
    ranks.ranks.count(total, backward=backward)
    return total


def cut(x: Tensor, dims: Sequence[int], own: OwnRowsOf) -> Tensor:
    """The rank's rows along some dims; what lies behind their end is zero, and seen by masks."""
    fill = True if x.dtype == torch.bool else 0
    for dim in dims:
        x = own.take(x.movedim(dim, 0), fill).movedim(0, dim)
    return x.contiguous()


def on_own_rows(
    forward: Callable[..., Any], args: Any, kwargs: Any, way: RowWay, rows: int, ranks: RowRanks
) -> tuple[Callable[..., Any], Any, Any]:
    """The forward of a unit on a rank's rows, and its arguments so cut.

    Raises:
        ValueError: an argument that lies along the sequence has another length.
    """
    own = ranks.own(rows)
    leaves, spec = tree_flatten((args, kwargs))
    given = [leaf.local if isinstance(leaf, CutRows) else leaf for leaf in leaves]
    for position, dims in way.dims.items():
        if isinstance(leaves[position], CutRows):
            continue
        if any(leaves[position].shape[dim] != rows for dim in dims):
            shape = tuple(leaves[position].shape)
            raise ValueError(f"argument {position} has the shape {shape}, and the sequence has {rows} rows")
        given[position] = cut(leaves[position], dims, own)
    masks = {a.mask: leaves[a.mask] for a in way.attentions if a.mask is not None}

    def run(*args: Any, **kwargs: Any) -> Any:
        with _OverRows(way.attentions, masks, own, ranks):
            return forward(*args, **kwargs)

    return run, *tree_unflatten(given, spec)


class _OverRows(TorchFunctionMode):
    """Attention of a rank's rows to all rows, where a unit's forward asks for that of its rows alone."""

    def __init__(
        self, attentions: Sequence[Attention], masks: Mapping[int, Tensor], own: OwnRowsOf, ranks: RowRanks
    ) -> None:
        super().__init__()
        self._attentions, self._masks, self._own, self._ranks = list(attentions), masks, own, ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        attention = self._attentions.pop(0)
        return self._attended(attention, *args, **kwargs) if attention.over_rows else func(*args, **kwargs)

    def _attended(
        self,
        attention: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        mask = None if attention.mask is None else self._masks[attention.mask]
        way = self._ranks.way(heads_of(query), heads_of(key))
        if way == "ring":
            return self._around((query, key, value), mask, is_causal, options.get("scale"))
        if way == "all-to-all":
            heads = self._of_heads(mask, heads_of(query))
            query, key, value = to_heads((query, key, value), self._own, self._ranks.ranks, self._ranks.peers)
            result = F.scaled_dot_product_attention(query, key, value, heads, dropout_p, is_causal, **options)
            return to_rows(result, self._own, self._ranks.ranks, self._ranks.peers)

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            joined = self._ranks.whole(torch.cat((key, value), dim=-1), self._own.count)
            keys, values = torch.split(joined, [key.shape[-1], value.shape[-1]], dim=-1)
            return self._by_chunks(query, keys, values, mask, dropout_p, is_causal, options)

        if not torch.is_grad_enabled() or not any(x.requires_grad for x in (query, key, value)):
            return run(query, key, value)
        attended: Tensor = checkpoint(run, query, key, value, use_reentrant=False, preserve_rng_state=False)
        return attended

    def _around(
        self, parts: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, is_causal: bool, scale: float | None
    ) -> Tensor:
        own = self._own

        def pairs(source: int) -> Sequence[Pair]:
            other = replace(own, index=source)
            if mask is not None:
                return pairs_under(mask, own, other)
            return pairs_with(own, other, (own.count,), is_causal, None)

        q, k, v = (x[(None,) * (4 - x.dim())].transpose(1, 2) for x in parts)
        result = ring_attention(q, k, v, pairs, self._ranks.ranks, self._ranks.peers, scale)
        return result.transpose(1, 2).view(*parts[0].shape[:-1], parts[2].shape[-1])

    def _of_heads(self, mask: Tensor | None, heads: int) -> Tensor | None:
        """Of a mask that differs between heads, what is of this rank's."""
        if mask is None or mask.dim() < 4 or mask.shape[1] == 1:
            return mask
        own = heads // self._ranks.peers.degree
        return mask.narrow(1, self._ranks.peers.index * own, own)

    def _by_chunks(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Of each of the rank's two chunks: causal ones see no keys behind their end."""
        own, blocks = self._own, list[Tensor]()
        for number, (first, end) in enumerate(own.chunks):
            seen = end if is_causal and end > first else own.count
            chunk = query.narrow(-2, number * own.size, own.size)
            block = F.scaled_dot_product_attention(
                chunk,
                keys[..., :seen, :],
                values[..., :seen, :],
                attn_mask=self._mask(mask, first, end, seen, is_causal, query.device),
                dropout_p=dropout_p,
                **options,
            )
            blocks.append(block)
        return torch.cat(blocks, dim=-2)

    def _mask(
        self, mask: Tensor | None, first: int, end: int, seen: int, is_causal: bool, device: torch.device
    ) -> Tensor | None:
        """Of a chunk's rows; those behind the end see everything."""
        size = self._own.size
        if is_causal:
            rows = torch.arange(first, first + size, device=device).unsqueeze(1)
            return rows >= torch.arange(seen, device=device)
        if mask is None or mask.shape[-2] == 1:
            return mask
        part = mask[..., first:end, :]
        return F.pad(part, (0, 0, 0, size - (end - first)), value=True if mask.dtype == torch.bool else 0)
