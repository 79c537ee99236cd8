"""Why not another schedule: the plan's cut under it in simulation, for the closed form knows none but 1F1B."""

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.alternative import Alternative
from mmplan.planner.pins import Pins, overruled
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import Prediction
from mmplan.planner.schedules.families import FAMILIES
from mmplan.planner.schedules.reschedule import Choice, optimized, with_family
from mmplan.planner.schedules.search.best import SEARCH_S
from mmplan.planner.simulate import simulate
from mmplan.units import format_bytes, format_seconds

SAME_S = 1e-9  # less is what sums of doubles lose


def why_not_schedule(winner: Plan, pins: Pins) -> Alternative:
    """The quickest of the schedules asked about, of those that apply and fit."""
    names = pins.of("schedule")
    if winner.schedule in names:
        return Alternative(asked=pins.text, verdict="chosen", reason="the plan is one of these", plan=winner)
    graph, costs = build_graph(winner.scenario), AnalyticCostModel(winner.scenario)
    ours, found, reasons = simulate(winner, graph, costs), [], []
    for name in names:
        if name in FAMILIES:
            choice = with_family(winner, name, graph, costs)
        else:
            choice = Choice(name=name, plan=optimized(winner, graph, costs, search_s=SEARCH_S), fits=True)
        if choice.plan is None:
            reasons.append(f"{name} is not for this cut: {choice.reason}")
        elif not choice.fits:
            fullest = max(choice.plan.stages, key=lambda stage: stage.memory_bytes - stage.capacity_bytes)
            reasons.append(
                f"{name} keeps {format_bytes(fullest.memory_bytes)} on a rank that may use "
                f"{format_bytes(fullest.capacity_bytes)}"
            )
        else:
            found.append((simulate(choice.plan, graph, costs), choice.plan))
    if not found:
        return Alternative(asked=pins.text, verdict="excluded", reason="; ".join(reasons))
    theirs, plan = min(found, key=lambda one: one[0].step_time_s)
    forbidden = overruled(winner.scenario, pins)
    more_s = theirs.step_time_s - ours.step_time_s
    reason = _sentence(winner, ours, plan, theirs)
    if more_s <= 0:
        reason = f"never excluded, for the search minimises the closed form of 1F1B: {reason}"
    return Alternative(
        asked=pins.text,
        verdict="excluded" if forbidden else "slower" if more_s > 0 else "within the gap",
        reason=f"{forbidden}; without that: {reason}" if forbidden else reason,
        plan=plan,
    )


def _sentence(winner: Plan, ours: Prediction, plan: Plan, theirs: Prediction) -> str:
    """`12 ms (3.1%) slower in simulation than under 1f1b: pipeline +12 ms (bubble 8.1%, not 5.2%)`."""
    more_s = theirs.step_time_s - ours.step_time_s
    memory = f"fullest rank {_fullest(plan)}, not {_fullest(winner)}"
    if abs(more_s) < SAME_S:
        bubble = f"bubble {theirs.bubble:.1%} in both"
        return f"as long in simulation as under {winner.schedule}: no rank waits longer or less ({bubble}); {memory}"
    share = abs(more_s) / ours.step_time_s
    pipeline_s = theirs.pipeline_s - ours.pipeline_s
    behind_s = more_s - pipeline_s
    word = "slower" if more_s >= 0 else "faster"
    cut = ", its stages cut into chunks anew" if len(plan.stages) > len(winner.stages) else ""
    return (
        f"{format_seconds(abs(more_s))} ({share:.1%}) {word} in simulation than under {winner.schedule}{cut}: pipeline "
        f"{_signed(pipeline_s)} (bubble {theirs.bubble:.1%}, not {ours.bubble:.1%}), reducing gradients and updating "
        f"{_signed(behind_s)}; {memory}"
    )


def _signed(seconds: float) -> str:
    return ("-" if seconds < 0 else "+") + format_seconds(abs(seconds))


def _fullest(plan: Plan) -> str:
    return format_bytes(max(stage.memory_bytes for stage in plan.stages))
