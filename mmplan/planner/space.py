"""The search space of a scenario: layer groups, upsets, configurations and their lower bounds, made once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.bounds import NEVER, Bounds, lower_bounds
from mmplan.planner.configuration import Configuration, list_configurations
from mmplan.planner.contract import GroupGraph, coarsen, contract
from mmplan.planner.cut_result import CutResult
from mmplan.planner.pricing import Prices
from mmplan.planner.problem import build_problem
from mmplan.planner.quantise import lowered_ns
from mmplan.planner.stage_cpsat import cut_by_cpsat
from mmplan.planner.stage_dp import never
from mmplan.planner.stage_solver import solve_cut, value_ceiling
from mmplan.planner.upsets import IntArray, Upsets, enumerate_upsets
from mmplan.scenario.scenario import Scenario

# CP-SAT's deterministic seconds for a configuration that the dynamic program could not finish
CPSAT_TIME = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """`coarse` equals `groups` unless these have too many upsets for the dynamic program, which then cuts `coarse`."""

    prices: Prices
    groups: GroupGraph
    coarse: GroupGraph
    upsets: Upsets  # of `coarse`
    configurations: tuple[Configuration, ...]
    bounds: Bounds

    @property
    def bounds_ns(self) -> IntArray:
        return self.bounds.step_ns

    @property
    def exact(self) -> bool:
        return self.coarse == self.groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A solver's answer for one configuration: layer ids of each stage when a cut was found.

    Not `exhausted` and without a cut, none is faster than `bound_ns`; `unfit`: none fits into memory at all.
    """

    stages: tuple[tuple[str, ...], ...] | None
    bound_ns: int
    exhausted: bool
    unfit: bool = False


def build_space(scenario: Scenario) -> Space:
    """Raises InfeasibleError when the constraints leave no configuration."""
    graph = build_graph(scenario)
    prices = Prices(scenario, graph, AnalyticCostModel(scenario))
    groups = coarse = contract(graph, scenario.constraints.no_split)
    upsets = enumerate_upsets(len(groups.groups), groups.pairs)
    while upsets is None:
        coarse = coarsen(graph, coarse)
        upsets = enumerate_upsets(len(coarse.groups), coarse.pairs)
    configurations = list_configurations(scenario, len(groups.groups))
    return Space(
        prices=prices,
        groups=groups,
        coarse=coarse,
        upsets=upsets,
        configurations=configurations,
        bounds=lower_bounds(prices, groups, configurations),
    )


def solve_configuration(
    space: Space,
    configuration: Configuration,
    *,
    cutoff_ns: int | None,
    tolerance: float,
    cpsat_time: float = CPSAT_TIME,
    seed: int = 0,
    stop: Callable[[], bool] = never,
) -> Answer:
    """The best cut of a configuration below the cutoff: by the dynamic program, and where it cannot end by CP-SAT.

    `cpsat_time` is CP-SAT's limit in deterministic seconds; 0 leaves it out.
    """
    found = solve_cut(
        build_problem(space.prices, space.coarse, configuration),
        space.upsets,
        cutoff_ns=cutoff_ns,
        tolerance=tolerance,
        stop=stop,
    )
    stages = _stages(space.coarse, found, configuration.pp)
    if (space.exact and not found.exhausted) or cpsat_time == 0 or stop():
        return _answer(stages, found.bound_ns if space.exact else 0, found.exhausted or not space.exact, cutoff_ns)
    problem = build_problem(space.prices, space.groups, configuration)
    if found.objective_ns is None:
        target_ns = cutoff_ns if cutoff_ns is not None else value_ceiling(problem)
    else:
        target_ns = lowered_ns(found.objective_ns, tolerance)
    better = cut_by_cpsat(problem, cutoff_ns=target_ns, max_deterministic_time=cpsat_time, seed=seed)
    bound_ns = max(better.bound_ns, found.bound_ns if space.exact else 0)
    better_stages = _stages(space.groups, better, configuration.pp)
    return _answer(stages if better_stages is None else better_stages, bound_ns, better.exhausted, cutoff_ns)


def _answer(
    stages: tuple[tuple[str, ...], ...] | None, bound_ns: int, exhausted: bool, cutoff_ns: int | None
) -> Answer:
    unfit = stages is None and not exhausted and cutoff_ns is None
    return Answer(stages=stages, bound_ns=NEVER if unfit else bound_ns, exhausted=exhausted, unfit=unfit)


def confirm_by_cpsat(
    space: Space, configuration: Configuration, *, target_ns: int, max_deterministic_time: float, seed: int
) -> bool:
    """Whether CP-SAT, too, proves that no cut of the configuration is faster than `target_ns`."""
    problem = build_problem(space.prices, space.groups, configuration)
    proof = cut_by_cpsat(problem, cutoff_ns=target_ns, max_deterministic_time=max_deterministic_time, seed=seed)
    return proof.stage_of is None and not proof.exhausted


def _stages(groups: GroupGraph, result: CutResult, stages: int) -> tuple[tuple[str, ...], ...] | None:
    return None if result.stage_of is None else stage_layers(groups, result.stage_of, stages)


def stage_layers(groups: GroupGraph, stage_of: Sequence[int], stages: int) -> tuple[tuple[str, ...], ...]:
    """Layer ids of each stage in topological order."""
    members: list[list[str]] = [[] for _ in range(stages)]
    for group, stage in enumerate(stage_of):
        members[stage].extend(groups.groups[group])
    return tuple(tuple(layers) for layers in members)
