"""Why not another plan: what degrees that a user asks about would cost, term by term, or what excludes them.

The scenario is solved again with these degrees alone. The winner's bound holds for them too, so nothing asked about can
be faster than it by more than the gap.
"""

from dataclasses import replace

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.errors import CostModelError, InfeasibleError, InputError, NoPlanFoundError
from mmplan.planner.ahead import best_ahead
from mmplan.planner.alternative import Alternative
from mmplan.planner.diagnose import memory_shortage
from mmplan.planner.first_bounds import NEVER
from mmplan.planner.frontier import Frontier
from mmplan.planner.mesh_choices import mesh_choices
from mmplan.planner.pins import Pins, broken_rule, has_pins, overruled, pinned, unsearched
from mmplan.planner.plan import Plan
from mmplan.planner.pool_order import in_pool_orders, with_techniques
from mmplan.planner.recipes import step_time
from mmplan.planner.repeated import Limits
from mmplan.planner.simulate import simulate
from mmplan.planner.space import build_space
from mmplan.planner.stage_parts import busiest_parts
from mmplan.planner.stopping import Deadline
from mmplan.planner.why_not_schedule import why_not_schedule
from mmplan.planner.without_effect import with_effect, without_effect
from mmplan.scenario.scenario import Scenario
from mmplan.units import format_seconds

# Terms below this share of the largest one are left out of the sentence, and of the stage's parts all but so many.
SMALLEST_TERM = 0.05
MOST_PARTS = 3
SAME_S = 1e-9  # less is what sums of doubles lose


def why_not(scenario: Scenario, winner: Plan, pins: Pins, limits: Limits) -> Alternative:
    """Why `winner`, found under the same limits, and not a plan with these degrees."""
    if pins.of("schedule"):
        return why_not_schedule(winner, pins)
    if has_pins(winner, pins):
        return Alternative(asked=pins.text, verdict="chosen", reason="the plan is one of these", plan=winner)
    reason = broken_rule(scenario, pins)
    if reason:
        return Alternative(asked=pins.text, verdict="excluded", reason=reason)
    forbidden = overruled(scenario, pins)
    asked, deadline = pinned(scenario, pins), Deadline(limit_s=limits.time_limit_s, stop=limits.stop)
    shortage = ""
    try:
        shortage = "" if asked.constraints.modules else _shortage(asked, deadline)
        if shortage and not mesh_choices(asked):
            return Alternative(asked=pins.text, verdict="out of memory", reason=_also(forbidden, shortage))
        if pins.of("prefetch"):
            return _ahead(asked, winner, pins, limits, deadline, forbidden)
        result = limits.solve(asked)
    except InfeasibleError as error:
        if shortage:  # on one mesh, and so it is on meshes of their own
            return Alternative(asked=pins.text, verdict="out of memory", reason=_also(forbidden, shortage))
        return Alternative(asked=pins.text, verdict="excluded", reason=_also(forbidden, str(error)))
    except NoPlanFoundError as error:
        return Alternative(asked=pins.text, verdict="not found", reason=_also(forbidden, str(error)))
    except InputError as error:  # a module that cannot have what was asked
        return Alternative(asked=pins.text, verdict="excluded", reason=str(error))
    if idle := without_effect(pins, result.plan):
        return _where_it_counts(asked, winner, pins, limits, forbidden, idle)
    return _compared(pins, winner, result.plan, limits.gap, forbidden)


def _ahead(
    asked: Scenario, winner: Plan, pins: Pins, limits: Limits, deadline: Deadline, forbidden: str
) -> Alternative:
    """The best plan that does run them a step ahead, which a search keeps only where it is faster."""
    spaces = map(build_space, with_techniques(in_pool_orders(asked)))
    plans = [plan for space in spaces if (plan := best_ahead(space, gap=limits.gap, deadline=deadline)) is not None]
    if not plans:
        reason = f"no cut that fits has {' and '.join(pins.of('prefetch'))} on stages of their own, under 1F1B"
        return Alternative(asked=pins.text, verdict="excluded", reason=_also(forbidden, reason))
    step_s, plan = min(((_simulated_s(plan), plan) for plan in plans), key=lambda pair: pair[0])
    told = _compared(pins, winner, plan, limits.gap, forbidden)
    seen = f"in simulation {format_seconds(step_s)} against {format_seconds(_simulated_s(winner))}"
    return replace(told, reason=f"{told.reason}; {seen}")


def _simulated_s(plan: Plan) -> float:
    return simulate(plan, build_graph(plan.scenario), AnalyticCostModel(plan.scenario)).step_time_s


def _where_it_counts(
    asked: Scenario, winner: Plan, pins: Pins, limits: Limits, forbidden: str, idle: str
) -> Alternative:
    """The best plan with what was asked changes nothing by it: the best one in which it does."""
    plans, reasons = [], []
    for limited in with_effect(asked, pins):
        try:
            plan = limits.solve(limited).plan
        except (InfeasibleError, NoPlanFoundError) as error:
            reasons.append(str(error))
            continue
        plans += [] if without_effect(pins, plan) else [plan]
    if not plans:
        more = "; no other plan can be" if reasons else "; the limits leave no other plan"
        reason = (
            f"the best plan with it is as fast as without: {idle}{more}{': ' if reasons else ''}{'; '.join(reasons)}"
        )
        return Alternative(asked=pins.text, verdict="excluded", reason=_also(forbidden, reason))
    best = min(plans, key=lambda plan: plan.certificate.objective_s)
    told = _compared(pins, winner, best, limits.gap, forbidden)
    return replace(told, reason=f"{told.reason}; where it changes nothing it costs nothing ({idle})")


def _shortage(scenario: Scenario, deadline: Deadline) -> str:
    """Why nothing fits into memory on one mesh; empty where the bounds do not exclude it."""
    shortage = ""
    for placed in with_techniques((scenario,)):
        space = build_space(placed)
        if Frontier(space.bounds, space.scale).least_value() != NEVER:
            return ""
        shortage = memory_shortage(space, deadline)
    return shortage


def _compared(pins: Pins, winner: Plan, other: Plan, gap: float, forbidden: str) -> Alternative:
    winner, found = winner.one_chunk, other
    other = other.one_chunk
    more_s = other.certificate.objective_s - winner.certificate.objective_s
    near = more_s <= gap * winner.certificate.objective_s
    if near:  # the winner's bound says nothing of what was not searched
        forbidden = forbidden or unsearched(winner.scenario, pins)
    near &= not forbidden
    terms = {name: other_s - _terms(winner)[name] for name, other_s in _terms(other).items()}
    stage = _stage_more_s(winner, other)
    if any(plan.placement and plan.certificate.status == "given" for plan in (winner, other)):  # no closed form
        terms, stage = {}, None
    repeat_s, fill_s, finish_s = terms.values() if terms else (None, None, None)
    return Alternative(
        asked=pins.text,
        verdict="excluded" if forbidden else "within the gap" if near else "slower",
        reason=_also(forbidden, _sentence(more_s, winner, gap if near else None, terms, stage or {})),
        plan=found,
        objective_s=other.certificate.objective_s,
        bound_s=other.certificate.bound_s,
        repeat_more_s=repeat_s,
        fill_more_s=fill_s,
        finish_more_s=finish_s,
        stage_more_s=stage,
    )


def _terms(plan: Plan) -> dict[str, float]:
    """The three terms of the closed form, which is their sum."""
    time = step_time(plan)
    return {
        "repeating the busiest stage": time.repeat_s,
        "filling and draining the pipeline": time.critical_path_s,
        "reducing gradients and updating": time.finish_s,
    }


def _stage_more_s(winner: Plan, other: Plan) -> dict[str, float] | None:
    """What the busiest stage does longer, in a step; None where parts are not known."""
    try:
        ours, theirs = busiest_parts(winner), busiest_parts(other)
    except CostModelError:
        return None
    return {part: theirs[part] - ours[part] for part in theirs}


def _sentence(more_s: float, winner: Plan, gap: float | None, terms: dict[str, float], stage: dict[str, float]) -> str:
    """`120 ms (4.1%) slower: repeating the busiest stage +150 ms, ...; its matrix products +100 ms, ...`."""
    share = abs(more_s) / winner.certificate.objective_s
    verdict = f"{format_seconds(abs(more_s))} ({share:.1%}) {'slower' if more_s >= 0 else 'faster'}"
    if gap is not None:
        verdict = f"never excluded: {verdict}, and the search only proves {gap:.1%}"
    whole, parts = _largest(terms), _largest(stage)[:MOST_PARTS]
    clauses = [", ".join(whole)] * bool(whole) + [f"in the busiest stage {', '.join(parts)}"] * bool(parts)
    if not clauses and abs(more_s) < SAME_S:
        return "as fast, term by term: the two plans differ in nothing that takes time"
    return f"{verdict}: {'; '.join(clauses)}" if clauses else verdict


def _largest(terms: dict[str, float]) -> list[str]:
    """Terms with their signs, the largest first, the small ones left out."""
    largest_s = max(map(abs, terms.values()), default=0.0)
    return [
        f"{name} {'+' if term_s > 0 else '-'}{format_seconds(abs(term_s))}"
        for name, term_s in sorted(terms.items(), key=lambda item: -abs(item[1]))
        if term_s and abs(term_s) >= SMALLEST_TERM * largest_s
    ]


def _also(forbidden: str, reason: str) -> str:
    return f"{forbidden}; without that: {reason}" if forbidden else reason
