"""Tables and JSON values of `optimize --why-not` and `--zone-prices`."""

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from mmplan.cost_models.layout import RECOMPUTE_LEVELS, spread_text, together_text
from mmplan.planner.alternative import Alternative
from mmplan.planner.plan import Plan
from mmplan.planner.shadow_price import ZonePrice
from mmplan.report.documents import values
from mmplan.report.summary import mesh_texts
from mmplan.report.tables import table
from mmplan.scenario.technique import SHARDINGS
from mmplan.units import format_ms, format_seconds

_LEAST_S = 1e-12  # less is what sums of floats lose


def alternatives_tables(alternatives: Sequence[Alternative], prices: Sequence[ZonePrice]) -> list[Table]:
    """What was asked beside the plan; no table for what was not."""
    return [*why_not_tables(alternatives), *zone_tables(prices)]


def why_not_tables(alternatives: Sequence[Alternative]) -> list[Table]:
    """One row per question; then, where there are plans to compare, what the busiest stage does longer."""
    if not alternatives:
        return []
    numbers = ("step time", "repeat", "fill", "finish")
    answers = table("Why not ... (seconds of the closed form)", "asked", "answer", *numbers, "reason", right=numbers)
    for one in alternatives:
        terms = (one.repeat_more_s, one.fill_more_s, one.finish_more_s)
        step = "-" if one.objective_s is None else format_seconds(one.objective_s)
        answers.add_row(one.asked, one.verdict, step, *map(more, terms), escape(one.reason))
    compared = [one for one in alternatives if one.stage_more_s is not None]
    if not compared:
        return [answers]
    asked = [one.asked for one in compared]
    parts = table("In the busiest stage, per step", "", *asked, right=asked)
    for part in dict.fromkeys(part for one in compared for part in one.stage_more_s or {}):
        seconds = [(one.stage_more_s or {}).get(part, 0.0) for one in compared]
        if any(seconds):
            parts.add_row(part, *map(more, seconds))
    return [answers, parts]


def zone_tables(prices: Sequence[ZonePrice]) -> list[Table]:
    """One row per zone; no table without zones."""
    if not prices:
        return []
    numbers = ("layers", "step without it", "costs, ms per step", "proven range, ms per step")
    result = table("What zones cost per step", "zone", "forbids", *numbers, right=numbers)
    for price in prices:
        if price.price_s is None or price.without_s is None or price.least_s is None or price.most_s is None:
            cells = ("-", "no plan in the limit", "-")
        else:
            cost, least, most = map(format_ms, (price.price_s, price.least_s, price.most_s))
            cells = (format_seconds(price.without_s), cost, f"{least} to {most}")
        result.add_row(price.zone, ", ".join(price.forbid), str(price.layers), *cells)
    return [result]


def alternatives_values(alternatives: Sequence[Alternative], prices: Sequence[ZonePrice]) -> dict[str, Any]:
    """`why_not` and `zone_prices` of the document of `optimize`; plans by their degrees."""
    told = [{**values(one), "plan": None if one.plan is None else degrees_text(one.plan)} for one in alternatives]
    return {"why_not": told, "zone_prices": values(list(prices))}


def degrees_text(plan: Plan) -> str:
    """`pp=2 dp=4 tp=1 ZeRO-3, 8 x 2, recompute full`: microbatches x samples, levels that some stage recomputes.

    Unlike meshes follow, each as `vision 1 x 8 x 1 x 1`: its stages, and its dp, cp and tp."""
    cp = f" cp={plan.cp}" if plan.cp > 1 else ""
    ep = f" ep={plan.ep} etp={plan.etp}" if plan.ep > 1 else ""
    zero = f" ZeRO-{SHARDINGS.index(plan.sharding)}" if plan.sharding != "none" else ""
    spread = spread_text(plan.spread, plan.patches) + together_text(plan.together, plan.batch_factor)
    levels = [level for level in RECOMPUTE_LEVELS if level != "none" and level in {s.recompute for s in plan.stages}]
    again = f", recompute {' and '.join(levels)}" if levels else ""
    vp = f" vp={plan.vp}" if plan.vp > 1 else ""
    degrees = f"pp={plan.pp}{vp} dp={plan.dp}{cp} tp={plan.tp}{ep}{zero}"
    return f"{degrees}, {plan.microbatches} x {plan.microbatch_size}{spread}{again}" + "".join(
        f"; {mesh}" for mesh in mesh_texts(plan)
    )


def more(seconds: float | None) -> str:
    """A difference with its sign; `-` where there is none."""
    if seconds is None:
        return "-"
    shown_s = 0.0 if abs(seconds) < _LEAST_S else seconds
    return ("+" if shown_s >= 0 else "-") + format_seconds(abs(shown_s))
