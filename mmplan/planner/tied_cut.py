"""What a cut pays for matrices that two layers read and that it puts on two ranks; see `cost_models/ties.py`."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mmplan.cost_models.layout import Layout, Trained, trained_on_rank
from mmplan.cost_models.ties import tied_share, trained_ties
from mmplan.planner.configuration import Configuration
from mmplan.planner.contract import GroupGraph
from mmplan.planner.cut_problem import CutTie
from mmplan.planner.pricing import Prices
from mmplan.planner.quantise import floor_ns
from mmplan.planner.ties import tie_seconds
from mmplan.scenario.scenario import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class TiedMatrix:
    """Ids of the layers that read it, trained parameters of a copy on one rank, and bytes of the gradient that it has
    of them behind its reduction."""

    table: str
    head: str
    copy: Trained
    share_bytes: int


def tied_matrices(prices: Prices, layout: Layout) -> tuple[TiedMatrix, ...]:
    """Trained ones of the modules that are priced."""
    graph, width = prices.graph, DTYPE_BYTES[prices.scenario.optimizer.gradient_dtype]
    return tuple(
        TiedMatrix(
            table=table,
            head=head,
            copy=trained_on_rank(graph.layer(head), layout, tied=True),
            share_bytes=width * tied_share(graph.layer(head), layout),
        )
        for table, head in trained_ties(graph)
        if head in prices.kind_of
    )


def copied(prices: Prices, layout: Layout, layers: Collection[str]) -> list[TiedMatrix]:
    """Those of which a stage with these layers has a copy for its head."""
    return [one for one in tied_matrices(prices, layout) if one.head in layers and one.table not in layers]


def tied_s(prices: Prices, configuration: Configuration, layers: Collection[str], near: bool) -> float:
    """Seconds in which a rank with these layers sums gradients with others that read a matrix of theirs."""
    return sum(
        tie_seconds(prices.costs, one.share_bytes, 2, near)
        for one in tied_matrices(prices, configuration.layout)
        if (one.table in layers) != (one.head in layers)
    )


def cut_ties(
    prices: Prices, groups: GroupGraph, configuration: Configuration, copies_ns: Sequence[int], near: bool
) -> tuple[CutTie, ...]:
    """Of matrices between groups. Args: copies_ns: what a stage pays for its copy, of each matrix."""
    group_of = {layer: index for index, layers in enumerate(groups.groups) for layer in layers}
    matrices = tied_matrices(prices, configuration.layout)
    return tuple(
        CutTie(
            table=group_of[one.table],
            head=group_of[one.head],
            sum_ns=floor_ns(tied_s(prices, configuration, {one.head}, near)),
            copy_ns=copy_ns,
        )
        for one, copy_ns in zip(matrices, copies_ns, strict=True)
        if group_of[one.table] != group_of[one.head]
    )
