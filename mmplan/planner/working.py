"""What the pipeline ranks of a plan need beside states and the activations of mean microbatches."""

from functools import partial

from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.peak_loads import peak_loads
from mmplan.cost_models.planned_memory import loss_working_bytes, planned_excess_bytes, planned_working_bytes
from mmplan.planner.plan import Plan


def working_bytes(plan: Plan, graph: ComputationGraph) -> tuple[int, ...]:
    """Bytes of each pipeline rank at work in a microbatch at the 99th percentile: of its stage that needs most, and of
    its losses what they need beyond."""
    scenario = plan.scenario
    peaks = [
        plan.layout(stage).at_once(partial(peak_loads, scenario), plan.samples(stage))
        for stage in range(len(plan.stages))
    ]
    known: dict[tuple[frozenset[str], Layout], int] = {}
    at_work = []
    for stage, loads in enumerate(peaks):
        layout, modules = plan.layout(stage), plan.beside(stage)
        if (modules, layout) not in known:
            beside = [layer for layer in graph.layers() if layer.module in modules]
            known[modules, layout] = planned_working_bytes(beside, loads, scenario, layout)
        at_work.append(known[modules, layout])
    found = []
    for row in range(plan.pp):
        own = plan.stages_of(row)
        beyond = sum(
            loss_working_bytes(layer, peaks[stage][layer.module], scenario, plan.layout(stage), at_work[stage])
            for stage in own
            for layer in map(graph.layer, plan.stages[stage].layers)
            if layer.kind == "loss"
        )
        found.append(max(at_work[stage] for stage in own) + beyond)
    return tuple(found)


def excess_bytes(plan: Plan, graph: ComputationGraph) -> tuple[int, ...]:
    """Bytes of each pipeline rank that a microbatch at the 99th percentile keeps beyond a mean one."""
    found = [0] * plan.pp
    for index, stage in enumerate(plan.stages):
        layout = plan.layout(index)
        ways = (partial(of, plan.scenario) for of in (mean_loads, peak_loads))
        mean, peak = (layout.at_once(of, plan.samples(index)) for of in ways)
        for layer in map(graph.layer, stage.layers):
            pair = mean[layer.module], peak[layer.module]
            found[plan.row(index)] += planned_excess_bytes(layer, *pair, plan.scenario, layout)
    return tuple(found)
