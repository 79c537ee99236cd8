"""What crosses between the layers of a plan when a real model runs: read off recordings, not off the plan's own graph.

The glue between units is repeated by whoever needs its result, so a stage receives the outputs of units that its own
units read through glue: the language model's first block, not its token table, receives the image features.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mmplan.cost_models.graph import ComputationGraph, Edge
from mmplan.errors import InputError
from mmplan.runtime.ghost.flow import Source
from mmplan.runtime.ghost.recording import Call, Recording
from mmplan.runtime.ghost.rows_of_units import RowsOfUnits


@dataclass(frozen=True, kw_only=True, slots=True)
class Owners:
    """Which layer each piece (unit, or parameter read by glue) belongs to, and who computes the loss; `used` are the
    pieces that the loss depends on: others are never computed."""

    layer_of: Mapping[str, str]
    loss_layer: str
    used: frozenset[str]

    def readers(self, recording: Recording) -> Iterable[tuple[str, Call]]:
        """Layer and call of everything that is computed."""
        for call in recording.calls:
            if call.unit in self.used:
                yield self.layer_of[call.unit], call
        yield self.loss_layer, recording.loss


def recorded_graph(graph: ComputationGraph, recordings: Sequence[Recording], owners: Owners) -> ComputationGraph:
    """The plan's layers with the edges of the recordings.

    Raises:
        InputError: two layers feed each other.
    """
    pairs = {
        (owners.layer_of[source.unit], layer): None
        for recording in recordings
        for layer, call in owners.readers(recording)
        for source in sorted(call.reads)
        if owners.layer_of[source.unit] != layer
    }
    try:
        return ComputationGraph(graph.layers(), [_edge(graph, producer, consumer) for producer, consumer in pairs])
    except ValueError as error:
        raise InputError(f"the model's modules do not follow the plan's layers: {error}") from error


def _edge(graph: ComputationGraph, producer: str, consumer: str) -> Edge:
    layer = graph.layer(producer)
    return Edge(
        producer=producer,
        consumer=consumer,
        width=layer.output.width,
        load_module=layer.module,
        load_field="tokens",
        carries_grad=layer.has_backward,
    )


def payload(recording: Recording, owners: Owners, producer: str, readers: frozenset[str]) -> tuple[Source, ...]:
    """The outputs of a layer's units that some layers read, in the order in which they are sent."""
    return tuple(
        sorted(
            {
                source
                for layer, call in owners.readers(recording)
                if layer in readers
                for source in call.reads
                if owners.layer_of[source.unit] == producer
            }
        )
    )


def carried(recording: Recording, source: Source, rows: RowsOfUnits | None) -> Tensor:
    """What stages send each other of an output, without storage: each rank its rows, where it keeps them."""
    like = recording.like(source)
    if rows is None or source not in recording.apart:
        return like
    return like.new_empty((*like.shape[:-2], rows.size(like.shape[-2]), like.shape[-1]))
