"""`CostModel` from the operator-level seconds of `layer_time.py` under the scenario's technique; nothing is measured.

The same functions price rows of published measurements (`mmplan backtest`) and single configurations
(`planner/estimate.py`).
"""

from mmplan.cost_models.collectives import Group, all_reduce_s, message_s
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layer_time import layer_seconds, optimizer_seconds
from mmplan.cost_models.load import Load
from mmplan.cost_models.shard import Shard
from mmplan.cost_models.time_rules import PHASES, Rules, scenario_rules
from mmplan.scenario.scenario import Scenario


class AnalyticCostModel:
    """`CostModel` of a scenario's cluster, precision, optimizer and technique, or of other `rules`.
    Equal layers are priced once per load.

    Raises:
        CostModelError: the cluster mixes device types, or its devices have no units for the precision.
    """

    def __init__(self, scenario: Scenario, rules: Rules | None = None) -> None:
        self._rules, self._optimizer = rules or scenario_rules(scenario), scenario.optimizer
        self._kinds: dict[tuple[object, ...], int] = {}
        self._kind_of: dict[int, tuple[Layer, int]] = {}  # by id(layer); the layer is held so that its id stays its own
        self._prices: dict[tuple[int, Load, int], dict[str, float]] = {}

    def forward_s(self, layer: Layer, load: Load, tp: int) -> float:
        return self._price(layer, load, tp)["forward"]

    def dgrad_s(self, layer: Layer, load: Load, tp: int) -> float:
        """With what the technique recomputes, which a backward needs first."""
        price = self._price(layer, load, tp)
        return price["dgrad"] + price["recompute"]

    def wgrad_s(self, layer: Layer, load: Load, tp: int) -> float:
        return self._price(layer, load, tp)["wgrad"]

    def backward_s(self, layer: Layer, load: Load, tp: int) -> float:
        return self.dgrad_s(layer, load, tp) + self.wgrad_s(layer, load, tp)

    def transfer_s(self, bytes_sent: float, same_node: bool) -> float:
        return message_s(bytes_sent, self._rules.node_link if same_node else self._rules.network_link)

    def all_reduce_s(self, bytes_reduced: float, ranks: int, ranks_per_node: int) -> float:
        group = Group(ranks, min(ranks, ranks_per_node))
        return all_reduce_s(bytes_reduced, group, self._rules.node_link, self._rules.network_link)

    def optimizer_s(self, trainable_parameters_on_rank: int) -> float:
        return optimizer_seconds(self._rules, self._optimizer, trainable_parameters_on_rank)

    def _price(self, layer: Layer, load: Load, tp: int) -> dict[str, float]:
        known = self._kind_of.get(id(layer))
        if known is None:
            kind = self._kinds.setdefault((layer.module, layer.kind, layer.ops, layer.grad_values), len(self._kinds))
            known = self._kind_of[id(layer)] = (layer, kind)
        key = (known[1], load, tp)
        if key not in self._prices:
            seconds = layer_seconds(self._rules, layer, load, Shard(tp=tp)).sum(axis=1)
            self._prices[key] = dict(zip(PHASES, seconds.tolist(), strict=True))
        return self._prices[key]
