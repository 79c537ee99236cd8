"""Choices that a plan has in name alone, such as gradients compressed in one replica: why, and where they count."""

from collections.abc import Iterator
from dataclasses import replace

from mmplan.cost_models.degrees import tp_degrees
from mmplan.planner.compression_price import why_unchanged
from mmplan.planner.configuration import divisors
from mmplan.planner.pins import Pins
from mmplan.planner.plan import Plan
from mmplan.scenario.scenario import Scenario


def without_effect(pins: Pins, plan: Plan) -> str:
    """Why what was asked changes nothing in a plan that has it; empty where it does."""
    replicas = plan.dp * plan.cp
    if _compresses(pins) and replicas == 1 and not plan.meshes:
        return "dp x cp = 1: one replica has no gradients to sum with others, and nothing is compressed"
    if _compresses(pins) and (why := why_unchanged(plan)):
        return f"nothing is compressed: {why}"
    if pins.of("sharding") and "none" not in pins.of("sharding") and plan.width * plan.dp == 1 and not plan.meshes:
        return "dp = 1: no other rank has the same weights, so there is none to split states with"
    if pins.of("sequence_parallel") == (True,) and plan.tp == 1:
        return "tp = 1: a rank has all columns and all rows of a layer, and nothing is split"
    if pins.of("spread") and plan.width == 1:
        what = (
            f"the images of {' and '.join(pins.of('patches'))} are not cut" if pins.of("patches") else "none is spread"
        )
        alone = " (constraints.tp allows 1)" if plan.scenario.constraints.tp == (1,) else ""
        return f"tp x cp = 1{alone}: a rank has all images and clips of its microbatch, and {what}"
    return ""


def with_effect(asked: Scenario, pins: Pins) -> Iterator[Scenario]:
    """The scenario asked about, limited to plans in which it does change something; one by one, as far as the other
    limits leave any."""
    rules = asked.constraints
    if _compresses(pins) and "none" in (rules.sharding or ("none",)) and asked.technique.sharding == "none":
        dp = tuple(d for d in rules.dp or divisors(asked.global_batch) if 1 < d <= asked.cluster.device_count)
        if dp:
            yield replace(asked, constraints=replace(rules, sharding=("none",), dp=dp))
    if pins.of("sharding"):
        dp = tuple(d for d in rules.dp or divisors(asked.global_batch) if 1 < d <= asked.cluster.device_count)
        if dp:
            yield replace(asked, constraints=replace(rules, dp=dp))
    if pins.of("spread") or pins.of("sequence_parallel") == (True,):
        tp = tuple(degree for degree in rules.tp or tp_degrees(asked) if degree > 1)
        if tp:
            yield replace(asked, constraints=replace(rules, tp=tp))
    if pins.of("spread"):
        cp = tuple(degree for degree in rules.cp or (2, 4, 8, 16, 32, 64) if degree > 1)
        if cp:
            yield replace(asked, constraints=replace(rules, tp=rules.tp and (min(rules.tp),), cp=cp))


def _compresses(pins: Pins) -> bool:
    return bool(pins.of("compression")) and "none" not in pins.of("compression")
