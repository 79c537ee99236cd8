"""Why nothing fits, with the arithmetic, and the nearest changes that do: each is tried, none is guessed."""

import numpy as np

from mmplan.errors import InfeasibleError
from mmplan.planner.bounds import NEVER
from mmplan.planner.changes import Family, families
from mmplan.planner.cut_plan import cut_stages
from mmplan.planner.frontier import Frontier
from mmplan.planner.least_memory import LeastMemory, fits, least_memory, memory_problem
from mmplan.planner.problem import build_problem, machine_of
from mmplan.planner.space import Space, build_space, space_of
from mmplan.planner.stopping import Deadline
from mmplan.scenario.layer_ids import shorten_ids
from mmplan.scenario.scenario import Scenario
from mmplan.units import format_bytes

MOST_LEAN = 1000  # configurations asked for the least memory
MOST_CHANGES = 3  # named in the message
MOST_TRIES = 3  # configurations tried per change, those with the least bounds first
QUICK_WIDTH = 2  # labels kept per upset: finds a cut, need not prove that there is none
# Of the time left, what the search for the leanest cut may take before the changes are tried.
LEANEST_SHARE = 0.3


def explain_infeasible(space: Space, deadline: Deadline) -> InfeasibleError:
    """The error to raise when every configuration was proved not to fit into memory. Says what is known in time."""
    scenario = space.prices.scenario
    shortage, ended = _shortage_unknown(space), True
    changes: dict[str, str] = {}  # kind -> clause
    try:
        shortage = memory_shortage(space, deadline.within(LEANEST_SHARE * deadline.left_s))
        for family in families(scenario):
            if deadline.passed() or len(changes) == MOST_CHANGES:
                break
            found = nearest(family, space, deadline) if family.kind not in changes else None
            if found is not None:
                changes[family.kind] = found
        ended = deadline.passed()
    except KeyboardInterrupt:
        pass
    advice = f"; it fits {' or '.join(changes.values())}" if changes else ""
    if not changes:
        advice = (
            "; the search for a change that makes it fit ended before one was found"
            if ended
            else "; no single change that was tried makes it fit"
        )
    return InfeasibleError(f"no plan of {scenario.name} fits into memory: {shortage}{advice}")


def memory_shortage(space: Space, deadline: Deadline) -> str:
    """Which stage of the leanest cut needs how much more than a device offers; less where time ends before it is found.

    Args:
        space: of which no configuration fits.
    """
    least = least_memory(
        space.prices,
        space.groups,
        space.coarse.groups,
        space.coarse.upsets,
        [space.configurations[index] for index in _leanest(space)],
        stop=deadline.passed,
    )
    return _shortage_unknown(space) if least is None else _shortage(space, least)


def nearest(family: Family, space: Space, deadline: Deadline) -> str | None:
    """The clause of the least change of a family that fits, by bisection; None where the greatest does not.

    The greatest is tried first, then from the least one on in doubling steps: near changes are quick to try.
    """
    low, high = -1, family.steps - 1  # `low` does not fit, `high` does
    text, changed = family.step(high)
    if not can_fit(changed, space, deadline):
        return None
    while high - low > 1:
        middle = min(2 * low + 2, (low + high) // 2)
        less, changed = family.step(middle)
        fit = can_fit(changed, space, deadline)
        if deadline.passed() and not fit:
            return f"{text} (time ended before less was tried)"
        if fit:
            text, high = less, middle
        else:
            low = middle
    return text


def _leanest(space: Space) -> list[int]:
    """The configurations that need least where all stages need the same, in the order of the list; without several
    chunks per rank, which need no less, where one is allowed."""
    chunks = space.configurations.vp
    rows = np.flatnonzero(chunks == chunks.min())
    need_bytes = space.first.need_bytes[rows]
    if len(rows) <= MOST_LEAN:
        found: list[int] = rows.tolist()
        return found
    return sorted(rows[np.argpartition(need_bytes, MOST_LEAN)[:MOST_LEAN]].tolist())


def _shortage_unknown(space: Space) -> str:
    """What is known without a cut: each configuration was excluded by a bound or by a solver."""
    machine = machine_of(space.prices.scenario)
    return (
        f"all {len(space.configurations):,} configurations were proved to need more than the "
        f"{format_bytes(machine.capacity_bytes)} that a device offers"
    )


def _shortage(space: Space, least: LeastMemory) -> str:
    """`the leanest cut (pp=.. ) still needs 96 GiB on stage 3 (llm.20-31): 2 reserve + 70 state + 4 x 6 kept; ...`."""
    stages, _ = cut_stages(space.prices, least.configuration, least.stages)
    index, worst = max(enumerate(stages), key=lambda item: (item[1].memory_bytes, -item[0]))
    machine, one = machine_of(space.prices.scenario), least.configuration
    layers = space.prices.layers(one.layout.at(worst.recompute), one.microbatch_size)
    state_bytes = sum(layers[layer].state_bytes for layer in worst.layers)
    kept_bytes = sum(layers[layer].kept_bytes for layer in worst.layers)
    working_bytes = space.prices.working_bytes(one.layout.at(worst.recompute), one.microbatch_size)
    at_work = f"{format_bytes(working_bytes)} at work + " if working_bytes else ""
    headroom = space.prices.scenario.constraints.memory_headroom
    pieces = f", cut into at most {len(space.groups.groups)} pieces by no-split zones"
    zones = pieces if space.prices.scenario.constraints.no_split else ""
    return (
        f"the leanest cut{zones} ({one}) needs {format_bytes(worst.memory_bytes)} on stage {index} "
        f"({', '.join(shorten_ids(worst.layers))}) = {format_bytes(machine.reserved_bytes)} reserved + "
        f"{at_work}"
        f"{format_bytes(state_bytes)} weights, gradients and optimizer + {worst.in_flight} x "
        f"{format_bytes(kept_bytes)} activations, and a device offers {format_bytes(worst.capacity_bytes)} "
        f"({headroom:.0%} stays free), {format_bytes(worst.memory_bytes - worst.capacity_bytes)} too little"
    )


def can_fit(scenario: Scenario, like: Space, deadline: Deadline) -> bool:
    """Whether a cut that fits into memory is found among the configurations with the least bounds.

    Args:
        like: the space of the scenario that was changed; where the model and its zones are the same, so are prices.
    """
    known = like.prices.scenario
    same = (scenario.model, scenario.technique, scenario.constraints.no_split) == (
        known.model,
        known.technique,
        known.constraints.no_split,
    )
    try:
        space = space_of(like.priced.under(scenario), coarse=like.coarse) if same else build_space(scenario)
    except InfeasibleError:
        return False
    frontier = Frontier(space.bounds, space.scale)
    for _ in range(MOST_TRIES):
        if frontier.least_value() == NEVER or deadline.passed():
            return False
        index = frontier.pop()
        problem = memory_problem(build_problem(space.prices, space.coarse.groups, space.configurations[index]))
        if fits(problem, space.coarse.upsets, width=QUICK_WIDTH, stop=deadline.passed).stage_of is not None:
            return True
    return False
