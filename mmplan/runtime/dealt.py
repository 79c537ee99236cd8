"""Modules that run whole on each rank that shares a stage: images or clips are dealt out over the ranks, or rows of
all images (patch groups) for the blocks of an encoder.

What such a layer hands to one of its own way stays a part. It becomes whole, once, where anything else reads it; its
gradient is then each rank's part of theirs. What a dealt layer reads of others is a part of it: the parts of that
gradient are gathered, but for the first layer in front of patch groups, which runs whole on every rank, each with the
gradient of its own rows. Images that cross to another stage are made whole for that, rows are not.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from mmplan.cost_models.graph import Edge
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.loads import output_lengths
from mmplan.runtime.batch import Microbatch
from mmplan.runtime.context import OwnRowsOf, all_rows, among_all, rows_of
from mmplan.runtime.crossing import Crossing
from mmplan.runtime.network import all_reduce, gather_rows
from mmplan.runtime.placed_rows import RowMoves, returned, row_moves, taken, text_ranks
from mmplan.runtime.tensor_sums import TensorRanks
from mmplan.scenario.scenario import Model

Way = Literal["", "images", "rows"]


def whole_key(producer: str) -> str:
    """Of the gradient of all rows of a producer that has a part of them."""
    return f"{producer}.whole"


def part_key(producer: str, way: Way = "images") -> str:
    """Of the gradient of a part of a producer's rows."""
    return f"{producer}.{way}"


class Dealt:
    """Which tensors of a stage a rank has in part, and how they become whole again.

    Attributes:
        parts: layers of the stage whose output is a part.
        gathered: those of them that are made whole.
        by_images: producers of which layers that are dealt out by images read a part, but have the gradient of all.
        by_rows: producers with whole rows of which patch groups read a part.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        edges: Iterable[Edge],
        model: Model,
        ranks: TensorRanks | None,
        *,
        places: Collection[str] = (),
        crossings: Mapping[str, Crossing] | None = None,
    ) -> None:
        """`edges`: all that begin or end in the stage; `places`: its layers whose rows go to those who need them alone
        (`Layout.places`), by the crossing to another mesh where there is one."""
        self._places, self._crossings = frozenset(places), crossings or {}
        self._model, self._ranks, self._peers = model, ranks, None if ranks is None else ranks.width
        self._here, edges = {layer.id for layer in layers}, list(edges)
        self._edges = {edge.producer: edge for edge in edges}
        self.parts = frozenset(layer.id for layer in layers if self.way(layer.id))
        read = [(edge.producer, self.held(edge.producer, edges), self.way(edge.consumer)) for edge in edges]
        own = [(edge.producer, self.way(edge.producer), self.way(edge.consumer)) for edge in edges]
        inside = [place for place, edge in enumerate(edges) if edge.consumer in self._here]
        self.gathered = frozenset(name for name, has, reads in own if name in self.parts and has != reads)
        self.by_images = frozenset(read[at][0] for at in inside if read[at][1] != "images" == read[at][2])
        self.by_rows = frozenset(read[at][0] for at in inside if read[at][1] == "" and read[at][2] == "rows")
        self._held = {name: has for name, has, _ in read}

    def __bool__(self) -> bool:
        return bool(self.parts)

    def way(self, layer: str) -> Way:
        """How a layer's rows are dealt out; images of another stage come whole."""
        module, _, place = layer.rpartition(".")
        if self._ranks is None or module not in self._ranks.spread:
            return ""
        if module in self._ranks.patches:
            return "rows" if place.isdigit() else ""
        return "images" if layer in self._here else ""

    def held(self, producer: str, edges: Sequence[Edge] = ()) -> Way:
        """What a rank has of a tensor: of one that came from another stage its rows, where patch groups read it."""
        if not edges:
            return self._held.get(producer, self.way(producer))
        if producer in self._here:
            return self.way(producer)
        readers = {self.way(edge.consumer) for edge in edges if edge.producer == producer}
        return "rows" if self.way(producer) == "rows" and readers == {"rows"} else ""

    def sends_part(self, edge: Edge) -> bool:
        """Whether a tensor crosses to another stage as each rank's rows."""
        return self.way(edge.producer) == self.way(edge.consumer) == "rows"

    def part(self, producer: str, rows: Tensor, batch: Microbatch, way: Way) -> Tensor:
        """This rank's part of all rows."""
        if way == "rows":
            return self._own(producer, batch).take(rows)
        lengths, first, last = self._lengths(producer, batch)
        return rows[sum(lengths[:first]) : sum(lengths[:last])].clone()

    def whole(self, producer: str, part: Tensor, batch: Microbatch, way: Way, *, backward: bool) -> Tensor:
        """All rows, of which every rank has its part, or those that it needs among zeros. Collective where there are
        rows."""
        assert self._ranks is not None and self._peers is not None
        if producer in self._places:
            return taken(part, self._moves(producer, batch), self._ranks, self._peers)
        if way == "rows":
            return all_rows(part, self._own(producer, batch), self._ranks, self._peers, backward=backward)
        lengths, _, _ = self._lengths(producer, batch)
        degree = self._peers.degree
        counts = [sum(lengths[slice(*share_of(len(lengths), rank, degree))]) for rank in range(degree)]
        if not sum(counts):
            return part
        result = gather_rows(part, counts, self._peers.group)
        self._ranks.count(result, backward=backward)
        return result

    def placed(self, producer: str, part: Tensor, batch: Microbatch) -> Tensor:
        """A rank's rows among all, zeros elsewhere: its part of a gradient that no rank needs whole."""
        return among_all(part, self._own(producer, batch))

    def _own(self, producer: str, batch: Microbatch) -> OwnRowsOf:
        assert self._peers is not None
        return rows_of(self._lengths(producer, batch)[0], self._peers)

    def _moves(self, producer: str, batch: Microbatch) -> RowMoves:
        """Which rows go to which rank: to that with their places, or that hands them to another mesh."""
        assert self._peers is not None
        edge, own = self._edges[producer], self._own(producer, batch)
        crossing = self._crossings.get(edge.name)
        needed_by = (
            text_ranks(edge, batch, self._peers)
            if crossing is None
            else crossing.held(crossing.part_rows(edge, batch)).rank
        )
        return row_moves(own.held(torch.arange(own.count)), needed_by, self._peers)

    def part_of_sum(self, producer: str, gradient: Tensor, batch: Microbatch, way: Way) -> Tensor:
        """This rank's part of the gradient of rows that were made whole."""
        if producer in self._places:
            assert self._ranks is not None and self._peers is not None
            return returned(gradient, self._moves(producer, batch), self._ranks, self._peers)
        return self.part(producer, self.summed(gradient), batch, way)

    def summed(self, gradient: Tensor) -> Tensor:
        """The gradient of rows that all cp ranks have, of which each has what its own tokens gave."""
        context = None if self._ranks is None else self._ranks.context
        if context is None or self._ranks is None or gradient.numel() == 0:
            return gradient
        result = gradient.contiguous().clone()
        all_reduce(result, context.group)
        self._ranks.count(result, backward=True)
        return result

    def once(self, gradient: Tensor) -> Tensor:
        """Of a gradient that all cp ranks have whole: one keeps it, so that their sum is right."""
        context = None if self._ranks is None else self._ranks.context
        return gradient if context is None or context.index == 0 else torch.zeros_like(gradient)

    def rows(self, producer: str, batch: Microbatch) -> int:
        """All of a producer's rows."""
        return sum(self._all_lengths(producer, batch))

    def own_batch(self, batch: Microbatch) -> Microbatch:
        """What dealt modules read of a microbatch on this rank."""
        if not self.parts or self._ranks is None or self._peers is None:
            return batch
        dealt = [module for module in self._ranks.spread if module not in self._ranks.patches]
        modules = [module for module in dealt if module in batch.lengths]
        lengths, raw = dict(batch.lengths), dict(batch.raw_lengths)
        context, inputs = dict(batch.context_lengths), dict(batch.inputs)
        for name in modules:
            share = slice(*share_of(len(lengths[name]), self._peers.index, self._peers.degree))
            if name in inputs:
                inputs[name] = _rows_of(inputs[name], raw.get(name, lengths[name]), len(lengths[name]), share)
            if name in raw:
                raw[name] = _raw_of(raw[name], len(lengths[name]), share)
            if name in context:
                context[name] = context[name][share]
            lengths[name] = lengths[name][share]
        return replace(batch, lengths=lengths, raw_lengths=raw, context_lengths=context, inputs=inputs)

    def _lengths(self, producer: str, batch: Microbatch) -> tuple[tuple[int, ...], int, int]:
        """Rows of each sequence, and which of these are this rank's."""
        peers, lengths = self._peers, self._all_lengths(producer, batch)
        assert peers is not None
        return (lengths, *share_of(len(lengths), peers.index, peers.degree))

    def _all_lengths(self, producer: str, batch: Microbatch) -> tuple[int, ...]:
        """Rows of each sequence."""
        edge = self._edges[producer]
        lengths = batch.lengths[edge.load_module]
        if edge.load_field == "outputs":
            lengths = output_lengths(self._model.module(edge.load_module), lengths)
        return lengths


def share_of(count: int, index: int, ranks: int) -> tuple[int, int]:
    """First and end of a rank's sequences: the first ranks have the most, as `Layout.load` prices."""
    size = -(-count // ranks)
    return min(index * size, count), min((index + 1) * size, count)


def _raw_of(raw: tuple[int, ...], sequences: int, share: slice) -> tuple[int, ...]:
    """Of several tiles in a sequence all."""
    tiles = len(raw) // sequences if sequences else 1
    return raw[share.start * tiles : share.stop * tiles]


def _rows_of(inputs: Tensor, raw: tuple[int, ...], sequences: int, share: slice) -> Tensor:
    tiles = len(raw) // sequences if sequences else 1
    ends = (0, *accumulate(raw))
    return inputs[ends[share.start * tiles] : ends[share.stop * tiles]]
