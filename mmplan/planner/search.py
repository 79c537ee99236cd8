"""`optimize`: best-first over the lower bounds of all configurations, an exact stage cut inside, a gap outside."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from mmplan.errors import CheckError, NoPlanFoundError
from mmplan.planner.bounds import NEVER
from mmplan.planner.check import check_plan
from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import StepTime, cut_stages, plan_from_cut
from mmplan.planner.diagnose import explain_infeasible
from mmplan.planner.explain import list_runner_ups
from mmplan.planner.naive import naive_plan
from mmplan.planner.plan import Plan
from mmplan.planner.quantise import floor_ns, lowered_ns, seconds
from mmplan.planner.result import Considered, OptimizeResult, Progress, RunnerUp
from mmplan.planner.space import Answer, Space, build_space, confirm_by_cpsat, solve_configuration
from mmplan.planner.stage_dp import never
from mmplan.scenario.scenario import Scenario

logger = logging.getLogger(__name__)

# Once the gap is proven, so many more configurations that might beat the plan by less are solved: they cost little.
MOST_WITHIN_GAP = 8
# CP-SAT proves a second time that the winner's configuration has no cut that is better by the gap, or by this where
# the gap is smaller: the last tenth of a percent takes it minutes at 64 stages. In deterministic seconds:
CONFIRM_GAP, CONFIRM_TIME = 0.001, 3.0
# Real seconds are whole nanoseconds up to 1 ns per layer: a gap below this is zero.
ROUNDING_GAP = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Incumbent:
    """The best cut so far."""

    configuration: Configuration
    stages: tuple[tuple[str, ...], ...]
    time: StepTime


@dataclass(slots=True)
class _Search:
    """What the loop has learned: configurations are solved in the order of their bound, `position` is the next one."""

    order: list[int]
    incumbent: Incumbent | None = None
    position: int = 0
    within_gap: int = 0  # solved although the gap was proven already
    unproved_ns: int = NEVER  # least bound of what was solved
    exhausted: bool = False  # some configuration without a cut was not solved to the end
    answers: dict[int, Answer] = field(default_factory=dict)


def optimize(
    scenario: Scenario,
    *,
    gap: float = 0.01,
    time_limit_s: float = 20.0,
    seed: int = 0,
    on_improvement: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = never,
) -> OptimizeResult:
    """The plan with the least closed-form step time, and a proof of how far from the best it can be.

    Args:
        gap: end when (objective - bound) / objective is at most this.
        time_limit_s: end with the best plan so far; so do `stop` and Ctrl-C.
        on_improvement: called after each solved configuration.

    Raises:
        InfeasibleError: proved that no plan exists.
        NoPlanFoundError: a limit was hit before any plan was found.
    """
    started = perf_counter()
    space = build_space(scenario)
    search = _Search(order=[int(index) for index in np.argsort(space.bounds_ns, kind="stable")])

    def ended() -> bool:
        return stop() or perf_counter() - started > time_limit_s

    try:
        while not ended() and _worth_more(space, search, gap):
            _solve_next(space, search, gap, seed, ended)
            if on_improvement is not None:
                on_improvement(_progress(space, search, perf_counter() - started))
    except KeyboardInterrupt:
        search.exhausted = True
    if search.incumbent is None:
        _refuse(space, search, time_limit_s)
    return _result(space, search, gap, seed, ended, started)


def naive_result(scenario: Scenario) -> OptimizeResult:
    """The plan one would cut by hand, in the form of a search result without bound."""
    started = perf_counter()
    plan = naive_plan(scenario)
    return OptimizeResult(
        plan=plan,
        bound_s=0.0,
        gap=1.0,
        status="given",
        wall_s=perf_counter() - started,
        considered=Considered(enumerated=1, out_of_memory=0, bounded_away=0, solved=1, infeasible=0),
        runner_ups=(),
        proofs=(),
    )


def _worth_more(space: Space, search: _Search, gap: float) -> bool:
    """Whether the next configuration could still beat the incumbent by more than the gap, or, for a few, at all."""
    if search.position == len(search.order) or _next_bound_ns(space, search) == NEVER:
        return False
    if search.incumbent is None:
        return True
    best_ns = floor_ns(search.incumbent.time.objective_s)
    if _next_bound_ns(space, search) < lowered_ns(best_ns, gap):
        return True
    search.within_gap += 1
    return search.within_gap <= MOST_WITHIN_GAP and _next_bound_ns(space, search) < best_ns


def _next_bound_ns(space: Space, search: _Search) -> int:
    if search.position == len(search.order):
        return NEVER
    return int(space.bounds_ns[search.order[search.position]])


def _solve_next(space: Space, search: _Search, gap: float, seed: int, ended: Callable[[], bool]) -> None:
    """Solve one configuration and keep its cut if it is the best so far."""
    index = search.order[search.position]
    configuration = space.configurations[index]
    best_s = search.incumbent.time.objective_s if search.incumbent is not None else None
    tolerance = 0.0 if space.exact else gap  # CP-SAT alone is quick to prove the gap, slow to prove the optimum
    answer = solve_configuration(
        space,
        configuration,
        cutoff_ns=lowered_ns(floor_ns(best_s), tolerance) if best_s is not None else None,
        tolerance=tolerance,
        seed=seed,
        stop=ended,
    )
    search.position += 1
    search.answers[index] = answer
    if answer.stages is not None:
        _, time = cut_stages(space.prices, configuration, answer.stages)
        if best_s is None or time.objective_s < best_s:
            search.incumbent = Incumbent(configuration=configuration, stages=answer.stages, time=time)
    search.unproved_ns = min(search.unproved_ns, max(answer.bound_ns, int(space.bounds_ns[index])))
    search.exhausted |= answer.exhausted


def _bound_s(space: Space, search: _Search) -> float:
    """Nothing in the search space is faster."""
    bound_ns = min(search.unproved_ns, _next_bound_ns(space, search))
    best_s = search.incumbent.time.objective_s if search.incumbent is not None else float("inf")
    return min(seconds(bound_ns), best_s)


def _progress(space: Space, search: _Search, wall_s: float) -> Progress:
    bound_s = _bound_s(space, search)
    best_s = search.incumbent.time.objective_s if search.incumbent is not None else None
    return Progress(
        objective_s=best_s,
        bound_s=bound_s,
        gap=(best_s - bound_s) / best_s if best_s else None,
        wall_s=wall_s,
        enumerated=len(search.order),
        solved=search.position,
        configuration=str(space.configurations[search.order[search.position - 1]]),
    )


def _refuse(space: Space, search: _Search, time_limit_s: float) -> None:
    """No plan: proved, or not found in time."""
    if search.exhausted or _next_bound_ns(space, search) != NEVER:
        raise NoPlanFoundError(
            f"no plan of {space.prices.scenario.name} found: {search.position} of {len(search.order)} configurations "
            f"tried when the search ended (limit {time_limit_s:g} s); give it more time or fewer degrees to try"
        )
    raise explain_infeasible(space)


def _result(
    space: Space, search: _Search, gap: float, seed: int, ended: Callable[[], bool], started: float
) -> OptimizeResult:
    """Second proof, runner-ups, check and certificate of the best cut."""
    best = search.incumbent
    assert best is not None
    bound_s = _bound_s(space, search)
    achieved = (best.time.objective_s - bound_s) / best.time.objective_s
    proved = achieved <= gap + ROUNDING_GAP
    target_ns = lowered_ns(floor_ns(best.time.objective_s), max(gap, CONFIRM_GAP))
    proofs = ("dynamic program",) if proved and space.exact else ()
    runner_ups: tuple[RunnerUp, ...] = ()
    try:
        if not ended() and confirm_by_cpsat(
            space, best.configuration, target_ns=target_ns, max_deterministic_time=CONFIRM_TIME, seed=seed
        ):
            proofs = (*proofs, "CP-SAT")
        runner_ups = list_runner_ups(space, best.configuration, best.time, search.answers, ended)
    except KeyboardInterrupt:
        logger.info("interrupted while comparing runner-ups; the plan stands")
    plan = plan_from_cut(
        space.prices,
        best.configuration,
        best.stages,
        bound_s=bound_s,
        status="optimal" if proved else "feasible",
        wall_s=perf_counter() - started,
    )
    _refuse_unsound(plan)
    return OptimizeResult(
        plan=plan,
        bound_s=plan.certificate.bound_s,
        gap=plan.certificate.gap,
        status=plan.certificate.status,
        wall_s=plan.certificate.wall_s,
        considered=_considered(space, search),
        runner_ups=runner_ups,
        proofs=proofs,
    )


def _considered(space: Space, search: _Search) -> Considered:
    excluded = int((space.bounds_ns == NEVER).sum())
    return Considered(
        enumerated=len(search.order),
        out_of_memory=excluded,
        bounded_away=len(search.order) - excluded - search.position,
        solved=search.position,
        infeasible=sum(answer.unfit for answer in search.answers.values()),
    )


def _refuse_unsound(plan: Plan) -> None:
    """Every plan from a solver passes the checker, which shares no code with it."""
    findings = check_plan(plan)
    if findings:
        raise CheckError(f"the planner made an unsound plan: {'; '.join(finding.message for finding in findings[:3])}")
