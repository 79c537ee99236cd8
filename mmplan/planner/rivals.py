"""Cuts beside the best one found: for choosing among equals by simulation, and for saying why others lose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmplan.planner.bounds import NEVER
from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import StepTime, cut_stages, plan_from_cut
from mmplan.planner.objective import Objective
from mmplan.planner.quantise import floor_ns
from mmplan.planner.schedules.reschedule import timed_schedule
from mmplan.planner.second_process import both
from mmplan.planner.simulate import simulate
from mmplan.planner.space import Answer, Space, sketch_configuration
from mmplan.planner.step_times import step_times
from mmplan.planner.stopping import Deadline
from mmplan.planner.upsets import BoolArray, IntArray

# As many lines as a reader of `--explain` takes in.
MOST_RIVALS = 8
CHUNKED_RIVALS = 3  # of them, where there are so many, with several chunks per rank
MOST_UNFIT = 2  # that would be fast if memory did not forbid them: tells what more memory could buy
DRAWN_STEPS = 40  # for a 90th percentile: four are above it
SHARPENED = 96  # configurations looked at for rivals
# Forwards (stages x microbatches) simulated in all when leaders are compared: 30 to 45 us each, 1.5 s in all.
MOST_FORWARDS = 40_000
FORWARDS_OF_TWO = 1_000  # from which on two processes simulate: with a search they take a second


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A cut of a configuration with its closed-form step time."""

    configuration: Configuration
    stages: tuple[tuple[str, ...], ...]
    time: StepTime

    @property
    def step_ns(self) -> int:
        """The closed form."""
        return floor_ns(self.time.objective_s)


def candidate(space: Space, configuration: Configuration, stages: tuple[tuple[str, ...], ...]) -> Candidate:
    _, time = cut_stages(space.prices, configuration, stages)
    return Candidate(configuration=configuration, stages=stages, time=time)


def list_rivals(
    space: Space, best: Configuration, answers: Mapping[int, Answer], deadline: Deadline
) -> dict[Configuration, Candidate | None]:
    """The configurations with the least values besides the best one, each with a good cut; fewer when time runs out.

    None where nothing fits: among these the ones whose bound would be the least with any memory.
    """
    if deadline.passed():
        return {}
    bounds, scale = space.bounds, space.scale
    told = _told(space)
    roomy = scale.values(np.where(told & (bounds.step_ns == NEVER), bounds.roomy_ns, NEVER))
    near = least_rows(scale.values(np.where(told, bounds.step_ns, NEVER)), SHARPENED)
    bounds.sharpen(near)
    solved = {index for index, answer in answers.items() if told[index] or answer.stages is not None}
    promise = {
        index: scale.value(index, max(int(bounds.step_ns[index]), answers[index].bound_ns if index in answers else 0))
        for index in {*near.tolist(), *solved}
        if bounds.step_ns[index] != NEVER and space.configurations[index] != best
    }
    unfit = least_rows(roomy, MOST_UNFIT)
    rivals: dict[Configuration, Candidate | None] = {space.configurations[index]: None for index in unfit}
    for index in _some_chunked(space, sorted(promise, key=lambda index: (promise[index], index))):
        if deadline.passed():
            break
        answer = answers.get(index)
        if answer is None or (answer.stages is None and not answer.unfit):
            answer = sketch_configuration(space, index, deadline)
        if answer.stages is not None:
            rivals[space.configurations[index]] = candidate(space, space.configurations[index], answer.stages)
        elif answer.unfit:
            rivals[space.configurations[index]] = None
    return rivals


def _told(space: Space) -> BoolArray:
    """[rows] of which cuts are made for comparing: several chunks per rank, which take long, where constraints ask for
    them; else only those that the search has cut are rivals."""
    rules = space.prices.scenario.constraints
    asked = bool(rules.vp) or "interleaved" in rules.schedule
    told: BoolArray = (space.configurations.vp == 1) | asked
    return told


def _some_chunked(space: Space, rows: Sequence[int]) -> list[int]:
    """The first rows, with some of several chunks per rank among them."""
    chunked = [row for row in rows if space.configurations[row].vp > 1][:CHUNKED_RIVALS]
    others = [row for row in rows if row not in chunked][: MOST_RIVALS - len(chunked)]
    return [row for row in rows if row in chunked or row in others]


def least_rows(values: IntArray, count: int) -> IntArray:
    """The rows with the least values below NEVER, at most so many, in their order."""
    rows = np.flatnonzero(values < NEVER)
    if len(rows) > count:
        rows = rows[values[rows] <= np.partition(values[rows], count - 1)[count - 1]]
    return rows[np.argsort(values[rows], kind="stable")][:count]


def first_in_simulation(
    space: Space,
    best: Candidate,
    rivals: Sequence[Candidate],
    most: int,
    objective: Objective,
    deadline: Deadline,
    *,
    search_s: float = 0.0,
) -> Candidate:
    """Among the best and the rivals whose closed form has a value of at most `most`, the least in simulation.

    The closed form knows one link, no queue, and 1F1B only: cuts that are equal in it may differ by some percent in
    simulation, under 1F1B or, with `search_s`, under the schedule that so much work finds.
    """
    values = {one.configuration: space.scale.value_of(one.configuration, one.step_ns) for one in rivals}
    allowed = [one for one in rivals if values[one.configuration] <= most]
    leaders = sorted(allowed, key=lambda one: values[one.configuration])
    forwards = np.cumsum([one.configuration.pp * one.configuration.microbatches for one in (best, *leaders)])
    tried = (best, *leaders)[: int((forwards <= MOST_FORWARDS).sum())] if leaders else ()

    def steps_s(some: Sequence[Candidate]) -> list[float | None]:
        return [None if deadline.passed() else step_s(one) for one in some]

    def step_s(one: Candidate) -> float:
        return p90_s(space, one) if objective.name == "p90-time" else simulated_s(space, one, search_s, deadline)

    worth = len(tried) > 1 and int(forwards[len(tried) - 1]) >= FORWARDS_OF_TWO
    found = both(lambda: steps_s(tried[::2]), lambda: steps_s(tried[1::2]), worth=worth)
    chosen, least = best, NEVER
    for place, one in enumerate(tried):
        seconds = found[place % 2][place // 2]
        if seconds is None:  # the time is up
            break
        value = space.scale.value_of(one.configuration, floor_ns(seconds))
        if value < least:
            chosen, least = one, value
    return chosen


def p90_s(space: Space, one: Candidate) -> float:
    """The 90th percentile of the step time over steps drawn from the data."""
    plan = plan_from_cut(space.prices, one.configuration, one.stages, bound_s=0.0, status="feasible", wall_s=0.0)
    (times,) = step_times(plan, space.prices.graph, space.prices.costs, steps=DRAWN_STEPS, compositions=("in order",))
    return float(np.percentile(times.step_s, 90))


def simulated_s(space: Space, one: Candidate, search_s: float, deadline: Deadline) -> float:
    """The step time of a cut in simulation, every microbatch mean.

    Of several chunks per rank, whose programs are large, under their own order: it leaves a search little to find.
    """
    graph, costs = space.prices.graph, space.prices.costs
    plan = plan_from_cut(space.prices, one.configuration, one.stages, bound_s=0.0, status="feasible", wall_s=0.0)
    if search_s > 0 and plan.pp > 1 and one.configuration.vp == 1:
        plan, step_s = timed_schedule(plan, graph, costs, search_s=search_s, stop=deadline.passed)
        if step_s is not None:
            return step_s
    return simulate(plan, graph, costs).step_time_s
