"""What a change of plans moves: weights and optimizer state that a rank will hold and does not hold yet.

A layer's parameters are one interval. Tensor parallelism gives each rank a part of it (norms and biases count as
split), expert parallelism a part of its experts, sharding over replicas a part of that part. What of a rank's new part
was in its old one stays; the rest comes from ranks that hold it, which share the sending evenly. Gradients do not move:
plans change between steps.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.memory_rules import parameter_bytes
from mmplan.cost_models.memory_states import layer_counts
from mmplan.cost_models.shard import Shard
from mmplan.cost_models.ties import table_of
from mmplan.planner.plan import Plan

Part = NDArray[np.float64]  # [rank] a number of each rank


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchCost:
    """`moved_bytes`: received by all ranks; `busiest_bytes`: received or sent by the one that has most of it. `seconds`
    are those of the busiest rank over its links, with `restart_s` for stopping and starting."""

    moved_bytes: int
    busiest_bytes: int
    restart_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Held:
    """[rank] from `start` to `end` of a layer's parameters; equal where a rank holds nothing."""

    start: Part
    end: Part


def switch_cost(old: Plan, new: Plan, restart_s: float = 0.0) -> SwitchCost:
    """From the layers and ranks of both plans, which are of one model. Where the order of unlike pools changes, nothing
    is taken to stay where it is."""
    ranks = max(old.world, new.world)
    received, sent = np.zeros(ranks), np.zeros(ranks)
    moved_pools = [p.device.name for p in old.scenario.cluster.pools] != [
        p.device.name for p in new.scenario.cluster.pools
    ]
    stage_of = new.stage_of_layer()
    for layer in build_graph(old.scenario).layers():
        if stage_of.get(table_of(layer) or "") == stage_of[layer.id]:
            continue  # the table of the stage serves the head
        for expert in (False, True):
            for optimizer in (False, True):
                size = _state_bytes(old, layer, expert=expert, optimizer=optimizer)
                if size == 0:
                    continue
                before = _held(old, layer, ranks, expert=expert, optimizer=optimizer)
                after = _held(new, layer, ranks, expert=expert, optimizer=optimizer)
                got = size * (after.end - after.start - (0.0 if moved_pools else _common(before, after)))
                received += got
                sent += got.sum() * (before.end - before.start) / (before.end - before.start).sum()
    cluster = new.scenario.cluster
    one_node = len(cluster.pools) == 1 and cluster.pools[0].nodes == 1
    link = cluster.pools[0].node_link if one_node else cluster.network_link
    busiest = float(max(received.max(), sent.max()))
    return SwitchCost(
        moved_bytes=round(float(received.sum())),
        busiest_bytes=round(busiest),
        restart_s=restart_s,
        seconds=busiest / link.reached_bytes_per_s + restart_s,
    )


def _state_bytes(plan: Plan, layer: Layer, *, expert: bool, optimizer: bool) -> int:
    """Of the whole layer, once."""
    scenario = plan.scenario
    counts, per = (
        layer_counts(layer, Shard()),
        parameter_bytes(scenario.precision_of(layer), scenario.optimizer, scenario.technique),
    )
    trained, frozen = (counts.expert, counts.expert_frozen) if expert else (counts.dense, counts.dense_frozen)
    return trained * per.optimizer if optimizer else trained * per.weight + frozen * per.frozen


def _held(plan: Plan, layer: Layer, ranks: int, *, expert: bool, optimizer: bool) -> _Held:
    """Which part each rank holds."""
    stage = plan.stage_of_layer()[layer.id]
    layout, start, end = plan.layout(stage), np.zeros(ranks), np.zeros(ranks)
    inside = np.arange(plan.mesh(stage).ranks)  # ranks of the stage: replica, then cp, then tp
    parts, part, replicas, replica = (_expert_parts if expert and layout.ep > 1 else _dense_parts)(
        layout, layer, inside
    )
    sharded = layout.sharding == "parameters" or (optimizer and layout.sharding != "none")
    pieces = replicas if sharded else 1
    first = part / parts + (replica / (parts * pieces) if sharded else 0.0)
    mine = list(plan.stage_ranks(stage))
    start[mine], end[mine] = first, first + 1 / (parts * pieces)
    return _Held(start, end)


_Parts = tuple[int, NDArray[np.int64], int, NDArray[np.int64]]  # parts, whose, copies of each part, which of these


def _dense_parts(layout: Layout, layer: Layer, inside: NDArray[np.int64]) -> _Parts:
    if layer.module in layout.spread:
        return 1, np.zeros_like(inside), len(inside), inside
    return layout.tp, inside % layout.tp, layout.replicas, inside // layout.tp


def _expert_parts(layout: Layout, layer: Layer, inside: NDArray[np.int64]) -> _Parts:
    """Experts lie over neighbouring ranks, those of one expert first."""
    side = layout.expert_side
    return side, inside % side, layout.expert_replicas, inside // side


def _common(before: _Held, after: _Held) -> Part:
    """Length of what a rank holds before and after."""
    common: Part = np.clip(np.minimum(before.end, after.end) - np.maximum(before.start, after.start), 0.0, None)
    return common
