"""`optimize`: best-first over the lower bounds of all configurations, an exact stage cut inside, a gap outside.

Then, among the cuts found whose closed form is within the gap, the plan is the one that is fastest in simulation.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.errors import CheckError, NoPlanFoundError
from mmplan.planner.bounds import NEVER
from mmplan.planner.check import check_plan
from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import plan_from_cut
from mmplan.planner.diagnose import explain_infeasible
from mmplan.planner.explain import list_runner_ups
from mmplan.planner.frontier import Frontier
from mmplan.planner.plan import Plan
from mmplan.planner.quantise import floor_ns, lowered_ns, seconds
from mmplan.planner.result import Considered, OptimizeResult, Progress
from mmplan.planner.rivals import Candidate, candidate, first_in_simulation, list_rivals
from mmplan.planner.schedules.reschedule import scheduled
from mmplan.planner.space import Answer, Space, build_space, confirm_by_cpsat, solve_configuration
from mmplan.planner.stopping import TIME_LIMIT_S, Deadline, never
from mmplan.scenario.scenario import Scenario

logger = logging.getLogger(__name__)

# Once the gap is proven, so many more configurations that might beat the plan by less are solved: they cost little.
MOST_WITHIN_GAP = 8
# CP-SAT proves a second time that the winner's configuration has no cut that is better by the gap, or by this where
# the gap is smaller: the last tenth of a percent takes it minutes at 64 stages.
CONFIRM_GAP = 0.001
CONFIRM_DETERMINISTIC_S = 3.0
# Real seconds are whole nanoseconds up to 1 ns per layer: a gap below this is zero.
ROUNDING_GAP = 1e-5


@dataclass(slots=True)
class _Search:
    """What the loop has learned; `last` is the configuration solved last."""

    frontier: Frontier
    incumbent: Candidate | None = None
    solved: int = 0
    last: Configuration | None = None
    within_gap: int = 0  # solved although the gap was proven already
    unproved_ns: int = NEVER  # least bound of what was solved
    exhausted: bool = False  # some configuration without a cut was not solved to the end
    answers: dict[int, Answer] = field(default_factory=dict)


def optimize(
    scenario: Scenario,
    *,
    gap: float = 0.01,
    time_limit_s: float = TIME_LIMIT_S,
    seed: int = 0,
    schedule_search_s: float = 0.0,
    on_improvement: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = never,
) -> OptimizeResult:
    """The plan with the least closed-form step time, and a proof of how far from the best it can be.

    Args:
        gap: end when (objective - bound) / objective is at most this.
        time_limit_s: end with the best plan so far; so do `stop` and Ctrl-C.
        schedule_search_s: look that long, at most, for a better schedule of the best cut. The closed form and its gap
            stay those of the cut; the schedule's own bound is in `plan.schedule_certificate`.
        on_improvement: called after each solved configuration.

    Raises:
        InfeasibleError: proved that no plan exists.
        NoPlanFoundError: a limit was hit before any plan was found.
    """
    deadline = Deadline(limit_s=time_limit_s, stop=stop)
    tell = _teller(on_improvement, deadline)
    space = build_space(scenario, tell)
    search = _Search(frontier=Frontier(space.bounds))
    try:
        while not deadline.passed() and _worth_more(search, gap):
            _solve_next(space, search, gap, seed, deadline)
            if on_improvement is not None:
                on_improvement(_progress(space, search, deadline))
    except KeyboardInterrupt:
        search.exhausted = True
    if search.incumbent is None:
        tell("nothing fits into memory: looking for the nearest change that would")
        _refuse(space, search, deadline)
    return _result(space, search, gap=gap, seed=seed, schedule_search_s=schedule_search_s, deadline=deadline)


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


def _worth_more(search: _Search, gap: float) -> bool:
    """Whether the next configuration could still beat the incumbent by more than the gap, or, for a few, at all."""
    least_ns = search.frontier.least_ns()
    if least_ns == NEVER or search.incumbent is None:
        return least_ns != NEVER
    best_ns = floor_ns(search.incumbent.time.objective_s)
    if least_ns < lowered_ns(best_ns, gap):
        return True
    search.within_gap += 1
    return search.within_gap <= MOST_WITHIN_GAP and least_ns < best_ns


def _solve_next(space: Space, search: _Search, gap: float, seed: int, deadline: Deadline) -> None:
    """Solve one configuration and keep its cut if it is the best so far."""
    index = search.frontier.pop()
    best_s = search.incumbent.time.objective_s if search.incumbent is not None else None
    tolerance = 0.0 if space.exact else gap  # CP-SAT alone is quick to prove the gap, slow to prove the optimum
    answer = solve_configuration(
        space,
        index,
        cutoff_ns=lowered_ns(floor_ns(best_s), tolerance) if best_s is not None else None,
        tolerance=tolerance,
        seed=seed,
        deadline=deadline,
    )
    search.solved += 1
    search.last = space.configurations[index]
    search.answers[index] = answer
    if answer.stages is not None:
        found = candidate(space, index, answer.stages)
        if best_s is None or found.time.objective_s < best_s:
            search.incumbent = found
    search.unproved_ns = min(search.unproved_ns, max(answer.bound_ns, int(space.bounds_ns[index])))
    search.exhausted |= answer.exhausted


def _bound_s(search: _Search) -> float:
    """Nothing in the search space is faster."""
    bound_ns = min(search.unproved_ns, search.frontier.least_ns())
    best_s = search.incumbent.time.objective_s if search.incumbent is not None else float("inf")
    return min(seconds(bound_ns), best_s)


def _progress(space: Space, search: _Search, deadline: Deadline) -> Progress:
    bound_s = _bound_s(search)
    best_s = search.incumbent.time.objective_s if search.incumbent is not None else None
    return Progress(
        objective_s=best_s,
        bound_s=bound_s,
        gap=(best_s - bound_s) / best_s if best_s else None,
        wall_s=deadline.spent_s,
        enumerated=len(space.configurations),
        solved=search.solved,
        doing=str(search.last),
    )


def _refuse(space: Space, search: _Search, deadline: Deadline) -> None:
    """No plan: proved, or not found in time."""
    if search.exhausted or search.frontier.least_ns() != NEVER:
        raise NoPlanFoundError(
            f"no plan of {space.prices.scenario.name} found: {search.solved} of {len(space.configurations):,} "
            f"configurations tried when the search ended (limit {deadline.limit_s:g} s); give it more time or fewer "
            "degrees to try"
        )
    raise explain_infeasible(space, deadline)


def _result(
    space: Space, search: _Search, *, gap: float, seed: int, schedule_search_s: float, deadline: Deadline
) -> OptimizeResult:
    """Choice among the leaders, second proof, runner-ups, check and certificate."""
    first = search.incumbent
    assert first is not None
    bound_s = _bound_s(search)
    proved = first.time.objective_s - bound_s <= (gap + ROUNDING_GAP) * first.time.objective_s
    rivals: dict[Configuration, Candidate | None] = {}
    best, proofs = first, ("dynamic program",) if proved and space.exact else ()
    try:
        rivals = list_rivals(space, first.configuration, search.answers, deadline)
        if proved:
            within_s = bound_s / (1 - gap) if gap < 1 else float("inf")
            cuts = [rival for rival in rivals.values() if rival is not None]
            best = first_in_simulation(space, first, cuts, within_s, deadline)
        target_ns = lowered_ns(floor_ns(best.time.objective_s), max(gap, CONFIRM_GAP))
        if not deadline.passed() and confirm_by_cpsat(
            space,
            best.configuration,
            target_ns=target_ns,
            max_deterministic_time=CONFIRM_DETERMINISTIC_S,
            seed=seed,
            deadline=deadline,
        ):
            proofs = (*proofs, "CP-SAT")
    except KeyboardInterrupt:
        logger.info("interrupted while comparing runner-ups; the plan stands")
    others = {**rivals, first.configuration: first}
    others.pop(best.configuration)
    plan = plan_from_cut(
        space.prices,
        best.configuration,
        best.stages,
        bound_s=bound_s,
        status="optimal" if proved else "feasible",
        wall_s=deadline.spent_s,
    )
    plan = _scheduled(plan, space, schedule_search_s, seed, deadline)
    _refuse_unsound(plan)
    return OptimizeResult(
        plan=plan,
        bound_s=plan.certificate.bound_s,
        gap=plan.certificate.gap,
        status=plan.certificate.status,
        wall_s=plan.certificate.wall_s,
        considered=_considered(space, search),
        runner_ups=list_runner_ups(best.time, others),
        proofs=proofs,
    )


def _scheduled(plan: Plan, space: Space, search_s: float, seed: int, deadline: Deadline) -> Plan:
    """The best cut under the best schedule that is allowed; the cut's own where Ctrl-C comes first."""
    allowed = plan.scenario.constraints.schedule
    kept = not allowed or plan.schedule in allowed
    if kept and (search_s == 0 or plan.pp == 1):
        return plan
    costs = AnalyticCostModel(plan.scenario)
    return scheduled(plan, space.prices.graph, costs, search_s=search_s, seed=seed, stop=deadline.stop)


def _considered(space: Space, search: _Search) -> Considered:
    excluded = int((space.bounds_ns == NEVER).sum())
    return Considered(
        enumerated=len(space.configurations),
        out_of_memory=excluded,
        bounded_away=len(space.configurations) - excluded - search.solved,
        solved=search.solved,
        infeasible=sum(answer.unfit for answer in search.answers.values()),
    )


def _refuse_unsound(plan: Plan) -> None:
    """Every plan from a solver passes the checker, which shares no code with it."""
    findings = check_plan(plan)
    if findings:
        raise CheckError(f"the planner made an unsound plan: {'; '.join(finding.message for finding in findings[:3])}")
