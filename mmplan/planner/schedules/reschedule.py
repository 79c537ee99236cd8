"""Another schedule for a plan: a family by name, all of them side by side, or the best that a search finds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.graph import ComputationGraph
from mmplan.errors import CheckError, InfeasibleError, InputError, NoPlanFoundError
from mmplan.planner.plan import Plan, ScheduleCertificate
from mmplan.planner.plan_schedule import plan_schedule
from mmplan.planner.schedule import Schedule
from mmplan.planner.schedules.chunks import GIVEN, chunked_plan
from mmplan.planner.schedules.evaluate import evaluate, memory_peaks
from mmplan.planner.schedules.families import FAMILIES
from mmplan.planner.schedules.plan_problem import is_whole, plan_problem, whole_backwards, why_whole
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem
from mmplan.planner.schedules.search.best import best_schedule
from mmplan.planner.schedules.text import schedule_text
from mmplan.planner.simulate import simulate
from mmplan.planner.stage_graph import build_stage_graph
from mmplan.scenario.schedule_names import SCHEDULE_NAMES, ScheduleName, in_chunks_of

LOOPED: tuple[ScheduleName, ...] = ("interleaved", "looped-bfs")
V_SHAPED: tuple[ScheduleName, ...] = ("zb-v", "v-half", "v-min", "dualpipe-v")
LEAST_SEARCH_S = 2.0  # where only a searched schedule is allowed
WORTH = 0.005  # part of a step that a searched schedule has to save
# Forwards (stages x microbatches) above which there is a search only where the scenario asks for one: reading so large
# a program, before any search, takes seconds.
MOST_SEARCHED = 6_000
CHUNKS = 2  # per rank, where a family wants several and the plan has one


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A schedule for a plan: the plan with it, or why there is none. `fits`: every rank stays within its memory."""

    name: ScheduleName
    plan: Plan | None
    fits: bool
    reason: str = ""


def with_family(plan: Plan, name: ScheduleName, graph: ComputationGraph, costs: CostModel) -> Choice:
    """The plan under a family; one that wants several chunks per rank cuts every stage anew into `CHUNKS`.

    Raises:
        CheckError: the plan's cut is not acyclic or leaves a layer out.
    """
    if plan.batch_factor > 1 or plan.prefetch:
        return Choice(name=name, plan=None, fits=False, reason=_together(plan))
    plan = plan.one_chunk
    if name in LOOPED + V_SHAPED and not plan.placement:
        chunked = chunked_plan(plan, graph, costs, CHUNKS, v_shaped=name in V_SHAPED)
        if isinstance(chunked, NotApplicable):
            return Choice(name=name, plan=None, fits=False, reason=chunked.reason)
        plan = chunked
    problem = plan_problem(plan, graph, costs)
    schedule = FAMILIES[name](problem)
    if isinstance(schedule, NotApplicable):
        stage = schedule.weightless
        why = "" if stage is None or not is_whole(plan, stage) else f": {why_whole(plan, stage)}"
        return Choice(name=name, plan=None, fits=False, reason=schedule.reason + why)
    return _choice(plan, name, problem, whole_backwards(plan, schedule))


def with_orders(plan: Plan, graph: ComputationGraph, costs: CostModel) -> Plan:
    """The plan with memory and microbatches in flight as its own orders hold them.

    Raises:
        CheckError: the orders are not for its stages.
    """
    stages = build_stage_graph([stage.layers for stage in plan.stages], graph)
    made = _choice(plan, plan.schedule, plan_problem(plan, graph, costs), plan_schedule(plan, stages)).plan
    assert made is not None
    return replace(made, orders=plan.orders)


def compare_families(
    plan: Plan, names: Sequence[ScheduleName], graph: ComputationGraph, costs: CostModel
) -> tuple[Choice, ...]:
    """The plan under each family."""
    return tuple(with_family(plan, name, graph, costs) for name in names)


def optimized(
    plan: Plan,
    graph: ComputationGraph,
    costs: CostModel,
    *,
    search_s: float,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> Plan:
    """The plan with the best schedule that `search_s` of work find for its stages (see `best_schedule`).

    Raises:
        NoPlanFoundError: no schedule fits the memory.
    """
    if plan.batch_factor > 1 or plan.prefetch:
        raise InputError(_together(plan))
    problem = plan_problem(plan, graph, costs)
    result = best_schedule(problem, search_s=search_s, seed=seed, stop=stop)
    chosen = _choice(plan, "optimized", problem, whole_backwards(plan, result.schedule))
    assert chosen.plan is not None
    certificate = ScheduleCertificate(
        makespan_s=result.makespan_s, bound_s=result.bound_s, gap=result.gap, method=result.method
    )
    return replace(chosen.plan, schedule_certificate=certificate)


def _together(plan: Plan) -> str:
    if plan.prefetch:
        return (
            f"{' and '.join(plan.prefetch)} run a step ahead, and schedules are made for the microbatches of one step"
        )
    names = " and ".join(plan.together)
    return f"{names} run {plan.batch_factor} microbatches at once, and schedules are made for one and one"


def _choice(plan: Plan, name: ScheduleName, problem: ScheduleProblem, schedule: Schedule) -> Choice:
    peaks = memory_peaks(problem, schedule)
    evaluation = evaluate(problem, schedule)
    alive = [_most_alive(schedule, problem, stage) for stage in range(len(problem.stages))]
    stages = []
    for index, stage in enumerate(plan.stages):
        row = plan.row(index)
        used = stage.capacity_bytes - problem.capacity[row] + peaks[row]
        stages.append(replace(stage, in_flight=alive[index], memory_bytes=round(used)))
    follows = name in ("1f1b", "gpipe") and not plan.placement
    certificate = plan.certificate if plan.chunk_certificate is None else GIVEN
    if plan.placement and certificate.status == "given":
        finish_s = max(sum(plan.stages[stage].finish_s for stage in plan.stages_of(row)) for row in range(plan.pp))
        certificate = replace(certificate, objective_s=evaluation.makespan_s + finish_s)
    made = replace(
        plan,
        schedule=name,
        certificate=certificate,
        stages=tuple(stages),
        orders=() if follows else tuple(schedule_text(schedule).split("\n")),
        schedule_certificate=None,
        chunk_certificate=None,
    )
    within = all(peak <= free * (1 + 1e-9) for peak, free in zip(peaks, problem.capacity, strict=True))
    reason = "" if within else "it needs more memory than a rank has"
    return Choice(name=name, plan=made, fits=within, reason=reason)


def _most_alive(schedule: Schedule, problem: ScheduleProblem, stage: int) -> int:
    """Most microbatches between their forward and their last compute."""
    own = [action for action in schedule[problem.stages[stage].rank] if action.stage == stage]
    last = {action.microbatch: place for place, action in enumerate(own)}
    alive = most = 0
    for place, action in enumerate(own):
        alive += action.kind == "F"
        most = max(most, alive)
        alive -= last[action.microbatch] == place
    return most


def refuse_unusable(choice: Choice) -> Plan:
    """The plan of a choice.

    Raises:
        CheckError: the family does not apply, or does not fit.
    """
    if choice.plan is None or not choice.fits:
        raise CheckError(f"schedule {choice.name} is not for this plan: {choice.reason}")
    return choice.plan


def scheduled(
    plan: Plan,
    graph: ComputationGraph,
    costs: CostModel,
    *,
    search_s: float,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> Plan:
    """The plan with the schedule that makes its mean step shortest, of those that its scenario allows.

    Without `constraints.schedule` that is the plan's own or, with `search_s` above 0 and at most `MOST_SEARCHED`
    forwards, the best that the search finds. A searched schedule also has to be shorter by `WORTH`, because it splits
    backwards.

    Raises:
        InfeasibleError: none of the allowed schedules fits the plan's stages and memory.
        NoPlanFoundError: only a searched schedule is allowed, and the search found none within memory.
    """
    return timed_schedule(plan, graph, costs, search_s=search_s, seed=seed, stop=stop)[0]


def timed_schedule(
    plan: Plan,
    graph: ComputationGraph,
    costs: CostModel,
    *,
    search_s: float,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Plan, float | None]:
    """The same with the mean step in simulation, None where there was nothing to compare."""
    rules = plan.scenario.constraints
    allowed = in_chunks_of(rules.schedule, rules.vp)
    names = [name for name in SCHEDULE_NAMES if name in allowed] if allowed else [plan.schedule]
    small = len(plan.stages) * plan.microbatches <= MOST_SEARCHED
    searched_too = (not allowed and search_s > 0 and small) or "optimized" in names
    if names == [plan.schedule] and not searched_too:
        return plan, None
    best = plan if plan.schedule in names else None
    if best is not None and plan.batch_factor > 1:
        return best, None
    best_s = simulate(plan, graph, costs).step_time_s if best is not None else float("inf")
    refused = []
    for choice in compare_families(plan, [n for n in names if n not in ("optimized", plan.schedule)], graph, costs):
        if choice.plan is None or not choice.fits:
            refused.append(f"{choice.name}: {choice.reason}")
            continue
        step_s = simulate(choice.plan, graph, costs).step_time_s
        if step_s < best_s:
            best, best_s = choice.plan, step_s
    if searched_too:
        try:
            searched = optimized(plan, graph, costs, search_s=search_s or LEAST_SEARCH_S, seed=seed, stop=stop)
        except NoPlanFoundError:
            if best is None:
                raise
            return best, best_s
        step_s = simulate(searched, graph, costs).step_time_s
        if best is None or step_s < best_s * (1 - WORTH):
            best, best_s = searched, step_s
    if best is None:
        raise InfeasibleError(f"no schedule of constraints.schedule is for the best cut: {'; '.join(refused)}")
    return best, best_s
