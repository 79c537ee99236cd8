"""The search space of a scenario: groups, upsets, configurations and their bounds, made once; and how one is solved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmplan.errors import NoPlanFoundError
from mmplan.planner.bounds import NEVER
from mmplan.planner.chunk_solver import solve_chunks
from mmplan.planner.coarse import Coarse, coarse_enough, refined, spread
from mmplan.planner.configuration import Configuration
from mmplan.planner.configurations import Configurations, list_configurations
from mmplan.planner.contract import GroupGraph
from mmplan.planner.cut_result import CutResult
from mmplan.planner.first_bounds import FirstBounds, first_bounds
from mmplan.planner.frontier import Bounds
from mmplan.planner.looks import Looks
from mmplan.planner.objective import STEP_TIME, Objective, Scale, scale_of
from mmplan.planner.priced_groups import PricedGroups, priced_groups
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import build_problem, room_bytes_of
from mmplan.planner.quantise import lowered_ns, raised_ns
from mmplan.planner.stage_solver import quick_cut, solve_cut, value_ceiling
from mmplan.planner.stopping import NO_DEADLINE, Deadline, Stopped
from mmplan.planner.upsets import IntArray
from mmplan.scenario.scenario import Scenario

# CP-SAT's deterministic seconds for a configuration that the dynamic program could not finish: given an upper bound, 62
# of 64 cuts of up to 128 layers into 64 stages were proven within 6.
CPSAT_DETERMINISTIC_S = 10.0
SKETCH_GAP = 0.05  # where chunks are cut only for comparing


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """`coarse` holds `priced.groups` unless these have too many upsets for the dynamic program."""

    priced: PricedGroups
    coarse: Coarse
    configurations: Configurations
    first: FirstBounds
    bounds: Bounds
    scale: Scale

    @property
    def prices(self) -> Prices:
        return self.priced.prices

    @property
    def groups(self) -> GroupGraph:
        return self.priced.groups

    @property
    def bounds_ns(self) -> IntArray:
        return self.bounds.step_ns

    @property
    def any_order_value(self) -> int:
        """No plan has a lower value, with any number of chunks per rank and under any schedule."""
        return int(self.scale.values(self.first.any_order_ns).min())

    @property
    def exact(self) -> bool:
        return self.coarse.groups == self.groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A solver's answer for one configuration: layer ids of each stage when a cut was found.

    Not `exhausted` and without a cut, none is faster than `bound_ns`; `unfit`: none fits into memory at all.
    """

    stages: tuple[tuple[str, ...], ...] | None
    bound_ns: int
    exhausted: bool
    unfit: bool = False


def build_space(
    scenario: Scenario,
    tell: Callable[[str], None] = lambda _: None,
    objective: Objective = STEP_TIME,
    deadline: Deadline = NO_DEADLINE,
) -> Space:
    """All configurations and what bounds them; `tell` hears what is being done.

    Raises:
        InfeasibleError: the constraints leave no configuration.
        NoPlanFoundError: the deadline came first.
    """
    tell("reading model and data")
    priced = priced_groups(scenario)
    return space_of(priced, coarse=coarse_enough(priced), tell=tell, objective=objective, deadline=deadline)


def space_of(
    priced: PricedGroups,
    *,
    coarse: Coarse,
    tell: Callable[[str], None] = lambda _: None,
    objective: Objective = STEP_TIME,
    deadline: Deadline = NO_DEADLINE,
) -> Space:
    """The configurations of a priced scenario and their bounds.

    Raises:
        InfeasibleError: the constraints leave no configuration.
        NoPlanFoundError: the deadline came first.
    """
    prices = priced.prices
    room_bytes = room_bytes_of(prices.scenario)
    configurations = list_configurations(
        prices.scenario, len(priced.groups.groups), lambda layout: prices.most_samples(layout, room_bytes)
    )
    tell(f"bounding {len(configurations):,} configurations")
    looks = Looks(prices, priced.groups, configurations)
    try:
        first = first_bounds(prices, priced.groups, configurations, looks.tables(), deadline.passed)
    except Stopped:
        raise NoPlanFoundError(out_of_time(prices.scenario.name, 0, len(configurations), deadline)) from None
    return Space(
        priced=priced,
        coarse=coarse,
        configurations=configurations,
        first=first,
        bounds=Bounds.of(looks, first),
        scale=scale_of(objective, prices.scenario.cluster, configurations.ranks),
    )


def out_of_time(name: str, solved: int, met: int, deadline: Deadline) -> str:
    """Why there is no plan, where nothing is proved."""
    return (
        f"no plan of {name} found: {solved} of {met:,} configurations tried when the search ended (limit "
        f"{deadline.limit_s:g} s); give it more time or fewer degrees to try"
    )


def solve_configuration(
    space: Space,
    index: int,
    *,
    cutoff_ns: int | None,
    tolerance: float,
    seed: int,
    deadline: Deadline,
    gap: float = 0.0,
) -> Answer:
    """The best cut of a configuration below the cutoff: by the dynamic program, and where it cannot end by CP-SAT.

    Of several chunks per rank see `chunk_solver`.
    """
    configuration = space.configurations[index]
    if configuration.vp > 1:
        return _solve_chunks(space, index, cutoff_ns, max(tolerance, gap), deadline)
    found = solve_cut(
        build_problem(space.prices, space.coarse.groups, configuration),
        space.coarse.upsets,
        cutoff_ns=cutoff_ns,
        tolerance=tolerance,
        busiest_ns=int(space.bounds.busiest_ns[index]),
        stop=deadline.passed,
    )
    stages = _stages(space.coarse.groups, found, configuration.pp)
    exact = space.exact or configuration.pp == 1  # a single stage has no cut that coarse groups could miss
    if (exact and not found.exhausted) or deadline.passed():
        return _answer(stages, found.bound_ns if exact else 0, found.exhausted or not exact, cutoff_ns)
    problem = build_problem(space.prices, space.groups, configuration)
    target_ns = cutoff_ns if cutoff_ns is not None else value_ceiling(problem)
    if found.objective_ns is not None and found.stage_of is not None:
        stage_of, objective_ns = _finer(space, index, found.stage_of, found.objective_ns, tolerance, deadline)
        stages = stage_layers(space.groups, stage_of, configuration.pp)
        target_ns = lowered_ns(objective_ns, tolerance)
        if target_ns <= space.bounds_ns[index] or deadline.passed():
            return _answer(stages, int(space.bounds_ns[index]), objective_ns > space.bounds_ns[index], cutoff_ns)
    from mmplan.planner.stage_cpsat import cut_by_cpsat  # OR-Tools takes half a second to load

    better = cut_by_cpsat(
        problem,
        cutoff_ns=target_ns,
        max_deterministic_time=CPSAT_DETERMINISTIC_S,
        max_wall_s=deadline.left_s,
        seed=seed,
    )
    bound_ns = max(better.bound_ns, found.bound_ns if space.exact else 0)
    better_stages = _stages(space.groups, better, configuration.pp)
    return _answer(stages if better_stages is None else better_stages, bound_ns, better.exhausted, cutoff_ns)


def _solve_chunks(space: Space, index: int, cutoff_ns: int | None, gap: float, deadline: Deadline) -> Answer:
    configuration = space.configurations[index]
    found = solve_chunks(
        build_problem(space.prices, space.groups, configuration),
        configuration.vp,
        cutoff_ns=cutoff_ns,
        tolerance=gap,
        floor_ns=int(space.bounds.busiest_ns[index]),
        stop=deadline.passed,
    )
    stages = _stages(space.groups, found, configuration.stages)
    return _answer(stages, found.bound_ns, found.exhausted, cutoff_ns)


def _finer(
    space: Space, index: int, stage_of: tuple[int, ...], objective_ns: int, tolerance: float, deadline: Deadline
) -> tuple[tuple[int, ...], int]:
    """A cut of coarse groups as one of the finest ones, improved where it is not within the tolerance of its bound."""
    fine = spread(space.groups, space.coarse.groups, stage_of)
    if space.exact:
        return fine, objective_ns
    bound_ns = int(space.bounds_ns[index])
    return refined(
        space.priced,
        space.coarse,
        space.configurations[index],
        fine,
        objective_ns,
        enough_ns=raised_ns(bound_ns, tolerance),
        busiest_ns=int(space.bounds.busiest_ns[index]),
        stop=deadline.passed,
    )


def sketch_configuration(space: Space, index: int, deadline: Deadline) -> Answer:
    """Some good cut of a configuration, soon: for comparing, not for proving."""
    configuration = space.configurations[index]
    if configuration.vp > 1:
        return _solve_chunks(space, index, None, SKETCH_GAP, deadline)
    found = quick_cut(
        build_problem(space.prices, space.coarse.groups, configuration),
        space.coarse.upsets,
        busiest_ns=int(space.bounds.busiest_ns[index]),
        stop=deadline.passed,
    )
    stages = _stages(space.coarse.groups, found, configuration.pp)
    return _answer(stages, found.bound_ns if space.exact else 0, found.exhausted or not space.exact, None)


def _answer(
    stages: tuple[tuple[str, ...], ...] | None, bound_ns: int, exhausted: bool, cutoff_ns: int | None
) -> Answer:
    unfit = stages is None and not exhausted and cutoff_ns is None
    return Answer(stages=stages, bound_ns=NEVER if unfit else bound_ns, exhausted=exhausted, unfit=unfit)


def confirm_by_cpsat(
    space: Space,
    configuration: Configuration,
    *,
    target_ns: int,
    max_deterministic_time: float,
    seed: int,
    deadline: Deadline,
) -> bool:
    """Whether CP-SAT, too, proves that no cut of the configuration is faster than `target_ns`; it knows one stage per
    rank only."""
    if configuration.vp > 1:
        return False
    problem = build_problem(space.prices, space.groups, configuration)
    from mmplan.planner.stage_cpsat import cut_by_cpsat  # as above

    proof = cut_by_cpsat(
        problem,
        cutoff_ns=target_ns,
        max_deterministic_time=max_deterministic_time,
        max_wall_s=deadline.left_s,
        seed=seed,
    )
    return proof.stage_of is None and not proof.exhausted


def _stages(groups: GroupGraph, result: CutResult, stages: int) -> tuple[tuple[str, ...], ...] | None:
    return None if result.stage_of is None else stage_layers(groups, result.stage_of, stages)


def stage_layers(groups: GroupGraph, stage_of: Sequence[int], stages: int) -> tuple[tuple[str, ...], ...]:
    """Layer ids of each stage in topological order."""
    members: list[list[str]] = [[] for _ in range(stages)]
    for group, stage in enumerate(stage_of):
        members[stage].extend(groups.groups[group])
    return tuple(tuple(layers) for layers in members)
