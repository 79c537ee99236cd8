"""Bytes that ranks which shard the same weights hand to collectives, by kind of action.

A reduce-scatter and a gather each count their whole buffer once, as an all-reduce does; it is padded, so that its
shares are equal. ZeRO (arXiv 1910.02054, section 7): stage 1 scatters gradients in REDUCE and gathers weights in STEP;
stage 2 scatters the gradients of each layer in each backward; stage 3 gathers the weights of each layer in each forward
and backward instead of in STEP.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.memory_states import layer_counts
from mmplan.cost_models.ops import Linear
from mmplan.scenario.scenario import DTYPE_BYTES, Scenario


class SharedBytes(NamedTuple):
    """Of one stage: in each F, in each B, in REDUCE and in STEP."""

    forward: int = 0
    backward: int = 0
    reduce: int = 0
    update: int = 0


def shared_bytes(layers: Sequence[Layer], layout: Layout, scenario: Scenario) -> SharedBytes:
    """Of a stage with these layers, whose state is sharded."""
    weight, gradient = DTYPE_BYTES[scenario.precision], DTYPE_BYTES[scenario.optimizer.gradient_dtype]
    if layout.sharding == "optimizer":
        together = _shared(layers, layout, trained=True)
        return SharedBytes(reduce=gradient * together, update=weight * together)
    trained = {layer.id: _shared([layer], layout, trained=True) for layer in layers}
    used = {layer.id: _used(layer, layers) for layer in layers}
    returning = [one for layer in layers if layer.has_backward for one in used[layer.id]]
    scattered = gradient * sum(trained[one.id] for one in returning)
    if layout.sharding == "gradients":
        return SharedBytes(backward=scattered, update=weight * sum(trained.values()))
    held = {layer.id: trained[layer.id] + _shared([layer], layout, trained=False) for layer in layers}
    return SharedBytes(
        forward=weight * sum(held[one.id] for layer in layers for one in used[layer.id]),
        backward=weight * sum(held[one.id] for one in returning) + scattered,
    )


def _shared(layers: Iterable[Layer], layout: Layout, *, trained: bool) -> int:
    """Trained or frozen parameters in one buffer for each number of ranks that hold them, more than one."""
    by_ranks: Counter[tuple[int, bool]] = Counter()  # experts on ranks of their own are apart
    for layer in layers:
        counts, replicas = layer_counts(layer, layout.shard(layer), tied_here=True), layout.state_replicas(layer)
        by_ranks[replicas.dense, False] += counts.dense if trained else counts.dense_frozen
        by_ranks[replicas.expert, layout.ep > 1] += counts.expert if trained else counts.expert_frozen
    return sum(math.ceil(count / ranks) * ranks for (ranks, _), count in by_ranks.items() if ranks > 1)


def _used(layer: Layer, layers: Sequence[Layer]) -> list[Layer]:
    """The layer, and that whose matrix it shares."""
    tied = any(isinstance(op, Linear) and op.tied for op in layer.ops)
    return [layer, *(other for other in layers if tied and other.id == f"{layer.module}.embed")]
