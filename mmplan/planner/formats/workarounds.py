"""What a framework does instead of a need that it has no word for: the plan changed so, told and priced.

A plug-in that nobody has written costs nobody knows what: such a loss has no price.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mmplan.cost_models.build import build_graph
from mmplan.planner.check import require_structure
from mmplan.planner.formats.language_chain import without_spread
from mmplan.planner.formats.linearised import Draft, each_alone, repriced, require_fit
from mmplan.planner.formats.needs import plan_needs
from mmplan.planner.formats.sequence_length import padded
from mmplan.planner.formats.support import plugged, target_of
from mmplan.planner.formats.unsaid import plug_in_loss
from mmplan.planner.plan import Plan, scenario_hash

Workaround = Callable[[Draft, str], Draft]


def worked_around(plan: Plan, target: str, known: Mapping[str, Workaround]) -> Draft:
    """The plan as a framework runs it: every need that takes a plug-in goes through its workaround, if there is one.

    Args:
        target: a column of `support.yaml`.
        known: workarounds by need.

    Raises:
        CheckError: the plan is not sound, needs what is impossible in the framework, or does not fit once changed.
    """
    require_structure(plan)
    name = target_of(target).name
    draft = each_alone(_in_one_piece(plan), name)
    alone = replace(plan, together=(), batch_factor=1, prefetch=())
    for need, cell in plugged(plan_needs(alone, build_graph(plan.scenario)), target):
        if need.name in known:
            draft = known[need.name](draft, name)
        else:
            draft = replace(draft, losses=(*draft.losses, plug_in_loss(need, cell, name)))
    if draft.plan.certificate is not plan.certificate:
        require_fit(draft.plan, name)
    return draft


def _in_one_piece(plan: Plan) -> Plan:
    """Stages that all lie on one pipeline rank as the one model that they are."""
    if plan.pp > 1 or len(plan.stages) == 1:
        return plan
    levels = {stage.recompute for stage in plan.stages}
    order = [layer.id for layer in build_graph(plan.scenario).layers()]
    alone = replace(plan, placement=(), orders=(), schedule="1f1b", schedule_certificate=None)
    return repriced(alone, stages=[tuple(order)], levels=[levels.pop() if len(levels) == 1 else "full"])


def with_sharding(draft: Draft, sharding: str, sentence: str) -> Draft:
    """Another ZeRO stage."""
    if draft.plan.sharding == sharding:
        return draft
    return draft.changed(repriced(draft.plan, sharding=sharding), sentence)


def all_recomputed(draft: Draft, target: str) -> Draft:
    """Every block drops its activations, where the target knows all or nothing."""
    if all(stage.recompute == "full" for stage in draft.plan.stages):
        return draft
    plan = repriced(draft.plan, levels=["full"] * len(draft.plan.stages))
    return draft.changed(plan, f"{target} recomputes all blocks or none: it recomputes all")


def with_technique(draft: Draft, sentence: str, **changes: Any) -> Draft:
    """Other software choices."""
    scenario = draft.plan.scenario
    changed = replace(scenario, technique=replace(scenario.technique, **changes))
    plan = repriced(draft.plan, scenario=changed)
    return draft.changed(replace(plan, scenario_hash=scenario_hash(changed)), sentence)


def images_whole(draft: Draft, target: str) -> Draft:
    """Whole images on each rank in place of rows of all."""
    names = " and ".join(draft.plan.patches)
    sentence = f"{target} deals whole images of {names} out instead of their patches"
    return draft.changed(repriced(draft.plan, patches=()), sentence)


def by_ring(draft: Draft, target: str) -> Draft:
    """Keys and values around a ring in place of an all-to-all."""
    return with_technique(draft, f"{target} passes keys and values around a ring", context_parallel="ring")


def residuals_whole(draft: Draft, target: str) -> Draft:
    """Without sequence parallelism."""
    return with_technique(draft, f"{target} keeps residuals whole on every tp rank", sequence_parallel=False)


def filled_up(draft: Draft, target: str) -> Draft:
    """Every sample as long as the longest."""
    for module in draft.plan.scenario.model.modules:
        if module.kind == "language_model":
            draft = padded(draft, module, target)
    return draft


SPLIT: Mapping[str, Workaround] = dict.fromkeys(("spread modules", "patch groups"), without_spread)
