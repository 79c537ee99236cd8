"""`CostModel` from the operator-level seconds of `layer_time.py` under the scenario's technique; nothing is measured.

The same functions price rows of published measurements (`mmplan backtest`) and single configurations
(`planner/estimate.py`).
"""

from dataclasses import replace

from mmplan.cost_models.collectives import Group, all_reduce_s, all_to_all_s, broadcast_s, gather_s, group_of, message_s
from mmplan.cost_models.compressed_bytes import FORMATS, code_bytes
from mmplan.cost_models.counts import FP32_BYTES, op_parameters
from mmplan.cost_models.host_offload import copied_seconds
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layer_time import OpSeconds, layer_seconds, op_seconds, optimizer_seconds
from mmplan.cost_models.layout import Layout, Trained, as_layout, trained_on_rank
from mmplan.cost_models.load import Load
from mmplan.cost_models.memory_states import is_expert
from mmplan.cost_models.shard import Shard
from mmplan.cost_models.time_rules import PHASES, Rules, pool_rules
from mmplan.scenario.scenario import DTYPE_BYTES, Dtype, Scenario
from mmplan.scenario.technique import Recompute, recomputing

Phases = dict[str, float]


class AnalyticCostModel:
    """`CostModel` of a scenario's cluster, precision, optimizer and technique. Where a stage lies in several pools it
    goes at the pace of the slowest.

    Args:
        rules: in place of those of the first pool, and of all that are equal to it.

    Raises:
        CostModelError: a device has no units for the precision.
    """

    def __init__(self, scenario: Scenario, rules: tuple[Rules, ...] | None = None) -> None:
        own = pool_rules(scenario) if rules is None else rules
        known = {one: _PoolCosts(scenario, one) for one in dict.fromkeys(own)}
        self._pools = tuple(known[one] for one in own)

    def forward_s(self, layer: Layer, load: Load, layout: int | Layout) -> float:
        ranks = as_layout(layout)
        return max(self._pools[pool].price(layer, load, ranks)["forward"] for pool in ranks.pools)

    def dgrad_s(self, layer: Layer, load: Load, layout: int | Layout) -> float:
        """With what is recomputed, which a backward needs first."""
        ranks = as_layout(layout)
        prices = [self._pools[pool].price(layer, load, ranks) for pool in ranks.pools]
        return max(price["dgrad"] + price["recompute"] for price in prices)

    def wgrad_s(self, layer: Layer, load: Load, layout: int | Layout) -> float:
        ranks = as_layout(layout)
        return max(self._pools[pool].price(layer, load, ranks)["wgrad"] for pool in ranks.pools)

    def backward_s(self, layer: Layer, load: Load, layout: int | Layout) -> float:
        return self.dgrad_s(layer, load, layout) + self.wgrad_s(layer, load, layout)

    def transfer_s(self, bytes_sent: float, same_node: bool) -> float:
        return max(pool.transfer_s(bytes_sent, same_node) for pool in self._pools)

    def make_whole_s(self, bytes_made: float, layout: Layout) -> tuple[float, float]:
        gather_s = max(pool.gather_parts_s(bytes_made, layout) for pool in self._pools)
        return gather_s, gather_s + max(pool.sum_rows_s(bytes_made, layout) for pool in self._pools)

    def join_rows_s(self, bytes_joined: float, layout: Layout) -> float:
        return max(self._pools[pool].join_rows_s(bytes_joined, layout) for pool in layout.pools)

    def place_rows_s(self, bytes_placed: float, layout: Layout) -> float:
        return max(self._pools[pool].place_rows_s(bytes_placed, layout) for pool in layout.pools)

    def share_rows_s(self, bytes_shared: float, layout: Layout, *, gathered: bool) -> float:
        return max(pool.share_rows_s(bytes_shared, layout, gathered) for pool in self._pools)

    def reduce_s(self, trained: Trained, layout: Layout, ranks_per_node: int) -> float:
        return max(self._pools[pool].reduce_s(trained, layout, ranks_per_node) for pool in layout.pools)

    def gather_s(self, trained: Trained, layout: Layout, ranks_per_node: int) -> float:
        return max(self._pools[pool].regather_s(trained, layout, ranks_per_node) for pool in layout.pools)

    def update_s(self, trained: Trained, layout: Layout) -> float:
        return max(self._pools[pool].update_s(trained, layout) for pool in layout.pools)

    def sharding_s(self, held: Trained, trained: Trained, layout: Layout) -> tuple[float, float]:
        parts = [self._pools[pool].sharding_s(held, trained, layout) for pool in layout.pools]
        return max(gather for gather, _ in parts), max(scatter for _, scatter in parts)

    @property
    def serial_share(self) -> float:
        return self._pools[0].serial_share


class _PoolCosts:
    """The devices and links of one pool. Equal layers are priced once per load."""

    def __init__(self, scenario: Scenario, rules: Rules) -> None:
        self._rules, self._optimizer, self._scenario = rules, scenario.optimizer, scenario
        self._mixed = len({DTYPE_BYTES[one] for one in scenario.precisions}) > 1
        self._some_wide = bool(scenario.constraints.forbidding("fp8"))
        self._factors = {module.name: module.time_factor for module in scenario.model.modules}
        self._kinds: dict[tuple[object, ...], int] = {}
        self._kind_of: dict[int, tuple[Layer, int]] = {}  # by id(layer); the layer is held so that its id stays its own
        self._prices: dict[tuple[object, ...], Phases] = {}
        self._parameters: dict[tuple[int, Shard, bool], tuple[Trained, Trained]] = {}
        self._of_ops: dict[tuple[object, ...], OpSeconds] = {}  # recomputation apart
        self._again: dict[tuple[Recompute, Dtype], Rules] = {}
        self._alone: dict[tuple[int, Load, Shard, Recompute], Phases] = {}

    def transfer_s(self, bytes_sent: float, same_node: bool) -> float:
        return message_s(bytes_sent, self._rules.node_link if same_node else self._rules.network_link)

    def reduce_s(self, trained: Trained, layout: Layout, ranks_per_node: int) -> float:
        """Sharded optimizers scatter sums of gradients and gather weights (arXiv 1910.02054, section 7); with sharded
        gradients only the gather is left for the end of a step, with sharded parameters nothing is."""
        rules, seconds = self._rules, self.regather_s(trained, layout, ranks_per_node)
        links = rules.node_link, rules.network_link
        groups = self._groups(trained, layout, ranks_per_node)
        if layout.sharding == "none":
            (_, replicas), *others = groups
            seconds += self._dense_sum_s(trained, replicas)
            seconds += sum(all_reduce_s(count * rules.gradient_bytes, group, *links) for count, group in others)
        elif layout.sharding == "optimizer":
            seconds += sum(gather_s(count * rules.gradient_bytes, group, *links) for count, group in groups)
        return seconds

    def _dense_sum_s(self, trained: Trained, group: Group) -> float:
        """Sums over the replicas; what may be is compressed where the technique says so, a message for each layer that
        all ranks get (`compressed_bytes.py`)."""
        rules, form = self._rules, FORMATS.get(self._rules.technique.compression)
        links = rules.node_link, rules.network_link
        if form is None or group.ranks == 1 or trained.dense == trained.kept:
            return all_reduce_s(trained.dense * rules.gradient_bytes, group, *links)
        coded, more = trained.dense - trained.kept, max(0, trained.messages - 1)
        sent_s = gather_s(group.ranks * form.wire_bytes(coded), group, *links) + more * gather_s(1, group, *links)
        coding_s = code_bytes(form, coded, group.ranks) / rules.pointwise_bytes_per_s
        return all_reduce_s(trained.kept * rules.gradient_bytes, group, *links) + sent_s + coding_s

    def regather_s(self, trained: Trained, layout: Layout, ranks_per_node: int) -> float:
        """Of it the gather of weights that were updated in shares."""
        if layout.sharding not in ("optimizer", "gradients"):
            return 0.0
        links, groups = (self._rules.node_link, self._rules.network_link), self._groups(trained, layout, ranks_per_node)
        more = self._more_bytes(trained)
        return sum(
            gather_s(count * self._gathered_bytes + wide, group, *links)
            for (count, group), wide in zip(groups, more, strict=True)
        )

    def _more_bytes(self, counts: Trained) -> tuple[int, int, int]:
        """Of dense, spread and experts: bytes of fp32 weights beyond those of 16-bit ones."""
        more = FP32_BYTES - self._rules.element_bytes if self._mixed else 0
        dense, spread, experts = counts.wide or (0, 0, 0)
        return dense * more, spread * more, experts * more

    def update_s(self, trained: Trained, layout: Layout) -> float:
        wide: float | None = 0.0
        if self._mixed and trained.total:
            parts = None if trained.wide is None else Trained(*trained.wide)
            wide = None if parts is None else _kept_of(parts, layout)
        return optimizer_seconds(self._rules, self._optimizer, _kept_of(trained, layout), wide)

    @property
    def _gathered_bytes(self) -> int:
        """Bytes per parameter of a gather after the update."""
        in_fp8 = self._rules.technique.fp8 != "none" and self._rules.stack.fp8_gather and not self._some_wide
        return 1 if in_fp8 else self._rules.element_bytes

    def _groups(self, counts: Trained, layout: Layout, ranks_per_node: int) -> list[tuple[int, Group]]:
        """Parameters by the ranks that hold the same ones."""
        near = min(layout.replicas, ranks_per_node)
        experts = group_of(layout.expert_replicas, layout.expert_side, self._rules.devices_per_node)
        return [
            (counts.dense, Group(layout.replicas, near)),
            (counts.spread, Group(layout.replicas * layout.tp, near * layout.tp)),
            (counts.experts, experts),
        ]

    def price(self, layer: Layer, load: Load, layout: Layout) -> Phases:
        """Seconds of each phase."""
        known = self._kind_of.get(id(layer))
        if known is None:
            kind = (layer.module, layer.kind, layer.ops, layer.grad_values, layer.readers, layer.placed, layer.no_fp8)
            known = self._kind_of[id(layer)] = (layer, self._kinds.setdefault(kind, len(self._kinds)))
        shard, again = layout.shard(layer), layout.recomputed(layer)
        sharded = self._moves_states(layout)
        ranks = (layout.sharding, layout.replicas, layout.expert_replicas) if sharded else ()
        key = (known[1], load, shard, again, ranks, layout.sharing(layer))
        if key not in self._prices:
            price = dict(self._compute(known[1], layer, layout.load(layer, load), shard, again))
            if sharded:
                self._add_gathered_parameters(price, known[1], layer, layout)
            if any(layout.handover(layer)):
                self._add_handover(price, layer, load, layout)
            self._prices[key] = price
        return self._prices[key]

    def _compute(self, kind: int, layer: Layer, load: Load, shard: Shard, again: Recompute) -> Phases:
        key = (kind, load, shard, again)
        if key not in self._alone:
            precision = self._scenario.precision_of(layer)
            if (again, precision) not in self._again:
                technique = recomputing(self._rules.technique, again)
                self._again[again, precision] = replace(self._rules, technique=technique, precision=precision)
            rules = self._again[again, precision]

            def of_ops(routed: bool) -> OpSeconds:
                part = (kind, load, routed, shard if routed else Shard(tp=shard.tp, cp=shard.cp))
                if part not in self._of_ops:
                    self._of_ops[part] = op_seconds(rules, layer, load, shard, routed)
                return self._of_ops[part]

            seconds = layer_seconds(rules, layer, load, shard, of_ops).sum(axis=1)
            seconds *= self._factors[layer.module]
            self._alone[key] = dict(zip(PHASES, seconds.tolist(), strict=True))
        return self._alone[key]

    def _add_gathered_parameters(self, price: Phases, kind: int, layer: Layer, layout: Layout) -> None:
        """What FSDP adds to a layer (arXiv 2304.11277, section 3): weights are gathered for forward and for backward,
        gradients scattered, every microbatch; beside them it computes, but for a part of the smaller of the two."""
        gather, scatter = self.sharding_s(*self._held(kind, layer, layout), layout)
        price["forward"] += self._beside(price["forward"], gather)
        backward = price["dgrad"] + price["wgrad"] + price["recompute"]
        if backward > 0:
            price["dgrad"] += self._beside(backward, gather + scatter)

    def sharding_s(self, held: Trained, trained: Trained, layout: Layout) -> tuple[float, float]:
        """(gather of weights, scatter of gradients) per microbatch that sharding needs for so many parameters."""
        if not self._moves_states(layout):
            return 0.0, 0.0
        rules = self._rules
        copied = copied_seconds(rules, _own_share(held, layout), _own_share(trained, layout))
        near = group_of(layout.replicas, layout.tp, rules.devices_per_node).per_node
        links = rules.node_link, rules.network_link
        gather = sum(
            gather_s(n * rules.element_bytes + wide, g, *links)
            for (n, g), wide in zip(self._groups(held, layout, near), self._more_bytes(held), strict=True)
        )
        scatter = sum(gather_s(n * rules.gradient_bytes, g, *links) for n, g in self._groups(trained, layout, near))
        return copied[0] + (gather if layout.sharding == "parameters" else 0.0), copied[1] + scatter

    def _moves_states(self, layout: Layout) -> bool:
        """Whether weights or gradients of a rank are elsewhere between microbatches."""
        away = self._rules.technique.host_states == "parameters" and layout.sharding == "parameters"
        return away or (layout.sharding in ("gradients", "parameters") and layout.most_replicas > 1)

    def _held(self, kind: int, layer: Layer, layout: Layout) -> tuple[Trained, Trained]:
        """All parameters of a rank, and the trained ones; a layer that uses another's matrix handles it once more."""
        shard, spread = layout.shard(layer), layer.module in layout.spread
        key = (kind, shard, spread)
        if key not in self._parameters:
            whole = sum(op_parameters(op, shard) for op in layer.ops if not is_expert(op))
            experts = sum(op_parameters(op, shard) for op in layer.ops) - whole
            held = Trained(0, whole, experts) if spread else Trained(whole, 0, experts)
            trained = trained_on_rank(layer, layout) + trained_on_rank(layer, layout, tied=True)
            self._parameters[key] = held.in_precision_of(layer), trained
        return self._parameters[key]

    @property
    def serial_share(self) -> float:
        return self._rules.stack.fsdp_serial

    def _beside(self, compute_s: float, communication_s: float) -> float:
        serial = self.serial_share * min(compute_s, communication_s)
        return max(0.0, communication_s - compute_s) + serial

    def _add_handover(self, price: Phases, layer: Layer, load: Load, layout: Layout) -> None:
        """What is made whole of a layer's output for readers in other modules: parts are gathered, and with cp their
        gradient is summed over it; or each rank gets the rows that it needs, and returns their gradient; or readers
        take parts of whole rows, and the gradients of these are gathered."""
        size = layer.output.elements(load, Shard()) * DTYPE_BYTES[self._scenario.precision_of(layer)]
        if layout.places(layer):
            gather = total = self.place_rows_s(size, layout)
        else:
            gather, total = self.gather_parts_s(size, layout), self.sum_rows_s(size, layout)
        gathers, sums, joins = layout.handover(layer)
        price["forward"] += gathers * gather
        if price["dgrad"] + price["wgrad"] > 0:
            price["dgrad"] += sums * total + joins * gather

    def gather_parts_s(self, size: float, layout: Layout) -> float:
        """Rows that the ranks of a replica have in parts, `size` bytes in all, become whole on each."""
        rules, ranks = self._rules, layout.tp * layout.cp
        group = Group(ranks, min(ranks, rules.devices_per_node))
        return gather_s(size, group, rules.node_link, rules.network_link)

    def join_rows_s(self, size: float, layout: Layout) -> float:
        """Rows of which each cp rank has a slice, `size` bytes in all, become whole on each, or their sum is dealt."""
        rules = self._rules
        group = group_of(layout.cp, layout.tp, rules.devices_per_node)
        return gather_s(size, group, rules.node_link, rules.network_link)

    def place_rows_s(self, size: float, layout: Layout) -> float:
        """Rows of which each cp rank has a slice, `size` bytes in all, go to those that need them, as many to each."""
        rules = self._rules
        group = group_of(layout.cp, layout.tp, rules.devices_per_node)
        return all_to_all_s(size / layout.cp, group, rules.node_link, rules.network_link)

    def share_rows_s(self, size: float, layout: Layout, gathered: bool) -> float:
        """Rows of `size` bytes become whole on each rank of a tensor-parallel group."""
        rules = self._rules
        group = group_of(layout.tp, 1, rules.devices_per_node)
        return (gather_s if gathered else broadcast_s)(size, group, rules.node_link, rules.network_link)

    def sum_rows_s(self, size: float, layout: Layout) -> float:
        """Gradients of rows that all cp ranks have, of which each knows what its own tokens gave, are summed."""
        rules = self._rules
        group = group_of(layout.cp, layout.tp, rules.devices_per_node)
        return all_reduce_s(size, group, rules.node_link, rules.network_link)


def _kept_of(counts: Trained, layout: Layout) -> float:
    """Parameters that a rank updates."""
    return counts.total if layout.sharding == "none" else _own_share(counts, layout)


def _own_share(counts: Trained, layout: Layout) -> float:
    """Of so many parameters of a rank those that it keeps itself where replicas share them."""
    shared = counts.dense / layout.replicas + counts.spread / (layout.replicas * layout.tp)
    return shared + counts.experts / layout.expert_replicas
