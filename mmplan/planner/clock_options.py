"""Other rules for the clock: links that several pairs of ranks share, transfers that block, durations that vary.

Shared links are an approximation: transfers of one link queue in the order in which they would start if every pair had
a link of its own; a real link would divide its bandwidth, or let a later one overtake.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mmplan.errors import CheckError
from mmplan.planner.check_program import check_program
from mmplan.planner.columns import RECV, SEND, ProgramColumns, columns_of
from mmplan.planner.program import Program
from mmplan.planner.waves import Graph, IrregularError, Waves, build_waves, node_ends, program_graph, wait_for_replicas

Floats = NDArray[np.float64]


def shared_link_waves(columns: ProgramColumns, link_of: Mapping[tuple[int, int], int], durations_s: Floats) -> Waves:
    """Waves in which all transfers between pairs of ranks with one link number follow one another.

    Args:
        link_of: (source rank, target rank) -> number of the link; a pair that is missing has a link of its own.
        durations_s: `[actions]`, which fix the order of the queues.

    Raises:
        IrregularError: see `waves_of`.
    """
    alone = build_waves(program_graph(columns), None)
    ends_s = node_ends(alone, durations_s)
    starts_s = np.maximum(ends_s[alone.lane], ends_s[alone.need])
    (sends,) = np.nonzero(columns.kind == SEND)
    own = columns.ranks[columns.row[sends]]
    known = dict(link_of)
    for pair in zip(own.tolist(), columns.peer[sends].tolist(), strict=True):
        known.setdefault(pair, -1 - len(known))
    pairs = zip(own.tolist(), columns.peer[sends].tolist(), strict=True)
    links = np.array([known[pair] for pair in pairs], dtype=np.int64)
    nodes = alone.node[sends]
    # Nodes are numbered wave by wave, so this order respects every need also where starts are equal.
    order = np.lexsort((nodes, starts_s[nodes], links))
    graph = program_graph(columns)
    queued, link = sends[order], links[order]
    follows = np.concatenate([[False], link[1:] == link[:-1]])
    graph.lane[queued] = np.where(follows, np.concatenate([[-1], queued[:-1]]), -1)
    return build_waves(graph, None)


def rendezvous_waves(program: Program) -> Waves:
    """Waves in which a transfer starts when both ranks have come to it in their lists, and holds both until its end.

    Raises:
        CheckError: ranks wait for each other for ever; prints the circle.
    """
    columns = columns_of(program)
    try:
        graph = program_graph(columns)
        _block(graph, columns)
        return build_waves(graph, None)
    except IrregularError as error:
        findings = check_program(program)
        raise CheckError(str(findings[0]) if findings else "the program cannot run with blocking transfers") from error


def _block(graph: Graph, columns: ProgramColumns) -> None:
    """Every action waits for the one before it in its list; a transfer for those on both ranks."""
    index = np.arange(columns.size)
    begins = np.isin(index, columns.first[:-1])
    before = np.where(begins, -1, graph.match[np.maximum(index - 1, 0)])
    (receives,) = np.nonzero(columns.kind == RECV)
    transfers = graph.match[receives]
    graph.joins.clear()  # what a compute reads stands before it in the list
    graph.lane[:] = np.where(columns.kind == RECV, -1, before)
    graph.need[:] = -1
    graph.need[transfers] = before[receives]
    wait_for_replicas(graph)


def jittered(durations_s: Floats, *, sigma: float, draws: int, seed: int) -> Floats:
    """`[actions, draws]`: each duration times a lognormal factor of mean 1 whose logarithm has deviation `sigma`."""
    noise = np.random.default_rng(seed).standard_normal((len(durations_s), draws))
    factors: Floats = np.exp(sigma * noise - sigma**2 / 2)
    return durations_s[:, None] * factors
