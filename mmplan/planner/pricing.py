"""Prices of all layers for one layout and microbatch size; equal layers are priced once."""

import math
from collections.abc import Callable, Hashable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.graph import ComputationGraph, Edge
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import BLOCKS_PER_PATTERN, Layout, RecomputeLevel, Trained, trained_on_rank
from mmplan.cost_models.load import Load, Loads
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.memory_activations import BLOCKS
from mmplan.cost_models.peak_loads import peak_loads
from mmplan.cost_models.planned_memory import (
    gathered_bytes,
    handed_out_bytes,
    layer_working_bytes,
    loss_working_bytes,
    offloaded_bytes,
    planned_kept_bytes,
    planned_state_bytes,
)
from mmplan.planner.contract import GroupGraph
from mmplan.planner.plan_technique import require_plannable
from mmplan.scenario.scenario import Scenario

T = TypeVar("T")
LARGEST_MICROBATCH = 2**31 - 1
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayerPrice:
    """One layer on one rank, per mean microbatch; of several that run `together` an equal part. In `state_bytes` is
    also what one of these runs at the 99th percentile keeps beyond a mean one, and what a loss needs at work beyond
    other layers."""

    forward_s: float
    backward_s: float
    state_bytes: int
    kept_bytes: int
    trained: Trained
    together: int = 1

    @property
    def work_s(self) -> float:
        return self.forward_s + self.backward_s


class Prices:
    """Answers of one scenario's cost model, remembered.

    Costs are linear in loads: a mean microbatch is so many mean samples. `kinds` are layers that stand for all; of a
    layer, `kind_of` names the one that is equal to it in all that costs. Kinds that differ only in which of eight
    blocks they are have one number in `alike`.

    Raises:
        InputError: the scenario's technique is one that plans do not price.
    """

    def __init__(self, scenario: Scenario, graph: ComputationGraph, costs: CostModel) -> None:
        require_plannable(scenario)
        self.scenario, self.graph, self.costs = scenario, graph, costs
        self._sample_loads = mean_loads(scenario, 1)
        self._loads: dict[int, dict[str, Load]] = {}
        self._peak_loads: dict[int, dict[str, Load]] = {}
        self._times: dict[Hashable, tuple[float, float]] = {}
        self._bytes: dict[Hashable, int] = {}
        self._working: dict[Hashable, tuple[int, ...]] = {}
        self._trained: dict[Hashable, Trained] = {}
        self._priced: dict[tuple[Layout, int], tuple[LayerPrice, ...]] = {}
        self._drops: dict[RecomputeLevel, tuple[bool, ...]] = {}
        self._members: dict[int, tuple[GroupGraph, Counts]] = {}  # by id; the groups are held so that it stays theirs
        self._lags: dict[Hashable, tuple[float, ...]] = {}
        self._among: dict[frozenset[str], Prices] = {}
        first: dict[object, int] = {}
        known: dict[object, int] = {}
        kinds: list[Layer] = []
        self.alike: list[int] = []
        self.kind_of: dict[str, int] = {}
        for layer in graph.layers():
            key = (layer.module, layer.kind, layer.ops, layer.grad_values, layer.readers, layer.placed, layer.shields)
            turn = layer.index % BLOCKS_PER_PATTERN if layer.kind in BLOCKS else 0
            like = first.setdefault(key, len(first))
            if (like, turn) not in known:
                known[like, turn] = len(kinds)
                kinds.append(layer)
                self.alike.append(like)
            self.kind_of[layer.id] = known[like, turn]
        self.kinds = tuple(kinds)
        self._loss_kinds = _loss_kinds(self.kinds)
        self._first = {like: self.alike.index(like) for like in dict.fromkeys(self.alike)}

    def alike_at(self, *levels: RecomputeLevel) -> tuple[int, ...]:
        """[kind] a number, equal where kinds differ in their turn alone and these levels recompute both or none."""
        first: dict[Hashable, int] = {}
        recomputed = [[Layout(recompute=level).recomputed(layer) for level in levels] for layer in self.kinds]
        keys = [(like, *dropped) for like, dropped in zip(self.alike, recomputed, strict=True)]
        return tuple(first.setdefault(key, len(first)) for key in keys)

    def members(self, groups: GroupGraph) -> Counts:
        """[group, kind] how many layers of each kind a group holds."""
        if id(groups) not in self._members:
            member = np.zeros((len(groups.groups), len(self.kinds)), dtype=np.int64)
            for group, layers in enumerate(groups.groups):
                for layer in layers:
                    member[group, self.kind_of[layer]] += 1
            self._members[id(groups)] = groups, member
        return self._members[id(groups)][1]

    def lags_s(self, edges: tuple[Edge, ...], layout: Layout, microbatch_size: int, near: bool) -> tuple[float, ...]:
        """Seconds that the tensor of each edge, and its gradient where one flows back, is on its way when it is cut."""
        loads, scenario = self.loads(microbatch_size), self.scenario
        by_tp = layout.spread or scenario.technique.sequence_parallel
        dealt = (layout.tp, layout.spread, layout.patches) if by_tp else ()
        several = self.loads(microbatch_size * layout.batch_factor)

        def ask() -> tuple[float, ...]:
            seen = [several if layout.sends_together(edge) else loads for edge in edges]
            pairs = zip(edges, seen, strict=True)
            return tuple(way_s(self.costs, edge, self.graph, one, scenario, layout, near) for edge, one in pairs)

        key = (edges, dealt, layout.together, layout.batch_factor, layout.cp, microbatch_size, near)
        return _once(self._lags, key, ask)

    def among(self, modules: frozenset[str]) -> "Prices":
        """The same of a part of the model: kinds of layers of other modules, and what these need at work, left out."""
        if modules not in self._among:
            other = copy(self)
            kept = [kind for kind, layer in enumerate(self.kinds) if layer.module in modules]
            turn = {kind: place for place, kind in enumerate(kept)}
            other.kinds, other.alike = tuple(self.kinds[kind] for kind in kept), [self.alike[kind] for kind in kept]
            other.kind_of = {layer: turn[kind] for layer, kind in self.kind_of.items() if kind in turn}
            other._first = {like: other.alike.index(like) for like in dict.fromkeys(other.alike)}
            other._loss_kinds, other._drops = _loss_kinds(other.kinds), {}
            other._bytes, other._working, other._priced, other._members = {}, {}, {}, {}
            other._among = {}
            self._among[modules] = other
        return self._among[modules]

    def with_costs(self, costs: CostModel) -> "Prices":
        """The same scenario, graph and loads under another cost model."""
        other = copy(self)
        other.costs, other._times, other._priced, other._lags = costs, {}, {}, {}
        other._among = {}
        return other

    def under(self, scenario: Scenario, costs: CostModel) -> "Prices":
        """Another cluster, batch or constraints for the same model, data and device: layers keep their prices."""
        other = copy(self)
        other.scenario, other.costs, other._lags, other._among = scenario, costs, {}, {}
        return other

    def loads(self, microbatch_size: int) -> dict[str, Load]:
        """Mean load of each module."""
        if microbatch_size not in self._loads:
            self._loads[microbatch_size] = {
                module: load.scaled(microbatch_size) for module, load in self._sample_loads.items()
            }
        return self._loads[microbatch_size]

    def of_kinds(self, layout: Layout, microbatch_size: int) -> tuple[LayerPrice, ...]:
        """The price of each kind of layer."""
        key = (layout, microbatch_size)
        found = self._priced.get(key)
        if found is None:
            found = self._priced[key] = self._of_kinds(layout, microbatch_size)
        return found

    def _of_kinds(self, layout: Layout, microbatch_size: int) -> tuple[LayerPrice, ...]:
        if layout.recompute in ("none", "full"):
            return self._alone(layout, microbatch_size, layout.recompute == "full")
        if layout.recompute == "selective":
            return self._priced_at(layout, microbatch_size)
        kept, dropped = self._alone(layout, microbatch_size, False), self._alone(layout, microbatch_size, True)
        drops = self._dropped(layout.recompute)
        found = [there if drop else here for here, there, drop in zip(kept, dropped, drops, strict=True)]
        for kind in self._loss_kinds:  # what it needs at work beyond other layers depends on these
            found[kind] = self._loss_at(layout, microbatch_size, kind, kept[kind])
        return tuple(found)

    def _loss_at(self, layout: Layout, microbatch_size: int, kind: int, plain: LayerPrice) -> LayerPrice:
        """The price of a loss beside layers that recompute, of that beside layers that do not."""
        layer, peaks = self.kinds[kind], self._loads_at(layout, microbatch_size)[1]
        asked = layer, peaks[layer.module], self.scenario, layout
        few, many = (
            loss_working_bytes(*asked, self.working_bytes(one, microbatch_size)) for one in (layout.at("none"), layout)
        )
        return replace(plain, state_bytes=plain.state_bytes - few + many)

    def _dropped(self, level: RecomputeLevel) -> tuple[bool, ...]:
        """[kind] whether a level recomputes it as a whole."""
        if level not in self._drops:
            at = Layout(recompute=level)
            self._drops[level] = tuple(at.recomputed(layer) == "full" for layer in self.kinds)
        return self._drops[level]

    def _loads_at(self, layout: Layout, microbatch_size: int) -> tuple[Loads, Loads]:
        """(mean, peak) loads of what each module runs at once."""
        return layout.at_once(self.loads, microbatch_size), layout.at_once(self._peaks, microbatch_size)

    def _peaks(self, microbatch_size: int) -> dict[str, Load]:
        if microbatch_size not in self._peak_loads:
            self._peak_loads[microbatch_size] = peak_loads(self.scenario, microbatch_size)
        return self._peak_loads[microbatch_size]

    def _alone(self, layout: Layout, microbatch_size: int, full: bool) -> tuple[LayerPrice, ...]:
        return self._priced_at(layout.at("full" if full else "none"), microbatch_size)

    def without_alike_replicas(self, layout: Layout) -> Layout:
        """With so few replicas that a rank holds and does the same: one, or two where several keep what compressed
        gradients leave out."""
        most = 1 if self.scenario.technique.compression == "none" else 2
        return replace(layout, dp=most) if layout.sharding == "none" and layout.dp > most else layout

    def _priced_at(self, layout: Layout, microbatch_size: int) -> tuple[LayerPrice, ...]:
        layout = self.without_alike_replicas(layout)
        key = (layout, microbatch_size)
        if key not in self._priced:
            found: dict[int, LayerPrice] = {}
            (loads, peaks), beside = (
                self._loads_at(layout, microbatch_size),
                self.working_bytes(layout, microbatch_size),
            )
            for like, layer in zip(self.alike, self.kinds, strict=True):
                if like not in found:
                    seen, precision = self.loads(microbatch_size), self.scenario.precision_of(layer)
                    handed_bytes = handed_out_bytes(layer, seen, self.graph, layout, precision)
                    load, peak = loads[layer.module], peaks[layer.module]
                    found[like] = self._price(like, layer, load, peak, layout, beside, handed_bytes)
            self._priced[key] = tuple(found[like] for like in self.alike)
        return self._priced[key]

    def layers(self, layout: Layout, microbatch_size: int) -> dict[str, LayerPrice]:
        """Layer id -> its price."""
        priced = self.of_kinds(layout, microbatch_size)
        return {layer: priced[kind] for layer, kind in self.kind_of.items()}

    def most_samples(self, layout: Layout, room_bytes: float) -> int:
        """No larger microbatch fits: at any level of recomputation some moment holds what one layer keeps without."""
        loads, kept = self.loads(1), [0]
        for like, layer in self._first_kinds():
            if layer.module not in layout.spread:  # kept bytes of the others are not linear in samples
                load = loads[layer.module]
                held = self._kept_bytes(like, layer, load, layout), self._offloaded_bytes(like, layer, load, layout)
                kept.append(sum(held))
        return math.floor(room_bytes / (max(kept) - 1)) if max(kept) > 1 else LARGEST_MICROBATCH

    def _kept_bytes(self, kind: int, layer: Layer, load: Load, layout: Layout) -> int:
        key = (kind, load, layout.shard(layer), layout.sharing(layer), layout.recomputed(layer))
        return _once(self._bytes, key, lambda: planned_kept_bytes(layer, load, self.scenario, layout))

    def working_bytes(self, layout: Layout, microbatch_size: int) -> int:
        """What any stage needs at work beside states and activations; only sharded parameters ask for replicas."""
        alike = replace(layout, dp=layout.dp if layout.sharding == "parameters" else 1, pools=(0,))
        return _once(self._bytes, (alike, microbatch_size), lambda: self._most_at_work(alike, microbatch_size))

    def _most_at_work(self, layout: Layout, microbatch_size: int) -> int:
        whole, (_, loads) = 0, self._loads_at(layout, microbatch_size)
        if layout.recompute in ("none", "selective", "full"):
            work = max(self._at_work(layout, microbatch_size))
        else:
            here, there = (self._at_work(layout.at(level), microbatch_size) for level in ("none", "full"))
            drops = self._dropped(layout.recompute)
            work = max(many if drop else few for few, many, drop in zip(here, there, drops, strict=True))
        if layout.sharding == "parameters":
            several = layout.replicas > 1, layout.expert_replicas > 1
            key = ("gathered", replace(layout, dp=1, recompute="none"), several)
            layers, scenario = self.kinds, self.scenario
            whole = _once(self._bytes, key, lambda: max(gathered_bytes(layer, scenario, layout) for layer in layers))
        return work + whole + self._travelling_bytes(layout, loads)

    def _at_work(self, layout: Layout, microbatch_size: int) -> tuple[int, ...]:
        """[kind] what each needs at work, but for weights that are gathered."""

        def ask() -> tuple[int, ...]:
            (_, loads), every = self._loads_at(layout, microbatch_size), zip(self.alike, self.kinds, strict=True)
            return tuple(self._working_bytes(like, layer, loads[layer.module], layout) for like, layer in every)

        alike = replace(layout, dp=1, sharding="none", pools=(0,))
        return _once(self._working, (alike, microbatch_size), ask)

    def _travelling_bytes(self, layout: Layout, loads: Loads) -> int:
        """Of one layer what is on its way to host memory or from it."""
        if not self.scenario.technique.host_activations:
            return 0
        every = zip(self.alike, self.kinds, strict=True)
        return max(self._offloaded_bytes(like, layer, loads[layer.module], layout) for like, layer in every)

    def _offloaded_bytes(self, kind: int, layer: Layer, load: Load, layout: Layout) -> int:
        key = ("away", kind, load, layout.shard(layer), layout.sharing(layer), layout.recomputed(layer))
        return _once(self._bytes, key, lambda: offloaded_bytes(layer, load, self.scenario, layout))

    def _working_bytes(self, kind: int, layer: Layer, load: Load, layout: Layout) -> int:
        key = ("at work", kind, load, layout.shard(layer), layout.sharing(layer), layout.recomputed(layer))
        return _once(self._bytes, key, lambda: layer_working_bytes(layer, load, self.scenario, layout))

    def _first_kinds(self) -> Iterator[tuple[int, Layer]]:
        """The first kind of each number in `alike`."""
        for like, place in self._first.items():
            yield like, self.kinds[place]

    def _price(
        self, kind: int, layer: Layer, load: Load, peak: Load, layout: Layout, beside: int, handed_bytes: int = 0
    ) -> LayerPrice:
        scenario, costs = self.scenario, self.costs
        shard, sharing = layout.shard(layer), layout.sharing(layer)
        sharded: tuple[Hashable, ...] = (layout.replicas > 1,) if scenario.technique.compression != "none" else ()
        if layout.sharding != "none":
            sharded = layout.sharding, layout.replicas, layout.expert_replicas
        again, together = layout.recomputed(layer), layout.microbatches_of(layer.module)
        kept_bytes, most_bytes = (self._kept_bytes(kind, layer, one, layout) for one in (load, peak))
        gathered = sharded if layout.sharding in ("gradients", "parameters") else ()
        forward_s, backward_s = _once(
            self._times,
            (kind, load, shard, sharing, again, gathered, layout.pools),
            lambda: (costs.forward_s(layer, load, layout), costs.backward_s(layer, load, layout)),
        )
        return LayerPrice(
            forward_s / together,
            backward_s / together,
            _once(self._bytes, (kind, shard, sharing, sharded), lambda: planned_state_bytes(layer, scenario, layout))
            + loss_working_bytes(layer, peak, scenario, layout, beside)
            + max(0, most_bytes - kept_bytes),
            math.ceil(kept_bytes / together) + handed_bytes,
            _once(self._trained, (kind, shard, sharing), lambda: trained_on_rank(layer, layout)),
            together,
        )


def _loss_kinds(kinds: tuple[Layer, ...]) -> tuple[int, ...]:
    return tuple(kind for kind, layer in enumerate(kinds) if layer.kind == "loss")


def way_s(
    costs: CostModel,
    edge: Edge,
    graph: ComputationGraph,
    loads: Loads,
    scenario: Scenario,
    layout: Layout,
    near: bool,
) -> float:
    """Seconds that a microbatch's tensor, and its gradient where one flows back, is on its way to a stage of the same
    mesh, with what ranks gather for that."""
    size = layout.sent_bytes(edge, graph, loads, scenario)
    seconds = costs.transfer_s(size, near) * (1 + edge.carries_grad)
    if layout.makes_whole(edge, graph):
        forward_s, backward_s = costs.make_whole_s(size, layout)
        seconds += forward_s + (backward_s if edge.carries_grad else 0.0)
    return seconds


def _once(known: dict[Hashable, T], key: Hashable, ask: Callable[[], T]) -> T:
    found = known.get(key)
    if found is None:
        found = known[key] = ask()
    return found
