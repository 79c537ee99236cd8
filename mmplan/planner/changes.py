"""Changes that may make an infeasible scenario fit, each family in steps from the least change to the greatest.

A later step of a family holds whatever an earlier one held (more nodes, more memory, fewer samples), so the least one
that fits is found by bisection.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.host_offload import copied_seconds
from mmplan.cost_models.layer_time import optimizer_seconds
from mmplan.cost_models.layout import Layout, Trained, trained_on_rank
from mmplan.cost_models.time_rules import scenario_rules
from mmplan.planner.configuration import divisors
from mmplan.planner.quantise import floor_percent
from mmplan.scenario.catalogue import catalogue_device, device_names
from mmplan.scenario.scenario import Constraints, Scenario, Training
from mmplan.scenario.technique import Offload
from mmplan.units import format_bytes, format_seconds

# Beyond that an answer is no advice; only the pipeline and the replicas could still grow.
MOST_NODES_FACTOR = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """`step(0)` is the least change, `step(steps - 1)` the greatest; each is a clause and the changed scenario.

    Of several families of one kind the first that fits is enough.
    """

    kind: str
    steps: int
    step: Callable[[int], tuple[str, Scenario]]


def families(scenario: Scenario) -> tuple[Family, ...]:
    """In the order in which a user would consider them; those without a step are left out."""
    all_families = (
        _headroom(scenario),
        *_limits(scenario),
        _zones(scenario),
        _offload(scenario, "optimizer"),
        _offload(scenario, "parameters"),
        _away(scenario),
        _nodes(scenario),
        _memory(scenario),
        _batch(scenario),
        *_frozen(scenario),
    )
    return tuple(family for family in all_families if family.steps)


def _headroom(scenario: Scenario) -> Family:
    rules = scenario.constraints
    percent = floor_percent(rules.memory_headroom)
    if percent / 100 == rules.memory_headroom:
        percent -= 1

    def step(index: int) -> tuple[str, Scenario]:
        headroom = (percent - index) / 100
        changed = replace(rules, memory_headroom=headroom)
        return f"with constraints.memory_headroom {headroom:g}", replace(scenario, constraints=changed)

    return Family(kind="headroom", steps=percent + 1, step=step)


def _limits(scenario: Scenario) -> tuple[Family, ...]:
    """One limit on a degree lifted, or all of them."""
    rules = scenario.constraints
    limited = [name for name in ("tp", "pp", "dp", "microbatch", "cp", "ep", "etp", "vp") if getattr(rules, name)]

    def lifted(names: list[str]) -> Family:
        without: dict[str, Any] = dict.fromkeys(names, ())
        free = replace(scenario, constraints=replace(rules, **without))
        words = f"limit on {names[0]}" if len(names) == 1 else f"limits on {', '.join(names[:-1])} and {names[-1]}"
        return Family(kind="limits", steps=1, step=lambda _: (f"without the {words}", free))

    single = tuple(lifted([name]) for name in limited)
    return (*single, lifted(limited)) if len(limited) > 1 else single


def _zones(scenario: Scenario) -> Family:
    rules: Constraints = scenario.constraints
    free = replace(scenario, constraints=replace(rules, no_split=()))
    return Family(kind="zones", steps=int(bool(rules.no_split)), step=lambda _: ("without the no-split zones", free))


def _offload(scenario: Scenario, place: Offload) -> Family:
    """Optimizer states, or weights too, in host memory, with about what that adds to a step of one microbatch where all
    devices share them."""
    known = all(pool.device.host_bytes_per_s is not None for pool in scenario.cluster.pools)
    possible = scenario.technique.offload == "none" and scenario.optimizer.name == "adamw" and known
    if place == "parameters":
        sharded = scenario.technique.sharding == "none" and not scenario.constraints.sharding
        possible &= sharded or "parameters" in (scenario.technique.sharding, *scenario.constraints.sharding)

    def step(_: int) -> tuple[str, Scenario]:
        away = replace(scenario, technique=replace(scenario.technique, offload=place))
        trained = sum((trained_on_rank(layer, Layout()) for layer in build_graph(scenario).layers()), Trained())
        each = trained.total / scenario.cluster.device_count
        here, there = (
            scenario_rules(replace(one, cluster=replace(one.cluster, pools=one.cluster.pools[:1])))
            for one in (scenario, away)
        )
        update_s = [optimizer_seconds(rules, scenario.optimizer, each) for rules in (here, there)]
        more = format_seconds(max(0.0, update_s[1] - update_s[0]) + sum(copied_seconds(there, 2 * each, each)))
        return f"with constraints.offload [{place}] (at least some {more} more per step)", away

    return Family(kind="offload", steps=int(possible), step=step)


def _away(scenario: Scenario) -> Family:
    """Activations of blocks in host memory."""
    known = all(pool.device.host_bytes_per_s is not None for pool in scenario.cluster.pools)
    away = replace(scenario, technique=replace(scenario.technique, offload="activations"))
    clause = "with constraints.offload [activations]"
    return Family(
        kind="offload", steps=int(known and scenario.technique.offload == "none"), step=lambda _: (clause, away)
    )


def _nodes(scenario: Scenario) -> Family:
    """Extra nodes in the last pool."""
    *others, last = scenario.cluster.pools

    def step(index: int) -> tuple[str, Scenario]:
        larger = replace(scenario.cluster, pools=(*others, replace(last, nodes=last.nodes + 1 + index)))
        plural = "" if index == 0 else "s"
        text = f"with {1 + index} more node{plural} ({larger.device_count:,} devices)"
        return text, replace(scenario, cluster=larger)

    nodes = sum(pool.nodes for pool in scenario.cluster.pools)
    return Family(kind="nodes", steps=(MOST_NODES_FACTOR - 1) * nodes, step=step)


def _memory(scenario: Scenario) -> Family:
    """All devices with the memory of a larger one of the catalogue, their speed unchanged."""
    names: dict[int, list[str]] = {}
    for name in device_names():
        names.setdefault(catalogue_device(name).device.memory_bytes, []).append(name)
    largest = max(pool.device.memory_bytes for pool in scenario.cluster.pools)
    sizes = sorted(size for size in names if size > largest)

    def step(index: int) -> tuple[str, Scenario]:
        size = sizes[index]
        pools = tuple(replace(p, device=replace(p.device, memory_bytes=size)) for p in scenario.cluster.pools)
        text = f"on devices with {format_bytes(size)} ({', '.join(names[size])})"
        return text, replace(scenario, cluster=replace(scenario.cluster, pools=pools))

    return Family(kind="memory", steps=len(sizes), step=step)


def _batch(scenario: Scenario) -> Family:
    """Fewer samples per step: fewer microbatches wait in the pipeline."""
    smaller = [batch for batch in reversed(divisors(scenario.global_batch)) if batch < scenario.global_batch]

    def step(index: int) -> tuple[str, Scenario]:
        return f"with a global batch of {smaller[index]}", replace(scenario, global_batch=smaller[index])

    return Family(kind="batch", steps=len(smaller), step=step)


def _frozen(scenario: Scenario) -> tuple[Family, ...]:
    """One trained transformer frozen, the smallest first."""
    sizes = {
        module.name: module.transformer.layers * module.transformer.hidden**2
        for module in scenario.model.modules
        if module.transformer and module.training.mode == "full"
    }

    def frozen(name: str) -> Family:
        modules = tuple(
            replace(module, training=Training(mode="frozen")) if module.name == name else module
            for module in scenario.model.modules
        )
        changed = replace(scenario, model=replace(scenario.model, modules=modules))
        return Family(kind="frozen", steps=1, step=lambda _: (f"with {name} frozen", changed))

    return tuple(frozen(name) for name in sorted(sizes, key=lambda name: sizes[name]))
