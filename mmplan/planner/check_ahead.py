"""Can modules of a plan run a step ahead, and what does that hold? Shares no code with what plans them."""

from collections.abc import Iterator

from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.load import Loads
from mmplan.planner.finding import Finding
from mmplan.planner.plan import Plan, module_of


def check_ahead(plan: Plan, graph: ComputationGraph) -> Iterator[Finding]:
    """They have no backward and read nothing of this step, on stages of their own under 1F1B or GPipe."""
    names = set(plan.prefetch)
    if not names:
        return
    wanted = plan.scenario.constraints.prefetch
    layers = {layer.id: layer for layer in graph.layers()}
    for name in plan.prefetch:
        own = [layer for layer in layers.values() if layer.module == name]
        if not own or any(layer.has_backward for layer in own):
            yield _finding(f"{name} runs a step ahead, and is no module without a backward")
        if wanted is not None and name not in wanted:
            yield Finding(
                rule="constraints", message=f"{name} runs a step ahead, constraints.prefetch does not name it"
            )
    for edge in graph.edges():
        if module_of(edge.consumer) in names and module_of(edge.producer) not in names:
            yield _finding(f"{edge.consumer} runs a step ahead, and {edge.producer}, which it reads, does not")
    for index, stage in enumerate(plan.stages):
        inside = {module_of(layer) in names for layer in stage.layers}
        if len(inside) > 1:
            yield _finding(f"stage {index} holds {' and '.join(sorted(names))}, which run a step ahead, beside others")
    if all(module_of(layer) in names for stage in plan.stages for layer in stage.layers):
        yield _finding("all stages would run a step ahead")
    several = plan.batch_factor > 1 or plan.meshes or plan.placement or plan.orders
    if several or plan.schedule not in ("1f1b", "gpipe"):
        what = "on one stage per rank, all of one mesh, each microbatch alone, under 1f1b or gpipe"
        yield _finding(f"frozen modules run a step ahead {what}, and this plan has others")


def waiting_bytes(plan: Plan, graph: ComputationGraph, stage: int, loads: Loads) -> int:
    """What waits at a stage of outputs that are read a step later: at most one step of them where they are made, and
    as many where they are read."""
    stage_of, found = plan.stage_of_layer(), dict[tuple[str, int], int]()
    for edge in graph.edges():
        source, target = stage_of[edge.producer], stage_of[edge.consumer]
        if stage in (source, target) and plan.is_ahead(source) and not plan.is_ahead(target):
            each_bytes = plan.layout(source).sent_bytes(edge, graph, loads, plan.scenario)
            found[edge.producer, target] = plan.microbatches * each_bytes
    return sum(found.values())


def _finding(message: str) -> Finding:
    return Finding(rule="step ahead", message=message)
