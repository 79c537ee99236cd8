"""Evolution of list-scheduling rules: a population of rows is scheduled at once, the best are mutated and crossed.

All that is random comes from the seed, so the same seed and effort give the same rules however fast the machine is.
"""

from dataclasses import dataclass

import numpy as np

from mmplan.planner.schedules.search.effort import REACHED, Effort
from mmplan.planner.schedules.search.listing import Lister, Rules
from mmplan.planner.schedules.search.nodes import Nodes

POPULATION, ELITE, EQUAL_ELITE = 96, 12, 4
CROSSED, ALIKE = 0.3, 0.3
_URGENT, _LAST = 1000.0, 2000.0  # steps between classes of priority, far above any microbatch index


@dataclass(frozen=True, slots=True)
class Bred:
    """Best orders of the last population: distinct makespans, best first."""

    makespan_s: tuple[float, ...]
    orders: tuple[list[list[int]], ...]


def evolve(nodes: Nodes, *, generations: int, seed: int, effort: Effort, floor_s: float = 0.0, keep: int = 4) -> Bred:
    """Orders found in so many generations; ends early at `floor_s` or when the effort is spent."""
    random = np.random.default_rng(seed)
    lister = Lister(nodes)
    rules = _first(nodes, random)
    groups = _groups(nodes)
    limit_s = np.inf
    elite: Rules | None = None
    elite_s = np.zeros(0)
    best_orders: dict[float, list[list[int]]] = {}
    for _ in range(generations):
        listed = lister.run(rules, limit_s)
        effort.spend_turns(len(listed.picks), POPULATION, lister.ranks * lister.slots)
        pool = rules if elite is None else _joined(elite, rules)
        pool_s = np.concatenate([elite_s, listed.makespan_s])
        chosen = _elite(pool_s)
        for row in np.argsort(listed.makespan_s, kind="stable")[:keep]:
            key = float(np.round(listed.makespan_s[row], 9))
            if np.isfinite(key) and key not in best_orders:
                best_orders[key] = listed.orders(int(row))
        best_orders = dict(sorted(best_orders.items())[:keep])
        elite, elite_s = pool.rows(chosen), pool_s[chosen]
        finite = elite_s[np.isfinite(elite_s)]
        if not len(finite):
            break
        limit_s = float(finite.max()) * (1 + 1e-9)
        if finite.min() <= floor_s * (1 + REACHED) or effort.ended():
            break
        rules = _children(elite.rows(np.isfinite(elite_s)), groups, random)
    return Bred(tuple(best_orders), tuple(best_orders.values()))


def _first(nodes: Nodes, random: np.random.Generator) -> Rules:
    """Plain rules in every combination of urgency and limits, the rest with random patience."""
    problem, rows = nodes.problem, POPULATION
    stages = len(problem.stages)
    kinds = np.array([nodes.actions[numbers[0]].kind for numbers in nodes.lanes])
    stage_of = np.array([nodes.actions[numbers[0]].stage for numbers in nodes.lanes])
    depths = np.array(problem.depths())
    offset = np.zeros((rows, len(kinds)))
    row = np.arange(rows)
    forward_first = (row % 2 == 0)[:, None]
    offset += np.where(kinds == "F", np.where(forward_first, 0.0, _URGENT), 0.0)
    offset += np.where(kinds == "I", np.where(forward_first, _URGENT, 0.0), 0.0)
    offset += np.where(kinds == "W", _LAST, 0.0)
    deep_first = (row % 4 >= 2)[:, None] & (kinds != "W")
    offset -= np.where(deep_first, stage_of * 0.5, 0.0)
    m = problem.microbatches
    limits = np.stack([np.full(stages, m), depths, 2 * depths - 1, depths + 1])
    in_flight = np.minimum(limits[row // 4 % 4], m)
    drawn = random.integers(1, 2 * depths.max() + 1, (rows, stages))
    in_flight = np.where((row >= 64)[:, None], np.minimum(drawn, m), in_flight)
    patience = random.random((rows, problem.ranks))
    patience[:16] = 0.0
    patience[16:32] = 0.6
    return Rules(offset, in_flight, patience)


def _joined(first: Rules, second: Rules) -> Rules:
    pairs = ((first.offset, second.offset), (first.in_flight, second.in_flight), (first.patience, second.patience))
    offset, in_flight, patience = (np.concatenate(pair) for pair in pairs)
    return Rules(offset, in_flight, patience)


def _elite(makespan_s: np.ndarray) -> np.ndarray:
    """Rows of the best, few of them with one makespan."""
    chosen: list[int] = []
    seen: dict[float, int] = {}
    for row in np.argsort(makespan_s, kind="stable"):
        key = float(np.round(makespan_s[row], 9))
        if seen.get(key, 0) < EQUAL_ELITE:
            seen[key] = seen.get(key, 0) + 1
            chosen.append(int(row))
        if len(chosen) == ELITE:
            break
    return np.array(chosen)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Lanes and stages that may change together: those of one kind and role, and those of one role."""

    lane: np.ndarray
    stage: np.ndarray


def _groups(nodes: Nodes) -> _Groups:
    stages = nodes.problem.stages
    roles = {role: index for index, role in enumerate(dict.fromkeys(stage.role for stage in stages))}
    first = [nodes.actions[numbers[0]] for numbers in nodes.lanes]
    lane = [3 * roles[stages[action.stage].role] + "FIW".index(action.kind) for action in first]
    return _Groups(np.array(lane), np.array([roles[stage.role] for stage in stages]))


def _children(elite: Rules, groups: _Groups, random: np.random.Generator) -> Rules:
    """One to three changes of an elite row, some after crossing two; a change is of one lane, stage or rank, or of all
    that are alike."""
    count, rows = len(elite.offset), POPULATION
    first = random.integers(0, count, rows)
    second = np.where(random.random(rows) < CROSSED, random.integers(0, count, rows), first)
    parts = []
    for values in (elite.offset, elite.in_flight, elite.patience):
        take = random.random((rows, values.shape[1])) < 0.5
        parts.append(np.where(take, values[first], values[second]))
    offset, in_flight, patience = parts
    for change in range(3):
        active = random.random(rows) < (1.0, 0.6, 0.3)[change]
        what = random.random(rows)
        alike = (random.random(rows) < ALIKE)[:, None]
        drawn_lane = random.integers(0, offset.shape[1], rows)[:, None]
        lanes = np.where(alike, groups.lane == groups.lane[drawn_lane], np.arange(offset.shape[1]) == drawn_lane)
        drawn_stage = random.integers(0, in_flight.shape[1], rows)[:, None]
        stages = np.where(
            alike, groups.stage == groups.stage[drawn_stage], np.arange(in_flight.shape[1]) == drawn_stage
        )
        drawn_rank = random.integers(0, patience.shape[1], rows)[:, None]
        ranks = alike | (np.arange(patience.shape[1]) == drawn_rank)
        shift = random.normal(0.0, 2.0, rows) + np.where(
            random.random(rows) < 0.15, random.choice([-_URGENT, _URGENT], rows), 0
        )
        offset += lanes * np.where(active & (what < 0.4), shift, 0.0)[:, None]
        step = np.where(active & (what >= 0.4) & (what < 0.7), random.integers(-2, 3, rows), 0)
        in_flight = np.maximum(1, in_flight + stages * step[:, None])
        drawn = np.where(random.random(rows) < 0.3, 0.0, random.random(rows) * 1.2)
        patience = np.where(ranks & (active & (what >= 0.7))[:, None], drawn[:, None], patience)
    return Rules(offset, in_flight, patience)
