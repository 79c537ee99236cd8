"""Needs of a plan that no word of an exported file says and no change of the plan avoids: losses without a price."""

from mmplan.cost_models.build import build_graph
from mmplan.planner.formats.exported import Loss
from mmplan.planner.formats.needs import Need, plan_needs
from mmplan.planner.formats.support import Cell, cell, target_of
from mmplan.planner.plan import Plan

_UNSAID = ("padded heads", "optimizer state in host memory")


def unsaid(plan: Plan, target: str) -> tuple[Loss, ...]:
    """Those that take a plug-in of the framework.

    Args:
        target: a column of `support.yaml`.
    """
    needs = [need for need in plan_needs(plan, build_graph(plan.scenario)) if need.name in _UNSAID]
    found = [(need, cell(target, need.name)) for need in needs]
    return tuple(plug_in_loss(need, one, target_of(target).name) for need, one in found if one.status == "plug-in")


def plug_in_loss(need: Need, one: Cell, name: str) -> Loss:
    """What a framework of that name takes a plug-in for."""
    return Loss(sentence=f"{name} needs a plug-in for {need.name} ({need.sentence}): {one.why}", step_s=None)
