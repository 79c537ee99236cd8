"""Where the seconds of a plan's busiest stage go: matrix products, attention, each kind of communication, and so on."""

from dataclasses import replace

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.layer_time import layer_seconds
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.time_rules import PARTS, RECOMPUTE, scenario_rules
from mmplan.planner.plan import Plan

NAMES = {
    "gemm": "matrix products",
    "attention": "attention",
    "pointwise": "pointwise operators",
    "vocabulary": "head and loss",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "host": "waiting for launches",
}
AGAIN, GATHERED = "recomputation", "gathering weights and outputs"


def busiest_parts(plan: Plan) -> dict[str, float]:
    """Part -> seconds of a step in which each rank of the busiest stage does it, over all mean microbatches; with
    several stages per rank as if all of them were the busiest, as the closed form has it.

    The sum is its forward and backward, so often. What sharded weights and spread modules gather is what the stage
    takes beyond its layers alone.

    Raises:
        CostModelError: the cluster mixes types of devices.
    """
    index = max(range(len(plan.stages)), key=lambda stage: plan.stages[stage].forward_s + plan.stages[stage].backward_s)
    stage, layout = plan.stages[index], plan.layout(index)
    graph, rules = build_graph(plan.scenario), scenario_rules(plan.scenario)
    loads = mean_loads(plan.scenario, plan.samples(index))
    parts = dict.fromkeys([*NAMES.values(), AGAIN], 0.0)
    for name in stage.layers:
        layer = graph.layer(name)
        technique = replace(rules.technique, recompute=layout.recomputed(layer), recompute_layers=None)
        at_once = layout.microbatches_of(layer.module)
        load = layout.load(layer, loads[layer.module].scaled(at_once))
        seconds = layer_seconds(replace(rules, technique=technique), layer, load, layout.shard(layer))
        seconds *= plan.scenario.model.module(layer.module).time_factor / at_once
        parts[AGAIN] += float(seconds[RECOMPUTE].sum())
        for part, value in zip(PARTS, seconds[:RECOMPUTE].sum(axis=0).tolist(), strict=True):
            parts[NAMES[part]] += value
    parts[GATHERED] = max(0.0, stage.forward_s + stage.backward_s - sum(parts.values()))
    return {part: plan.vp * plan.microbatches * value for part, value in parts.items()}
