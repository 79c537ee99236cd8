"""What ranks hold of a user's own model beyond what the plan counts: layers that stay whole on tensor-parallel ranks,
token tables and heads among them where they cannot be split, with logits of the whole vocabulary, and what stages share
while replicas share out state.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch.nn import Parameter

from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.memory_states import ParameterCounts, Replicas, state_parts
from mmplan.cost_models.planned_memory import planned_kept_bytes, planned_state_bytes
from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.runtime.dtypes import TORCH_DTYPES
from mmplan.runtime.ghost.holdings import Holdings
from mmplan.runtime.shards import each_once
from mmplan.scenario.technique import Sharding
from mmplan.units import format_bytes


def require_memory(
    plan: Plan, graph: ComputationGraph, held: Holdings, stages: Iterable[int], note: Callable[[str], None]
) -> None:
    """Tell what stages hold beyond the plan.

    Raises:
        InputError: one holds more than its devices have.
    """
    for stage in stages:
        states, logits = states_beyond(plan, graph, held, stage), logits_beyond(plan, graph, held, stage)
        if states + logits == 0:
            continue
        counted, capacity = plan.stages[stage].memory_bytes, plan.stages[stage].capacity_bytes
        told = (
            f"stage {stage} holds {format_bytes(states)} of weights, gradients and optimizer state and "
            f"{format_bytes(logits)} of logits that the plan counts as shared out (what stages share, heads "
            "with cp and what cannot be split stay whole)"
        )
        if counted + states + logits > capacity:
            raise InputError(
                f"{told}: with the {format_bytes(counted)} of the plan more than the {format_bytes(capacity)} of a "
                "device: set `constraints.tp: [1]`, or a larger `constraints.memory_headroom`, and optimize again"
            )
        note(told)


def states_beyond(plan: Plan, graph: ComputationGraph, held: Holdings, stage: int) -> int:
    """Bytes of weights, gradients and optimizer state on each rank of a stage, without those that the plan counts."""
    layout = plan.layout(stage)
    holders, spread = layout.dp * layout.cp, layout.dp * layout.cp * layout.tp
    states = _state_bytes(plan, held, each_once(held.alone(stage)), holders, plan.sharding)
    states += _state_bytes(plan, held, each_once(held.of_dealt(stage)), spread, plan.sharding)
    states += _state_bytes(plan, held, each_once(held.of_experts(stage)), layout.expert_replicas, plan.sharding)
    for tie in held.ties:
        copies, sharding = held.of_tie(plan, stage, tie)
        states += _state_bytes(plan, held, each_once(copies), holders, sharding)
    layers = [graph.layer(layer) for layer in plan.stages[stage].layers]
    return max(0, states - sum(planned_state_bytes(layer, plan.scenario, layout) for layer in layers))


def logits_beyond(plan: Plan, graph: ComputationGraph, held: Holdings, stage: int) -> int:
    """Bytes of logits that each rank of a stage keeps, without those that the plan counts."""
    layout, loads = plan.layout(stage), mean_loads(plan.scenario, plan.microbatch_size)
    layers = (graph.layer(layer) for layer in plan.stages[stage].layers)
    losses = [layer for layer in layers if layer.kind == "loss" and layer.module not in held.logits]
    whole = Layout(cp=layout.cp, dp=layout.dp)
    more = (
        planned_kept_bytes(layer, loads[layer.module], plan.scenario, whole)
        - planned_kept_bytes(layer, loads[layer.module], plan.scenario, layout)
        for layer in losses
    )
    return plan.stages[stage].in_flight * sum(more)


def _state_bytes(plan: Plan, held: Holdings, parameters: Sequence[Parameter], holders: int, sharding: Sharding) -> int:
    """Of parameters that so many ranks have alike."""
    names = {id(parameter): name for name, parameter in held.model.named_parameters()}
    trained, frozen = Counter[torch.dtype](), Counter[torch.dtype]()
    for parameter in parameters:
        name = names[id(parameter)]
        cut = held.cuts.get(name) or (None if held.experts is None else held.experts.cuts.get(name))
        counts = trained if name in held.trained else frozen
        counts[parameter.dtype] += parameter.numel() // (1 if cut is None else cut.degree)
    scenario, technique = plan.scenario, replace(plan.scenario.technique, sharding=sharding)
    replicas = Replicas(dense=holders, expert=holders)
    total = 0
    for precision in scenario.precisions:
        dtype = TORCH_DTYPES[precision]
        counted = ParameterCounts(dense=trained[dtype], dense_frozen=frozen[dtype])
        total += sum(part.bytes for part in state_parts(counted, replicas, precision, scenario.optimizer, technique))
    return total
