"""The chain that frameworks for language models know: encoders beside the first layers, blocks in order, the head last.

Megatron-LM, its derivatives and torchtitan pipeline the language model alone. An encoder belongs to the first stage,
with the token table that merges its output; layers that read an encoder's tokens later (DeepStack) stand there too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.degrees import divides
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.loads import mean_loads
from mmplan.errors import CheckError
from mmplan.planner.contract import contract
from mmplan.planner.formats.linearised import Draft, repriced
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.chunks import balanced_ends
from mmplan.scenario.scenario import ModelModule


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageStage:
    """What a stage holds: the token table, blocks by index, the head with its loss, and layers of other modules."""

    embedding: bool
    blocks: tuple[int, ...]
    head: bool
    others: tuple[str, ...]


def the_language_model(plan: Plan, target: str) -> ModelModule:
    """The module that the target pipelines.

    Raises:
        CheckError: there is none, or several; or another module feeds its cross-attention.
    """
    found = [module for module in plan.scenario.model.modules if module.kind == "language_model"]
    names = " and ".join(module.name for module in found)
    if len(found) != 1:
        raise CheckError(f"{target} pipelines one language model; {plan.scenario.model.name} has {names or 'none'}")
    crossing = [edge.producer for edge in plan.scenario.model.edges if edge.kind == "cross_attention"]
    if crossing:
        raise CheckError(
            f"{target} hands one tensor from stage to stage; {crossing[0]} feeds cross-attention in blocks of {names}"
        )
    return found[0]


def language_stages(plan: Plan, module: ModelModule) -> tuple[LanguageStage, ...]:
    """What every stage holds, in the order of stages."""
    return tuple(_contents(stage.layers, module.name) for stage in plan.stages)


def _contents(layers: Sequence[str], name: str) -> LanguageStage:
    own = [layer.partition(".")[2] for layer in layers if layer.startswith(f"{name}.")]
    return LanguageStage(
        embedding="embed" in own,
        blocks=tuple(int(part) for part in own if part.isdigit()),
        head="head" in own,
        others=tuple(layer for layer in layers if not layer.startswith(f"{name}.")),
    )


def on_a_chain(draft: Draft, module: ModelModule, target: str) -> Draft:
    """Encoders and the token table in the first stage; where more than the table has to move, the plan is cut anew.

    Raises:
        CheckError: there are fewer pieces than stages then.
    """
    plan, graph = draft.plan, build_graph(draft.plan.scenario)
    encoders = tuple(layer.id for layer in graph.layers() if layer.module != module.name)
    table = f"{module.name}.embed"
    first = contract(graph, encoders).groups[0] if encoders else (table,)
    missing = [layer for layer in first if layer not in plan.stages[0].layers]
    if not missing:
        return draft
    left = [tuple(layer for layer in stage.layers if layer not in missing) for stage in plan.stages[1:]]
    if missing == [table] and all(left):
        made = repriced(plan, stages=[first, *left], levels=[stage.recompute for stage in plan.stages])
        return draft.changed(made, f"{target} has the token table beside the encoders, in the first stage")
    groups = contract(graph, (*encoders, *plan.scenario.constraints.no_split)).groups
    if len(groups) < len(plan.stages):
        raise CheckError(
            f"{target} has encoders in the first stage, and then {plan.scenario.model.name} has {len(groups)} pieces "
            f"for {len(plan.stages)} stages"
        )
    made = repriced(plan, stages=_slowest_least(plan, graph, groups))
    behind = any(layer.startswith(f"{module.name}.") and layer != table for layer in missing)
    what = "encoders and the blocks that read their tokens" if behind else "encoders and the token table"
    return draft.changed(made, f"{target} has {what} in the first stage; the rest is cut anew")


def _slowest_least(plan: Plan, graph: ComputationGraph, groups: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Groups in order, in as many stages as the plan has."""
    costs, layout = AnalyticCostModel(plan.scenario), plan.layout(0)
    loads = mean_loads(plan.scenario, plan.microbatch_size)

    def seconds(name: str) -> float:
        layer = graph.layer(name)
        load = loads[layer.module]
        return costs.forward_s(layer, load, layout) + costs.backward_s(layer, load, layout)

    ends = balanced_ends([sum(map(seconds, group)) for group in groups], len(plan.stages))
    return [tuple(layer for group in groups[first:last] for layer in group) for first, last in pairwise([0, *ends])]


def without_spread(draft: Draft, target: str) -> Draft:
    """Modules that the plan runs whole on part of the samples, split by tp like the rest; where tp is 1, every rank of
    cp runs them on all samples.

    Raises:
        CheckError: tp does not divide one of them.
    """
    plan = draft.plan
    if not plan.spread or plan.width == 1:
        return replace(draft, plan=replace(plan, spread=(), patches=()))
    for name in plan.spread:
        module = plan.scenario.model.module(name)
        if not divides(module, plan.tp):
            raise CheckError(
                f"the plan deals the samples of {name} out to {plan.width} ranks, as tp={plan.tp} does not divide its "
                f"widths; {target} only splits modules by tp"
            )
    names = " and ".join(plan.spread)
    instead = f"splits {names} by tp" if plan.tp > 1 else f"runs {names} in full on every rank of cp"
    return draft.changed(repriced(plan, spread=(), patches=()), f"{target} {instead} instead of dealing samples out")
