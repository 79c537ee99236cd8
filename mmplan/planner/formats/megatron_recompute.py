"""What Megatron can say about recomputation: one number of blocks for all stages, or the attention core everywhere."""

from dataclasses import dataclass, replace

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.loads import mean_loads
from mmplan.planner.formats.exported import Loss
from mmplan.planner.formats.linearised import mean_step_s
from mmplan.planner.plan import Plan
from mmplan.scenario.scenario import ModelModule

Words = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """Arguments, what they cost beyond the plan, and how many blocks of each stage are recomputed with them."""

    words: Words
    losses: tuple[Loss, ...] = ()
    notes: tuple[str, ...] = ()


def recompute_words(plan: Plan, module: ModelModule, target: str) -> Recompute:
    """`block` recomputes the first N blocks of every stage (of every chunk where a rank has several).

    N is the most that any stage of the plan recomputes, so no stage keeps more than planned; what others repeat beyond
    their own number is priced in the closed form: the slowest rank m - 1 times, and every stage once.
    """
    graph = build_graph(plan.scenario)
    dropped, whole = [], []
    for index, stage in enumerate(plan.stages):
        layout = plan.layout(index)
        blocks = [graph.layer(layer) for layer in stage.layers if layer.startswith(f"{module.name}.")]
        blocks = [layer for layer in blocks if layer.kind == "block"]
        whole.append(len(blocks))
        dropped.append(sum(layout.recomputed(layer) == "full" for layer in blocks))
    selective = [stage.recompute == "selective" for stage in plan.stages]
    notes = _of_encoders(plan, module)
    words: Words
    if not any(dropped):
        if not any(selective):
            return Recompute(words=(), notes=notes)
        words = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn")
        return Recompute(words=words, losses=_attention_too(plan, selective, target), notes=notes)
    most = max(dropped)
    if dropped == whole and not any(selective):
        words = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
        return Recompute(words=words, notes=notes)
    words = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", str(most))
    more = [min(most, count) - own for count, own in zip(whole, dropped, strict=True)]
    losses: tuple[Loss, ...] = ()
    if any(more):
        fewest = min(own for own, add in zip(dropped, more, strict=True) if add)
        sentence = f"{target} recomputes {most} blocks in every stage, the plan as few as {fewest} in some"
        losses = (Loss(sentence=sentence, step_s=_price_s(plan, module, more)),)
    return Recompute(words=words, losses=losses, notes=notes)


def _price_s(plan: Plan, module: ModelModule, more: list[int]) -> float:
    """Seconds of a step in which stages recompute so many blocks more."""
    costs, graph = AnalyticCostModel(plan.scenario), build_graph(plan.scenario)
    load = mean_loads(plan.scenario, plan.microbatch_size)[module.name]
    extra_s = []
    for index, (stage, count) in enumerate(zip(plan.stages, more, strict=True)):
        blocks = [graph.layer(layer) for layer in stage.layers if layer.startswith(f"{module.name}.")]
        blocks = [layer for layer in blocks if layer.kind == "block"]
        each_s = 0.0
        if count:
            kept, dropped = (plan.layout(index).at(level) for level in ("none", "full"))
            each_s = sum(costs.backward_s(x, load, dropped) - costs.backward_s(x, load, kept) for x in blocks)
            each_s /= len(blocks)
        extra_s.append(count * each_s)

    def slowest_s(added_s: list[float]) -> float:
        of_stage = [one.forward_s + one.backward_s + more_s for one, more_s in zip(plan.stages, added_s, strict=True)]
        return max(sum(of_stage[stage] for stage in plan.stages_of(row)) for row in range(plan.pp))

    return (plan.microbatches - 1) * (slowest_s(extra_s) - slowest_s([0.0] * len(extra_s))) + sum(extra_s)


def _attention_too(plan: Plan, selective: list[bool], target: str) -> tuple[Loss, ...]:
    """Stages that keep their attention in the plan recompute it as well."""
    if all(selective):
        return ()
    stages = tuple(replace(stage, recompute="selective") for stage in plan.stages)
    more_s = mean_step_s(replace(plan, stages=stages)) - mean_step_s(plan)
    return (Loss(sentence=f"{target} recomputes the attention core in all stages or in none", step_s=more_s),)


def _of_encoders(plan: Plan, module: ModelModule) -> tuple[str, ...]:
    """Encoders have their own configuration; what the plan recomputes of them is told."""
    graph, found = build_graph(plan.scenario), dict[str, list[bool]]()
    for index, stage in enumerate(plan.stages):
        layout = plan.layout(index)
        for name in stage.layers:
            layer = graph.layer(name)
            if layer.module != module.name and layer.kind == "block":
                found.setdefault(layer.module, []).append(layout.recomputed(layer) == "full")
    return tuple(
        f"the plan recomputes {sum(each)} of {len(each)} blocks of {name}: set it in the encoder's own configuration"
        for name, each in found.items()
        if any(each)
    )
