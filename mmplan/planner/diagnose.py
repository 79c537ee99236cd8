"""Why nothing fits, with the arithmetic, and the nearest change that does: each change is tried, none is guessed."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from mmplan.errors import InfeasibleError
from mmplan.planner.coarse import coarse_enough
from mmplan.planner.configuration import list_configurations
from mmplan.planner.cut_plan import cut_stages
from mmplan.planner.least_memory import LeastMemory, even_spread_bytes, fits, leanest, least_memory, memory_problem
from mmplan.planner.priced_groups import priced_groups
from mmplan.planner.problem import build_problem, machine_of
from mmplan.planner.quantise import floor_percent
from mmplan.planner.space import Space
from mmplan.planner.stopping import Deadline
from mmplan.scenario.layer_ids import shorten_ids
from mmplan.scenario.scenario import Constraints, Scenario, Training
from mmplan.units import format_bytes, parse_bytes

MOST_CHANGES = 2  # named in the message
MOST_TRIES = 3  # configurations tried per change, fittest first
QUICK_WIDTH = 2  # labels kept per upset: finds a cut, need not prove that there is none
NODE_FACTORS = (2, 4, 8)
MEMORIES = ("40 GiB", "80 GiB", "141 GiB", "192 GiB", "288 GiB")  # A100, H100, H200, MI300X, B300: data sheets


def explain_infeasible(space: Space, deadline: Deadline) -> InfeasibleError:
    """The error to raise when every configuration was proved not to fit into memory."""
    scenario = space.prices.scenario
    least = least_memory(space.prices, space.coarse.groups, space.coarse.upsets, space.configurations)
    changes: list[str] = []
    for family in _changes(scenario, least):
        if len(changes) < MOST_CHANGES:
            changes += islice((text for text, changed in family if can_fit(changed)), 1)
    advice = f"; it fits {' or '.join(changes)}" if changes else "; no single change that was tried makes it fit"
    return InfeasibleError(f"no plan of {scenario.name} fits into memory: {_shortage(space, least)}{advice}")


def _shortage(space: Space, least: LeastMemory) -> str:
    """`the leanest cut (pp=.. ) still needs 96 GiB on stage 3 (llm.20-31): 2 reserve + 70 state + 4 x 6 kept; ...`."""
    stages, _ = cut_stages(space.prices, least.configuration, least.stages)
    index, worst = max(enumerate(stages), key=lambda item: (item[1].memory_bytes, -item[0]))
    machine, one = machine_of(space.prices.scenario), least.configuration
    layers = space.prices.layers(one.tp, one.microbatch_size)
    state_bytes = sum(layers[layer].state_bytes for layer in worst.layers)
    kept_bytes = sum(layers[layer].kept_bytes for layer in worst.layers)
    headroom = space.prices.scenario.constraints.memory_headroom
    pieces = f", cut into at most {len(space.groups.groups)} pieces by no-split zones"
    zones = pieces if space.prices.scenario.constraints.no_split else ""
    return (
        f"the leanest cut{zones} ({one}) needs {format_bytes(worst.memory_bytes)} on stage {index} "
        f"({', '.join(shorten_ids(worst.layers))}) = {format_bytes(machine.reserved_bytes)} reserved + "
        f"{format_bytes(state_bytes)} weights, gradients and optimizer + {worst.in_flight} x "
        f"{format_bytes(kept_bytes)} activations, and a device offers {format_bytes(worst.capacity_bytes)} "
        f"({headroom:.0%} stays free)"
    )


Changes = Iterator[tuple[str, Scenario]]


def _changes(scenario: Scenario, least: LeastMemory) -> tuple[Changes, ...]:
    """Families of changes, smallest change first, in the order in which a user would consider them."""
    return (
        _rules_relaxed(scenario, least),
        _nodes_added(scenario),
        _memory_added(scenario),
        _module_frozen(scenario),
    )


def _rules_relaxed(scenario: Scenario, least: LeastMemory) -> Changes:
    rules = scenario.constraints
    device_bytes = min(pool.device.memory_bytes for pool in scenario.cluster.pools)
    percent = floor_percent(1 - (least.peak_bytes + machine_of(scenario).reserved_bytes) / device_bytes)
    if 0 <= percent / 100 < rules.memory_headroom:
        smaller = replace(rules, memory_headroom=percent / 100)
        yield f"with constraints.memory_headroom {percent / 100:g}", replace(scenario, constraints=smaller)
    if rules.tp or rules.pp or rules.dp or rules.microbatch:
        free = Constraints(no_split=rules.no_split, memory_headroom=rules.memory_headroom, schedule=rules.schedule)
        yield "without the limits on tp, pp, dp and microbatch", replace(scenario, constraints=free)
    if rules.no_split:
        yield "without the no-split zones", replace(scenario, constraints=replace(rules, no_split=()))


def _nodes_added(scenario: Scenario) -> Changes:
    for factor in NODE_FACTORS:
        pools = tuple(replace(pool, nodes=pool.nodes * factor) for pool in scenario.cluster.pools)
        larger = replace(scenario.cluster, pools=pools)
        yield f"on {larger.device_count} devices", replace(scenario, cluster=larger)


def _memory_added(scenario: Scenario) -> Changes:
    for memory in MEMORIES:
        size_bytes = parse_bytes(memory)
        if all(size_bytes > pool.device.memory_bytes for pool in scenario.cluster.pools):
            pools = tuple(
                replace(pool, device=replace(pool.device, memory_bytes=size_bytes)) for pool in scenario.cluster.pools
            )
            larger = replace(scenario.cluster, pools=pools)
            yield f"on devices with {memory}", replace(scenario, cluster=larger)


def _module_frozen(scenario: Scenario) -> Changes:
    """One trained transformer frozen, the one with most layers first."""
    trained = [module for module in scenario.model.modules if module.transformer and module.training.mode == "full"]
    for module in sorted(trained, key=lambda module: -(module.transformer.layers if module.transformer else 0)):
        modules = tuple(
            replace(other, training=Training(mode="frozen")) if other.name == module.name else other
            for other in scenario.model.modules
        )
        yield f"with {module.name} frozen", replace(scenario, model=replace(scenario.model, modules=modules))


def can_fit(scenario: Scenario) -> bool:
    """Whether a cut that fits into memory is found among the configurations with the leanest even spread."""
    priced = priced_groups(scenario)
    coarse = coarse_enough(priced)
    prices, groups, upsets = priced.prices, coarse.groups, coarse.upsets
    try:
        configurations = list_configurations(scenario, len(groups.groups))
    except InfeasibleError:
        return False
    problems = [memory_problem(build_problem(prices, groups, one)) for one in leanest(configurations)]
    first = sorted(problems, key=even_spread_bytes)[:MOST_TRIES]
    return any(
        fits(problem, upsets, width=QUICK_WIDTH).stage_of is not None
        for problem in first
        if even_spread_bytes(problem) <= problem.capacity_bytes
    )
