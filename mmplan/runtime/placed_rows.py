"""Rows of features that ranks have in parts go to the ranks that need them, and nothing else does: to those that have
their places among the rows of a text, or that hand them on to another mesh. Gradients come back the same way.

A rank then has all rows but for those of others, which are zero, so that who reads them need not know. What it gave
counts as exchanged, as it lies, with what fills it up: how much of it stays is known from where the places are alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mmplan.cost_models.graph import Edge
from mmplan.planner.plan import module_of
from mmplan.runtime.batch import Microbatch
from mmplan.runtime.context import Held, rows_of
from mmplan.runtime.row_exchange import exchanged_rows
from mmplan.runtime.tensor_sums import Peers, TensorRanks


@dataclass(frozen=True, slots=True)
class RowMoves:
    """Which of a rank's rows go to each peer, and where in all rows those lie that each peer gives."""

    leaving: Sequence[Tensor]
    arriving: Sequence[Tensor]
    own: int
    whole: int


def row_moves(held: Held, needed_by: Tensor, peers: Peers) -> RowMoves:
    """Of rows of which each is needed by one rank."""

    def between(giver: int, taker: int) -> Tensor:
        return ((held.rank == giver) & (needed_by == taker)).nonzero().squeeze(1)

    ranks = range(peers.degree)
    return RowMoves(
        leaving=[held.at[between(peers.index, rank)] for rank in ranks],
        arriving=[between(rank, peers.index) for rank in ranks],
        own=held.own,
        whole=len(needed_by),
    )


def text_ranks(edge: Edge, batch: Microbatch, peers: Peers) -> Tensor:
    """Of each row of a tensor the rank that has its place among the rows of text."""
    module = module_of(edge.consumer)
    places = batch.merge_positions[module][edge.placed].cpu()
    return rows_of(batch.lengths[module], peers).held(places).rank


def taken(own: Tensor, moves: RowMoves, ranks: TensorRanks, peers: Peers) -> Tensor:
    """All rows, of which a rank gets those that it needs; zeros elsewhere. Collective where there are rows."""
    if not moves.whole:
        return own
    result = exchanged_rows(own, moves.leaving, moves.arriving, moves.whole, peers.index, peers.group)
    ranks.count(own, backward=False)
    return result


def returned(gradient: Tensor, moves: RowMoves, ranks: TensorRanks, peers: Peers) -> Tensor:
    """The gradient of a rank's own rows, of all rows those that it had taken. Collective where there are rows."""
    if not moves.whole:
        return gradient
    own = exchanged_rows(gradient, moves.arriving, moves.leaving, moves.own, peers.index, peers.group)
    ranks.count(own, backward=True)
    return own
