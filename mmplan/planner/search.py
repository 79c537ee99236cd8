"""`optimize`: the configurations of a scenario explored until a gap is proven, in every order of its pools.

Then, among the cuts found whose closed form is within the gap, the plan is the one that is fastest in simulation.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.errors import CheckError, InfeasibleError, MmplanError, NoPlanFoundError
from mmplan.planner.ahead import fetched_ahead, modules_ahead
from mmplan.planner.bounds import NEVER
from mmplan.planner.by_devices import least_within
from mmplan.planner.check import check_plan
from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import plan_from_cut
from mmplan.planner.diagnose import explain_infeasible
from mmplan.planner.explain import list_runner_ups
from mmplan.planner.exploration import explored
from mmplan.planner.fewer_devices import fewer_devices
from mmplan.planner.in_chunks import Work, in_chunks, worth_chunks
from mmplan.planner.mesh_search import why_no_meshes
from mmplan.planner.objective import STEP_TIME, Objective, require_prices
from mmplan.planner.plan import Plan
from mmplan.planner.pool_order import Order, in_pool_orders, of_all_orders, with_techniques
from mmplan.planner.quantise import ROUNDING_GAP, floor_ns, lowered_ns, raised_ns, seconds
from mmplan.planner.result import OptimizeResult, Progress
from mmplan.planner.rivals import Candidate, first_in_simulation, list_rivals
from mmplan.planner.schedules.reschedule import scheduled
from mmplan.planner.search_state import Search
from mmplan.planner.space import Space, build_space, confirm_by_cpsat, out_of_time
from mmplan.planner.stopping import TIME_LIMIT_S, Deadline, never
from mmplan.planner.work_floor import step_floors, work_floor
from mmplan.scenario.scenario import Scenario
from mmplan.units import format_seconds

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """One order of the pools and one technique, as far as it was explored."""

    space: Space
    search: Search

    def value(self) -> tuple[int, float]:
        """Of its best plan; more than any where it has none, and least of these where none is proved not to be."""
        best = self.search.incumbent
        if best is None:
            return NEVER, 1.0 - self.open
        return self.search.scale.value_of(best.configuration, best.step_ns), best.time.objective_s

    @property
    def open(self) -> bool:
        """Whether there may be plans that were not looked at."""
        return self.search.exhausted or self.search.least_value() != NEVER

    def order(self) -> Order:
        """Plans a step ahead are not among those of the exploration."""
        scenario, any_order = self.space.prices.scenario, self.search.any_order_value(self.space)
        return Order(
            scenario=scenario,
            floor=self.search.floor_value() if scenario.constraints.prefetch == () else any_order,
            any_order=any_order,
            any_schedule=self.search.any_schedule_by_devices(self.space),
            steps=self.search.steps_by_devices(self.space),
            best=self.search.incumbent,
            considered=self.search.considered(self.space),
        )


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
    tell = _teller(on_improvement, deadline)
    orders, reads, refused = _explored(scenario, choice, on_improvement, deadline)
    for read in reads:
        try:
            if read.search.incumbent is None:
                _refuse(read, objective, tell, deadline)
            result = _result(read.space, read.search, choice, deadline)
        except (InfeasibleError, NoPlanFoundError) as error:
            refused.append(error)
        else:
            found = of_all_orders(result, orders, objective, gap) if len(orders) > 1 else result
            return _by_devices(found, orders, objective)
    raise _refusal(orders, refused, deadline)


def _by_devices(result: OptimizeResult, orders: Sequence[Order], objective: Objective) -> OptimizeResult:
    """With what all orders prove of any schedule and of fewer devices."""
    plan, parts = result.plan, [steps for order in orders for steps in order.any_schedule]
    least_ns = least_within(parts, None if objective.by_step else plan.rank_count)
    plan = replace(plan, certificate=replace(plan.certificate, any_schedule_s=seconds(least_ns)))
    floors, steps = [order.floor for order in orders], [order.steps for order in orders]
    return replace(result, plan=plan, fewer=fewer_devices(objective, plan.rank_count, floors, steps))


def _explored(
    scenario: Scenario, choice: _Choice, on_improvement: Callable[[Progress], None] | None, deadline: Deadline
) -> tuple[list[Order], list[_Read], list[MmplanError]]:
    """What became of every order and technique, those read that may hold the result, the best first, and why others
    have no plan. Each has an equal share of the time that is left, and all of it while there is no plan."""
    every = list(with_techniques(in_pool_orders(scenario, priced=choice.objective.name == "cost")))
    orders: list[Order] = []
    reads: list[_Read] = []
    refused: list[MmplanError] = []
    for position, ordered in enumerate(every):
        if position and deadline.passed():
            orders.append(_unread(ordered, choice.objective))
            continue
        tell, planned = _teller(on_improvement, deadline), any(order.best is not None for order in orders)
        share_s = deadline.left_s / (len(every) - position)
        try:
            space = build_space(ordered, tell, choice.objective, deadline.within(share_s) if planned else deadline)
            modules_ahead(ordered, space.prices.graph)  # says what cannot be before the search
            search = explored(space, choice.gap, choice.seed, on_improvement, deadline, share_s)
        except InfeasibleError as error:
            refused.append(error)
            continue
        except NoPlanFoundError as error:
            refused.append(error)
            orders.append(_unread(ordered, choice.objective))
            continue
        reads.append(_Read(space=space, search=search))
        orders.append(reads[-1].order())
        reads.sort(key=_Read.value)
        if not scenario.constraints.schedule:  # else the best one may have none of these
            del reads[1:]
    return orders, reads, refused


def _unread(scenario: Scenario, objective: Objective) -> Order:
    """An order that the limit left unread."""
    graph = build_graph(scenario)
    least, steps = work_floor(scenario, graph, objective), step_floors(scenario, graph)
    return Order(scenario=scenario, floor=least, any_order=least, any_schedule=(steps,), steps=steps)


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


def _refusal(orders: Sequence[Order], refused: Sequence[MmplanError], deadline: Deadline) -> MmplanError:
    """That one order has no plan proves nothing of one that the limit cut short."""
    unread = [order for order in orders if order.considered is None]
    cut_short = [error for error in refused if isinstance(error, NoPlanFoundError)]
    if unread and not cut_short:
        return NoPlanFoundError(
            f"no plan of {unread[0].scenario.name} found: {len(unread)} orders of its pools and techniques were not "
            f"looked at when the search ended (limit {deadline.limit_s:g} s); give it more time or fewer of them"
        )
    return (*cut_short, *refused)[0]


def _refuse(read: _Read, objective: Objective, tell: Callable[[str], None], deadline: Deadline) -> None:
    """No plan: proved, or not found in time."""
    space, search = read.space, read.search
    name = space.prices.scenario.name
    if read.open:
        raise NoPlanFoundError(out_of_time(name, search.solved, search.met(space), deadline))
    if not search.parts:
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
        if search.parts:
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
    floor_s = seconds(search.scale.step_below_of(best.configuration, search.any_order_value(space)))
    plan = _scheduled(plan, space, floor_s, choice, deadline)
    if space.prices.scenario.constraints.prefetch != () and choice.objective.name != "p90-time":
        by_step = choice.objective.name == "step-time"
        tried = (best.configuration, *(others if by_step else ()))
        plan = fetched_ahead(
            plan, space, tried=tried, by_step=by_step, floor_s=floor_s, gap=choice.gap, deadline=deadline
        )
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
    """The best cut under the best schedule that is allowed, in chunks too; the cut's own where time ends first.

    Args:
        floor_s: no plan takes less under any schedule.
    """
    allowed, search_s = plan.scenario.constraints.schedule, choice.schedule_search_s
    kept = not allowed or plan.schedule in allowed
    if kept and (search_s == 0 or plan.pp == 1 or deadline.passed()):
        return plan
    graph, costs = space.prices.graph, AnalyticCostModel(plan.scenario)
    best = scheduled(plan, graph, costs, search_s=search_s, seed=choice.seed, stop=deadline.passed)
    if search_s == 0 or choice.objective.name == "p90-time" or not worth_chunks(plan) or deadline.passed():
        return best
    work = Work(search_s=search_s, seed=choice.seed, stop=deadline.passed)
    return in_chunks(plan, best, graph, costs, floor_s=floor_s, work=work)


def _refuse_unsound(plan: Plan) -> None:
    """Every plan from a solver passes the checker, which shares no code with it."""
    findings = check_plan(plan)
    if findings:
        raise CheckError(f"the planner made an unsound plan: {'; '.join(finding.message for finding in findings[:3])}")
