"""Matrices that two layers read: a head that is tied to the token table of its module.

Where both lie in one stage the head uses the table's. Where they do not, each stage has a copy, and before the update
the ranks of a replica that have one sum their gradients of it: of all of it, or where replicas share out state or
gradients, of the share that a rank has. Copies start equal and get equal sums, so they stay equal to the bit.
"""

import math
from collections.abc import Sequence

from mmplan.cost_models.counts import is_tied
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout, Trained, trained_on_rank


def table_of(layer: Layer) -> str | None:
    """The layer whose matrix a tied head reads; None of any other layer."""
    return f"{layer.module}.embed" if layer.kind == "head" and any(map(is_tied, layer.ops)) else None


def tied_layers(graph: ComputationGraph) -> tuple[tuple[str, str], ...]:
    """(token table, head) of every tied matrix, in the order of the layers."""
    return tuple((table, layer.id) for layer in graph.layers() if (table := table_of(layer)) is not None)


def trained_ties(graph: ComputationGraph) -> tuple[tuple[str, str], ...]:
    """Of those that are trained."""
    return tuple(pair for pair in tied_layers(graph) if graph.layer(pair[1]).trainable)


def trained_apart(layers: Sequence[Layer], layout: Layout) -> list[Trained]:
    """Trained parameters of each layer of a stage on one rank, and so those of a copy of a table on another stage."""
    here = {None, *(layer.id for layer in layers)}
    return [trained_on_rank(layer, layout, tied=table_of(layer) not in here) for layer in layers]


def trained_together(layers: Sequence[Layer], layout: Layout) -> Trained:
    """Their sum."""
    return sum(trained_apart(layers, layout), Trained())


def tied_share(head: Layer, layout: Layout) -> int:
    """Parameters of the matrix whose summed gradient a rank has behind the reduction over its replicas."""
    count = trained_on_rank(head, layout, tied=True).dense
    return count if layout.sharding == "none" else math.ceil(count / layout.replicas)
