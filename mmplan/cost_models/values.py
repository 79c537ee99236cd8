"""Tensors between operators: rows as linear forms of a load, and what of a tensor lies on one rank."""

import math
from dataclasses import dataclass
from typing import Literal

from mmplan.cost_models.head_groups import HeadGroups
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
    every rank holds as many as the fullest. `heads`: the units are heads of attention, which lie as it says. `routed`:
    the rows are those that tokens send to experts, and width is split over `etp` instead of `tp`. `on_ranks`: of a
    recorded layer, (tp, columns that each of so many ranks has).
    """

    name: str
    rows: Rows
    width: int
    sharded: bool = False
    unit: int = 1
    routed: bool = False
    heads: HeadGroups | None = None
    on_ranks: tuple[tuple[int, int], ...] = ()

    def local_rows(self, load: Load, shard: int | Shard = 1) -> float:
        """Rows on one rank."""
        return self.rows.of(load) * row_fraction(self.routed, as_shard(shard))

    def local_width(self, shard: int | Shard = 1) -> int:
        """Columns on one rank."""
        if not self.sharded:
            return dict(self.on_ranks).get(as_shard(shard).tp, self.width) if self.on_ranks else self.width
        shard = as_shard(shard)
        if self.heads is not None:
            return self.heads.on_rank(self.width // self.unit, shard.tp) * self.unit
        return split(self.width, self.unit, shard.expert_tp if self.routed else shard.tp)

    def part(self, tp: int, rank: int) -> tuple[int, int] | None:
        """Of heads the first column on a rank and the one behind its last; what is left of its width is zero."""
        if self.heads is None:
            return None
        first, end = self.heads.part(self.width // self.unit, tp, rank)
        return first * self.unit, end * self.unit

    def copies(self, shard: int | Shard) -> int:
        """Tensor-parallel ranks that have the same columns of a sharded value."""
        tp = as_shard(shard).tp
        heads = self.heads
        return heads.copies(tp) if heads is not None and heads.has_copies(self.width // self.unit, tp) else 1

    def elements(self, load: Load, shard: int | Shard = 1) -> float:
        """Elements on one rank."""
        return self.local_rows(load, shard) * self.local_width(shard)


def split(width: int, unit: int, degree: int) -> int:
    """Width of one of `degree` equal parts made of whole units: ceil(units / degree) units."""
    return -(-width // (unit * degree)) * unit


def row_fraction(routed: bool, shard: Shard) -> float:
    """Rows on a rank, as part of the rows of the load (see `Shard`)."""
    return (shard.expert_tp / shard.tp if routed else 1.0) / shard.cp


def rows_of_context_rank(rows: float, cp: int) -> int:
    """Rows of a packed microbatch that each of cp ranks has when they are cut into 2 cp equal chunks, of which each
    rank takes one from the front and its counterpart from the back, so that causal attention is balanced (Megatron
    Core, `get_batch_on_this_cp_rank`); the last chunk is filled up."""
    return 2 * math.ceil(rows / (2 * cp)) if cp > 1 else math.ceil(rows)


def rows_of_sequence_rank(rows: float, tp: int) -> int:
    """Rows that each of tp ranks has of those that they have in equal parts, one behind the other; the last part is
    filled up."""
    return math.ceil(rows / tp - 1e-9)
