"""Can modules of a plan run several microbatches at once, and what passes between stages then?"""

from collections.abc import Iterator

from mmplan.cost_models.graph import ComputationGraph
from mmplan.planner.finding import Finding
from mmplan.planner.plan import Plan, module_of


def check_together(plan: Plan, graph: ComputationGraph) -> Iterator[Finding]:
    """They read nothing that is made one by one, in whole groups, under a schedule that is made for that."""
    k, m, names = plan.batch_factor, plan.microbatches, set(plan.together)
    if k < 1 or (k > 1) != bool(names) or len(names) < len(plan.together):
        yield _finding(f"{' and '.join(plan.together) or 'no module'} would run {k} microbatches at once")
        return
    if m % k:
        yield _finding(f"{m} microbatches / batch factor {k} = {m / k:g} is no whole number of groups")
    fronts = {module.name for module in plan.scenario.model.modules if module.kind != "language_model"}
    for name in plan.together:
        if name not in fronts:
            yield _finding(f"{name} runs {k} microbatches at once, and is no module in front of a language model")
    ends = {(module_of(edge.producer), module_of(edge.consumer)) for edge in graph.edges()}
    for producer, name in sorted(ends):
        if name in names and producer not in names:
            yield _finding(f"{name} runs {k} microbatches at once, and {producer}, which it reads, each alone")
    if k > 1 and (plan.meshes or plan.placement or plan.orders or plan.schedule not in ("1f1b", "gpipe")):
        what = "on one stage per rank, all of one mesh, under 1f1b or gpipe"
        yield _finding(f"several microbatches at once are run {what}, and this plan has others")


def sent_with(plan: Plan, graph: ComputationGraph, layer: str, mark: str, *, reader: int) -> range:
    """Microbatches with which a layer's output goes to stage `reader` (`mark` is >) or its gradient comes back (<):
    all, or of those that layers at both ends run at once the first, and for the gradient the last."""
    k, held = plan.batch_factor, plan.stages[reader].layers
    modules = {module_of(edge.consumer) for edge in graph.edges() if edge.producer == layer and edge.consumer in held}
    if module_of(layer) not in plan.together or modules.isdisjoint(plan.together):
        return range(plan.microbatches)
    return range(0 if mark == ">" else k - 1, plan.microbatches, k)


def _finding(message: str) -> Finding:
    return Finding(rule="batch factor", message=message)
