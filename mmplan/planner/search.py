"""`optimize`: best-first over the lower bounds of all configurations, an exact stage cut inside, a gap outside.

Then, among the cuts found whose closed form is within the gap, the plan is the one that is fastest in simulation.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.errors import CheckError, InfeasibleError, MmplanError, NoPlanFoundError
from mmplan.planner.ahead import fetched_ahead, modules_ahead
from mmplan.planner.bounds import NEVER
from mmplan.planner.check import check_plan
from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import plan_from_cut
from mmplan.planner.diagnose import explain_infeasible
from mmplan.planner.explain import list_runner_ups
from mmplan.planner.frontier import Frontier
from mmplan.planner.in_chunks import Work, in_chunks, worth_chunks
from mmplan.planner.mesh_search import mesh_frontiers, solve_meshed, why_no_meshes
from mmplan.planner.objective import STEP_TIME, Objective, require_prices
from mmplan.planner.plan import Plan
from mmplan.planner.pool_order import best_order, in_pool_orders, with_techniques
from mmplan.planner.quantise import ROUNDING_GAP, floor_ns, lowered_ns, raised_ns, seconds
from mmplan.planner.result import OptimizeResult, Progress
from mmplan.planner.rivals import Candidate, candidate, first_in_simulation, list_rivals
from mmplan.planner.schedules.reschedule import scheduled
from mmplan.planner.search_state import Search
from mmplan.planner.space import Space, build_space, confirm_by_cpsat, solve_configuration
from mmplan.planner.stopping import TIME_LIMIT_S, Deadline, never
from mmplan.scenario.scenario import Scenario
from mmplan.units import format_seconds

logger = logging.getLogger(__name__)

# Once the gap is proven, so many more configurations that might beat the plan by less are solved: they cost little.
MOST_WITHIN_GAP = 8
# Work on the schedule of each of these before one is chosen; the chosen one's is then searched in earnest.
QUICK_SEARCH_S = 0.5
# CP-SAT proves a second time that the winner's configuration has no cut that is better by the gap, or by this where
# the gap is smaller: the last tenth of a percent takes it minutes at 64 stages.
CONFIRM_GAP = 0.001
CONFIRM_DETERMINISTIC_S = 1.5
# Stages x groups up to which that is tried: above, CP-SAT needs seconds to read the model.
MOST_CONFIRMED = 1_200


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """What the caller wants of the result."""

    gap: float
    seed: int
    schedule_search_s: float
    objective: Objective


def optimize(
    scenario: Scenario,
    *,
    gap: float = 0.01,
    time_limit_s: float = TIME_LIMIT_S,
    seed: int = 0,
    objective: Objective = STEP_TIME,
    schedule_search_s: float = 0.0,
    on_improvement: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = never,
) -> OptimizeResult:
    """The plan with the least closed form, and a proof of how far from the best it can be.

    Ranks are laid over the pools of a cluster in their order; where pools differ every order is searched, and the
    plan's scenario holds the best one.

    Args:
        objective: what is minimised; the certificate's bound is the step time that a better plan on the same devices
            would have to be below.
        gap: end when (objective - bound) / objective is at most this.
        time_limit_s: end with the best plan so far; so do `stop` and Ctrl-C.
        schedule_search_s: look that long, at most, for a better schedule of the best cut. The closed form and its gap
            stay those of the cut; the schedule's own bound is in `plan.schedule_certificate`.
        on_improvement: called after each solved configuration.

    Raises:
        InputError: costs are to be minimised, and a pool has no price.
        InfeasibleError: proved that no plan exists.
        NoPlanFoundError: a limit was hit before any plan was found.
    """
    choice = _Choice(gap=gap, seed=seed, schedule_search_s=schedule_search_s, objective=objective)
    deadline = Deadline(limit_s=time_limit_s, stop=stop)
    require_prices(objective, scenario.cluster)
    found: list[OptimizeResult] = []
    floors: list[int] = []
    any_orders: list[int] = []
    refused: list[MmplanError] = []
    for ordered in with_techniques(in_pool_orders(scenario, priced=objective.name == "cost")):
        try:
            space, search = _explored(ordered, choice, on_improvement, deadline)
            floors.append(search.floor_value())
            any_orders.append(space.any_order_value)
            if search.incumbent is None:
                _refuse(space, search, choice.objective, _teller(on_improvement, deadline), deadline)
            found.append(_result(space, search, choice, deadline))
        except (InfeasibleError, NoPlanFoundError) as error:
            refused.append(error)
    if not found:  # that one order has no plan proves nothing of one that the limit cut short
        raise next((error for error in refused if isinstance(error, NoPlanFoundError)), refused[0])
    return best_order(found, floors, any_orders, objective, gap) if len(floors) > 1 else found[0]


def _explored(
    scenario: Scenario, choice: _Choice, on_improvement: Callable[[Progress], None] | None, deadline: Deadline
) -> tuple[Space, Search]:
    """With the pools in the order of the scenario, as far as the gap and the deadline ask."""
    tell = _teller(on_improvement, deadline)
    space = build_space(scenario, tell, choice.objective)
    modules_ahead(scenario, space.prices.graph)  # says what cannot be before the search
    search = Search(
        frontier=None if scenario.constraints.modules else Frontier(space.bounds, space.scale),
        meshes=mesh_frontiers(space, deadline),
        scale=space.scale,
    )
    try:
        frontier = search.frontier
        while frontier is not None and not deadline.passed() and _worth_more(search, frontier, choice.gap):
            _solve_next(space, search, frontier, choice.gap, choice.seed, deadline)
            if on_improvement is not None:
                on_improvement(_progress(space, search, deadline))
        while not deadline.passed() and _solve_next_meshed(space, search, choice.gap, deadline):
            if on_improvement is not None:
                on_improvement(_progress(space, search, deadline))
    except KeyboardInterrupt:
        search.exhausted = True
    return space, search


def _teller(on_improvement: Callable[[Progress], None] | None, deadline: Deadline) -> Callable[[str], None]:
    """What tells of work before and after the solving of configurations."""

    def tell(doing: str) -> None:
        if on_improvement is not None:
            on_improvement(
                Progress(
                    objective_s=None,
                    bound_s=0.0,
                    gap=None,
                    wall_s=deadline.spent_s,
                    enumerated=0,
                    solved=0,
                    doing=doing,
                )
            )

    return tell


def _worth_more(search: Search, frontier: Frontier, gap: float) -> bool:
    """Whether the next configuration could still beat the incumbent by more than the gap, or, for a few, at all."""
    least = frontier.least_value()
    if least < search.target(gap):
        return True
    search.within_gap += 1
    return search.within_gap <= MOST_WITHIN_GAP and least < search.target(0.0)


def _solve_next(space: Space, search: Search, frontier: Frontier, gap: float, seed: int, deadline: Deadline) -> None:
    """Solve one configuration and keep its cut if it is the best so far."""
    index = frontier.pop()
    tolerance = 0.0 if space.exact else gap  # CP-SAT alone is quick to prove the gap, slow to prove the optimum
    free = search.incumbent is None and not search.scale.limited
    answer = solve_configuration(
        space,
        index,
        cutoff_ns=None if free else search.scale.step_below(index, search.target(tolerance)),
        tolerance=tolerance,
        gap=gap,
        seed=seed,
        deadline=deadline,
    )
    search.solved += 1
    search.last = space.configurations[index]
    search.answers[index] = answer
    if answer.stages is not None:
        found = candidate(space, space.configurations[index], answer.stages)
        if search.scale.value(index, found.step_ns) < search.target(0.0):
            search.incumbent = found
    bound = search.scale.value(index, max(answer.bound_ns, int(space.bounds_ns[index])))
    search.unproved = min(search.unproved, bound)
    search.exhausted |= answer.exhausted


def _solve_next_meshed(space: Space, search: Search, gap: float, deadline: Deadline) -> bool:
    """The same with modules on meshes of their own; False when none is worth it."""
    target = search.target(gap)
    frontier = min(search.meshes, key=lambda one: one.least_value(target), default=None)
    found = None if frontier is None else frontier.pop(target)
    if frontier is None or found is None:
        return False
    configuration, free = found.configuration, search.incumbent is None and not search.scale.limited
    cutoff_ns = None if free else search.scale.step_below_of(configuration, search.target(0.0))
    answer = solve_meshed(space, frontier, found, cutoff_ns=cutoff_ns, deadline=deadline)
    search.solved += 1
    search.last = configuration
    if answer.stages is not None:
        one = candidate(space, configuration, answer.stages)
        search.meshed[configuration] = one
        if search.scale.value_of(configuration, one.step_ns) < search.target(0.0):
            search.incumbent = one
    elif answer.unfit:
        search.unfit += 1
    bound = search.scale.value_of(configuration, max(answer.bound_ns, found.step_ns))
    search.unproved = min(search.unproved, bound)
    search.exhausted |= answer.exhausted
    return True


def _progress(space: Space, search: Search, deadline: Deadline) -> Progress:
    best = search.incumbent
    best_s = best.time.objective_s if best is not None else None
    bound_s = search.bound_s(best) if best is not None else 0.0
    return Progress(
        objective_s=best_s,
        bound_s=bound_s,
        gap=(best_s - bound_s) / best_s if best_s else None,
        wall_s=deadline.spent_s,
        enumerated=search.met(space),
        solved=search.solved,
        doing=str(search.last),
    )


def _refuse(
    space: Space, search: Search, objective: Objective, tell: Callable[[str], None], deadline: Deadline
) -> None:
    """No plan: proved, or not found in time."""
    name = space.prices.scenario.name
    if search.exhausted or search.least_value() != NEVER:
        raise NoPlanFoundError(
            f"no plan of {name} found: {search.solved} of {search.met(space):,} configurations tried when the "
            f"search ended (limit {deadline.limit_s:g} s); give it more time or fewer degrees to try"
        )
    if search.frontier is None:
        raise InfeasibleError(why_no_meshes(space, search.meshes))
    least_ns = int(space.bounds_ns.min())
    if objective.deadline_s is not None and least_ns != NEVER:
        devices, least = space.prices.scenario.cluster.device_count, format_seconds(seconds(least_ns))
        raise InfeasibleError(
            f"no plan of {name} makes a step in {format_seconds(objective.deadline_s)} by the closed form of 1F1B: "
            f"on at most {devices:,} devices it takes at least {least}; another schedule may be quicker"
        )
    tell("nothing fits into memory: looking for the nearest change that would")
    raise explain_infeasible(space, deadline)


def _leader(
    space: Space, search: Search, first: Candidate, choice: _Choice, deadline: Deadline, *, proved: bool
) -> tuple[Candidate, dict[Configuration, Candidate | None], tuple[str, ...]]:
    """The candidate that is fastest in simulation, those that it was held against, and what proves it. Ctrl-C keeps
    what is there."""
    gap, best = choice.gap, first
    rivals: dict[Configuration, Candidate | None] = {}
    proofs = ("dynamic program",) if proved and space.exact else ()
    try:
        if search.frontier is not None:
            rivals = list_rivals(space, first.configuration, search.answers, deadline)
        rivals |= {one: found for one, found in search.meshed.items() if one != first.configuration}
        if proved:
            most_ns = max(first.step_ns, raised_ns(floor_ns(search.bound_s(first)), gap))
            within = search.scale.value_of(first.configuration, most_ns)
            cuts = [rival for rival in rivals.values() if rival is not None]
            quick_s = min(choice.schedule_search_s, QUICK_SEARCH_S)
            best = first_in_simulation(space, first, cuts, within, choice.objective, deadline, search_s=quick_s)
        target_ns = lowered_ns(best.step_ns, max(gap, CONFIRM_GAP))
        small = best.configuration.pp * len(space.groups.groups) <= MOST_CONFIRMED and not best.configuration.meshes
        if (
            small
            and not deadline.passed()
            and confirm_by_cpsat(
                space,
                best.configuration,
                target_ns=target_ns,
                max_deterministic_time=CONFIRM_DETERMINISTIC_S,
                seed=choice.seed,
                deadline=deadline,
            )
        ):
            proofs = (*proofs, "CP-SAT")
    except KeyboardInterrupt:
        logger.info("interrupted while comparing runner-ups; the plan stands")
    return best, rivals, proofs


def _result(space: Space, search: Search, choice: _Choice, deadline: Deadline) -> OptimizeResult:
    """Choice among the leaders, second proof, runner-ups, check and certificate."""
    first = search.incumbent
    assert first is not None
    proved = first.time.objective_s - search.bound_s(first) <= (choice.gap + ROUNDING_GAP) * first.time.objective_s
    best, rivals, proofs = _leader(space, search, first, choice, deadline, proved=proved)
    others = {**rivals, first.configuration: first}
    others.pop(best.configuration)
    bound_s = search.bound_s(best)
    plan = plan_from_cut(
        space.prices,
        best.configuration,
        best.stages,
        bound_s=bound_s,
        status="optimal" if proved else "feasible",
        wall_s=deadline.spent_s,
    )
    floor_s = seconds(search.scale.step_below_of(best.configuration, space.any_order_value))
    plan = _scheduled(plan, space, floor_s, choice, deadline)
    if space.prices.scenario.constraints.prefetch != () and choice.objective.name != "p90-time":
        tried = (best.configuration, *(others if choice.objective.name == "step-time" else ()))
        plan = fetched_ahead(plan, space, tried, floor_s=floor_s, deadline=deadline)
    _refuse_unsound(plan)
    return OptimizeResult(
        plan=plan,
        configuration=best.configuration,
        time=best.time,
        bound_s=plan.certificate.bound_s,
        gap=plan.certificate.gap,
        status=plan.certificate.status,
        wall_s=plan.certificate.wall_s,
        considered=search.considered(space),
        runner_ups=list_runner_ups(best, others, search.scale),
        proofs=() if plan.prefetch else proofs,
        objective=choice.objective.name,
    )


def _scheduled(plan: Plan, space: Space, floor_s: float, choice: _Choice, deadline: Deadline) -> Plan:
    """The best cut under the best schedule that is allowed, in chunks too; the cut's own where Ctrl-C comes first.

    Args:
        floor_s: no plan takes less under any schedule.
    """
    allowed, search_s = plan.scenario.constraints.schedule, choice.schedule_search_s
    kept = not allowed or plan.schedule in allowed
    if kept and (search_s == 0 or plan.pp == 1):
        return plan
    graph, costs = space.prices.graph, AnalyticCostModel(plan.scenario)
    best = scheduled(plan, graph, costs, search_s=search_s, seed=choice.seed, stop=deadline.stop)
    if search_s == 0 or choice.objective.name == "p90-time" or not worth_chunks(plan) or deadline.passed():
        return best
    work = Work(search_s=search_s, seed=choice.seed, stop=deadline.stop)
    return in_chunks(plan, best, graph, costs, floor_s=floor_s, work=work)


def _refuse_unsound(plan: Plan) -> None:
    """Every plan from a solver passes the checker, which shares no code with it."""
    findings = check_plan(plan)
    if findings:
        raise CheckError(f"the planner made an unsound plan: {'; '.join(finding.message for finding in findings[:3])}")
