"""Bytes that ranks which shard the same weights hand to collectives, by kind of action.

A reduce-scatter and a gather each count their whole buffer once, as an all-reduce does; it is padded, so that its
shares are equal. ZeRO (arXiv 1910.02054, section 7): stage 1 scatters gradients in REDUCE and gathers weights in STEP;
stage 2 scatters the gradients of each layer in each backward; stage 3 gathers the weights of each layer in each forward
and backward instead of in STEP.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.memory_states import layer_counts
from mmplan.cost_models.ties import table_of
from mmplan.scenario.scenario import DTYPE_BYTES, Scenario


class SharedBytes(NamedTuple):
    """Of one stage: in each F, in each B, in REDUCE and in STEP."""

    forward: int = 0
    backward: int = 0
    reduce: int = 0
    update: int = 0


def shared_bytes(layers: Sequence[Layer], layout: Layout, scenario: Scenario, tied: Mapping[str, int]) -> SharedBytes:
    """Of a stage with these layers, whose state is sharded.

    Args:
        tied: by layer the parameters of a matrix that another stage has too: they have a buffer of their own.
    """
    gradient = DTYPE_BYTES[scenario.optimizer.gradient_dtype]
    weight = {layer.id: DTYPE_BYTES[scenario.precision_of(layer)] for layer in layers}
    whole = _Stage(frozenset(layer.id for layer in layers), layout, tied)
    if layout.sharding == "optimizer":
        alike = [[layer for layer in layers if scenario.precision_of(layer) == one] for one in scenario.precisions]
        together = [(whole.shared(own, trained=True), weight[own[0].id]) for own in alike if own]
        return SharedBytes(
            reduce=gradient * sum(count for count, _ in together),
            update=sum(count * width for count, width in together),
        )
    trained = {layer.id: whole.shared([layer], trained=True) for layer in layers}
    used = {layer.id: _used(layer, layers) for layer in layers}
    returning = [one for layer in layers if layer.has_backward for one in used[layer.id]]
    scattered = gradient * sum(trained[one.id] for one in returning)
    if layout.sharding == "gradients":
        return SharedBytes(backward=scattered, update=sum(count * weight[name] for name, count in trained.items()))
    held = {layer.id: trained[layer.id] + whole.shared([layer], trained=False) for layer in layers}
    return SharedBytes(
        forward=sum(weight[one.id] * held[one.id] for layer in layers for one in used[layer.id]),
        backward=sum(weight[one.id] * held[one.id] for one in returning) + scattered,
    )


@dataclass(frozen=True, slots=True)
class _Stage:
    """Ids of its layers; `tied` as in `shared_bytes`."""

    here: frozenset[str]
    layout: Layout
    tied: Mapping[str, int]

    def shared(self, layers: Iterable[Layer], *, trained: bool) -> int:
        """Trained or frozen parameters of some layers, in one buffer for each number of ranks that hold them, more than
        one, and for each tied matrix."""
        by_ranks: Counter[tuple[int, str]] = Counter()
        for layer in layers:
            shard, replicas = self.layout.shard(layer), self.layout.state_replicas(layer)
            counts = layer_counts(layer, shard, tied_here=table_of(layer) in self.here)
            apart = self.tied.get(layer.id, 0) if trained else 0
            by_ranks[replicas.dense, layer.id if apart else ""] += apart
            by_ranks[replicas.dense, ""] += (counts.dense if trained else counts.dense_frozen) - apart
            experts = "experts" if self.layout.ep > 1 else ""  # on ranks of their own they are apart
            by_ranks[replicas.expert, experts] += counts.expert if trained else counts.expert_frozen
        return sum(math.ceil(count / ranks) * ranks for (ranks, _), count in by_ranks.items() if ranks > 1)


def _used(layer: Layer, layers: Sequence[Layer]) -> list[Layer]:
    """The layer, and that whose matrix it shares."""
    return [layer, *(other for other in layers if other.id == table_of(layer))]
