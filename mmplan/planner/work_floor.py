"""What no plan of a scenario can beat, without listing a single one: its matrix products at the rate of the devices.

For what a limit ends before it begins. However ranks share the products of linear layers, together they compute at
least as long as these FLOPs take at the rate of large products, so n of them take at least an n-th of it.
"""

from dataclasses import replace

import numpy as np

from mmplan.cost_models.counts import op_dgrad_flops, op_wgrad_flops, product_flops
from mmplan.cost_models.expert_ops import GroupedLinear
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.ops import Linear
from mmplan.cost_models.time_rules import pool_rules
from mmplan.planner.by_devices import StepsByDevices
from mmplan.planner.objective import Objective, scale_of
from mmplan.planner.quantise import NS_PER_S
from mmplan.scenario.scenario import Scenario

SAFE = 1 - 1e-9  # sums of doubles in another order


def work_floor(scenario: Scenario, graph: ComputationGraph, objective: Objective) -> int:
    """No plan has a lower value, on any number of ranks, with any number of chunks and under any schedule.

    Args:
        graph: of the scenario, or of one that differs in its technique or cluster alone.
    """
    steps = step_floors(scenario, graph)
    ranks, step_ns = (np.array(list(values), dtype=np.int64) for values in (steps.keys(), steps.values()))
    scale = scale_of(objective, scenario.cluster, np.zeros(0, dtype=np.int64))
    return int(scale.values_on(ranks, step_ns).min())


def step_floors(scenario: Scenario, graph: ComputationGraph) -> StepsByDevices:
    """By number of devices."""
    ranks = np.arange(1, scenario.cluster.device_count + 1)
    step_ns = np.floor(_rank_seconds(scenario, graph) * SAFE / ranks * NS_PER_S).astype(np.int64)
    return dict(zip(ranks.tolist(), step_ns.tolist(), strict=True))


def _rank_seconds(scenario: Scenario, graph: ComputationGraph) -> float:
    """Of all products of linear layers in a step, at the best rate of any pool and precision."""
    loads, total = mean_loads(scenario, 1), 0.0
    factors = {module.name: module.time_factor for module in scenario.model.modules}
    for layer in graph.layers():
        load = loads[layer.module]
        flops = sum(
            product_flops(op, load) + op_dgrad_flops(layer, op, load) + op_wgrad_flops(op, load)
            for op in layer.ops
            if isinstance(op, Linear | GroupedLinear)
        )
        total += flops * factors[layer.module]
    return total * scenario.global_batch / _best_rate(scenario)


def _best_rate(scenario: Scenario) -> float:
    """FLOP/s of large products."""
    rules = [replace(rule, precision=one) for rule in pool_rules(scenario) for one in scenario.precisions]
    return max(max(rule.rate_flops_per_s, rule.block_rate[0]) for rule in rules)
