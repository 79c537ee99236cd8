"""A plan under the two schedules that most frameworks run: 1F1B, and 1F1B with several chunks of layers per rank."""

from dataclasses import replace
from itertools import pairwise

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.formats.linearised import Draft, repriced
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.reschedule import with_family
from mmplan.scenario.schedule_names import ScheduleName


def under_1f1b(draft: Draft, target: str, *, chunks: bool = True) -> Draft:
    """1F1B where ranks have one stage, interleaved 1F1B where they have several and microbatches come in rounds.

    Chunks that are not laid round the ranks are dealt out so; where microbatches do not come in rounds, or the target
    has no `chunks`, those that follow each other become one stage.
    """
    plan = draft.plan
    if plan.pp == 1 and len(plan.stages) == 1:
        return replace(draft, plan=replace(plan, schedule="1f1b", orders=(), placement=()))
    if not plan.placement:
        plain = replace(plan, schedule="1f1b", orders=())
        return draft if _is(plan, "1f1b") else draft.changed(repriced(plain), _told(plan, "1F1B", target))
    looped = chunks and plan.pp > 1 and plan.microbatches % plan.pp == 0
    if looped and _is(plan, "interleaved"):
        return draft
    count, rest = divmod(len(plan.stages), plan.pp)
    if looped and rest == 0 and count > 1:
        dealt = replace(plan, placement=tuple(stage % plan.pp for stage in range(len(plan.stages))))
        graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
        choice = with_family(dealt, "interleaved", graph, costs)
        if choice.plan is not None:
            return draft.changed(choice.plan, _told(plan, f"interleaved 1F1B with {count} chunks per rank", target))
    parts = [
        plan.stages[first:last] for first, last in pairwise(len(plan.stages) * r // plan.pp for r in range(plan.pp + 1))
    ]
    merged = [tuple(layer for stage in part for layer in stage.layers) for part in parts]
    one_each = repriced(
        replace(plan, schedule="1f1b", placement=(), orders=()), stages=merged, levels=[p[0].recompute for p in parts]
    )
    return draft.changed(one_each, _told(plan, "1F1B with one stage per rank", target))


def _is(plan: Plan, name: ScheduleName) -> bool:
    """Whether the plan's orders are those of the family, whatever they are called."""
    if not plan.orders:
        return plan.schedule == name
    choice = with_family(plan, name, build_graph(plan.scenario), AnalyticCostModel(plan.scenario))
    return choice.plan is not None and choice.plan.orders == plan.orders


def _told(plan: Plan, instead: str, target: str) -> str:
    return f"{target} has no schedule {plan.schedule} for this plan: it runs {instead}"
