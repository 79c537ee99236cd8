"""Prices of all layers for one tensor-parallel degree and microbatch size; equal layers are priced once."""

from copy import copy
from dataclasses import dataclass

from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.counts import trainable_parameters
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.load import Load
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.planned_memory import planned_kept_bytes, planned_state_bytes
from mmplan.planner.plan_technique import require_plannable
from mmplan.scenario.scenario import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPrice:
    """One layer on one rank, per mean microbatch."""

    forward_s: float
    backward_s: float
    state_bytes: int
    kept_bytes: int


class Prices:
    """Answers of one scenario's cost model, remembered.

    Costs are linear in loads: a mean microbatch is so many mean samples. `trainable` holds the trainable parameters of
    each layer.

    Raises:
        InputError: the scenario's technique is one that plans do not price.
    """

    def __init__(self, scenario: Scenario, graph: ComputationGraph, costs: CostModel) -> None:
        require_plannable(scenario)
        self.scenario, self.graph, self.costs = scenario, graph, costs
        self._sample_loads = mean_loads(scenario, 1)
        self._loads: dict[int, dict[str, Load]] = {}
        self._priced: dict[tuple[int, int], dict[str, LayerPrice]] = {}
        kinds: dict[object, Layer] = {}
        self._like = {
            layer.id: kinds.setdefault((layer.module, layer.ops, layer.grad_values), layer) for layer in graph.layers()
        }
        self._distinct = tuple(kinds.values())
        self.trainable = {layer.id: trainable_parameters(layer) for layer in graph.layers()}

    def with_costs(self, costs: CostModel) -> "Prices":
        """The same scenario, graph and loads under another cost model."""
        other = copy(self)
        other.costs, other._priced = costs, {}
        return other

    def under(self, scenario: Scenario, costs: CostModel) -> "Prices":
        """Another cluster, batch or constraints for the same model, data and device: layers keep their prices."""
        other = copy(self)
        other.scenario, other.costs = scenario, costs
        return other

    def loads(self, microbatch_size: int) -> dict[str, Load]:
        """Mean load of each module."""
        if microbatch_size not in self._loads:
            self._loads[microbatch_size] = {
                module: load.scaled(microbatch_size) for module, load in self._sample_loads.items()
            }
        return self._loads[microbatch_size]

    def layers(self, tp: int, microbatch_size: int) -> dict[str, LayerPrice]:
        """Layer id -> its price."""
        key = (tp, microbatch_size)
        if key not in self._priced:
            distinct = {layer.id: self._price(layer, tp, microbatch_size) for layer in self._distinct}
            self._priced[key] = {layer: distinct[like.id] for layer, like in self._like.items()}
        return self._priced[key]

    def _price(self, layer: Layer, tp: int, microbatch_size: int) -> LayerPrice:
        load, scenario = self.loads(microbatch_size)[layer.module], self.scenario
        return LayerPrice(
            forward_s=self.costs.forward_s(layer, load, tp),
            backward_s=self.costs.backward_s(layer, load, tp),
            state_bytes=planned_state_bytes(layer, scenario, tp),
            kept_bytes=planned_kept_bytes(layer, load, scenario, tp),
        )
