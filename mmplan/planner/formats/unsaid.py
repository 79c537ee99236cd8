"""Needs of a plan that no word of an exported file says and no change of the plan avoids: losses without a price."""

from mmplan.cost_models.build import build_graph
from mmplan.planner.formats.exported import Loss
from mmplan.planner.formats.needs import Need, plan_needs
from mmplan.planner.formats.support import Cell, cell, target_of
from mmplan.planner.plan import Plan
from mmplan.scenario.document import listed

_UNSAID = (
    "padded heads",
    "optimizer state in host memory",
    "weights in host memory",
    "activations in host memory",
    "inputs of recomputed blocks in host memory",
)


def unsaid(plan: Plan, target: str) -> tuple[Loss, ...]:
    """Those that take a plug-in of the framework.

    Args:
        target: a column of `support.yaml`.
    """
    needs = [need for need in plan_needs(plan, build_graph(plan.scenario)) if need.name in _UNSAID]
    found = [(need, cell(target, need.name)) for need in needs]
    return tuple(plug_in_loss(need, one, target_of(target).name) for need, one in found if one.status == "plug-in")


def fp8_losses(plan: Plan, target: str) -> tuple[Loss, ...]:
    """A target whose FP8 is that of all blocks loses what a zone keeps out of it."""
    zones = [zone.name for zone in plan.scenario.constraints.zones if "fp8" in zone.forbid]
    if plan.scenario.technique.fp8 == "none" or not zones:
        return ()
    sentence = (
        f"{target} has FP8 for all blocks alike: those of {listed(zones, 3)}, kept out of it here, would be in FP8"
    )
    return (Loss(sentence=sentence, step_s=None),)


def plug_in_loss(need: Need, one: Cell, name: str) -> Loss:
    """What a framework of that name takes a plug-in for."""
    return Loss(sentence=f"{name} needs a plug-in for {need.name} ({need.sentence}): {one.why}", step_s=None)
