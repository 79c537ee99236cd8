"""V-shaped families on two chunks per rank with less memory than 1F1B: V-Half, V-Min.

Rank r holds stage r and stage 2p - 1 - r. The sum of a building block's four hops sets the memory (Qi et al., arXiv
2405.15362, section 4): 6 gives half of that of 1F1B and one microbatch (V-Half), 4 a third and one (V-Min). With the
problem's own seconds a block is used in two ways: in its own order, W moved into gaps, and as priorities of list
scheduling with its numbers of microbatches in flight. Blocks are compared on few microbatches, and the best ones are
made for all; the one with the shortest span is kept.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mmplan.errors import CheckError
from mmplan.planner.schedule import Schedule
from mmplan.planner.schedules.evaluate import evaluate, fits
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem, StageWork
from mmplan.planner.schedules.search.listing import Lister, Rules
from mmplan.planner.schedules.search.nodes import build_nodes
from mmplan.planner.schedules.v_blocks import PERIOD, Block, blocks, rank_order
from mmplan.planner.schedules.weight_filling import fill_with_weights

_TRIED = 24  # blocks of least latency that are compared
_KEPT = 2  # of either use, made for all microbatches
_GAPS = (0.25, 0.5, 1.0)  # parts of a W that fill a gap
_PATIENCE = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0)  # see `Rules`
_LAST = 1000.0  # microbatches behind which W comes
_MORE = 1.5  # microbatches beyond the part of 1F1B's memory: one, and a chunk because blocks are whole units

_Rule = tuple[Block, float]  # block, patience


def v_half(problem: ScheduleProblem) -> Schedule | NotApplicable:
    return _v_schedule(problem, 6)


def v_min(problem: ScheduleProblem) -> Schedule | NotApplicable:
    return _v_schedule(problem, 4)


def v_shaped(problem: ScheduleProblem) -> NotApplicable | None:
    """None for a chain of two chunks per rank that goes down and up the ranks."""
    p = problem.ranks
    places = [*range(p), *reversed(range(p))]
    if [stage.rank for stage in problem.stages] != places or not problem.is_chain():
        return NotApplicable("it needs a chain of two chunks per rank, laid down and up the ranks")
    if not all(stage.has_backward for stage in problem.stages):
        return NotApplicable("some stage has no backward")
    return None


def filled(problem: ScheduleProblem, schedule: Schedule) -> Schedule:
    """The order, or the one with W moved into gaps, whichever spans less within memory."""
    best, best_s = schedule, evaluate(problem, schedule).span_s
    for least_part in _GAPS:
        try:
            moved = fill_with_weights(problem, schedule, least_part)
        except CheckError:
            continue
        span_s = evaluate(problem, moved).span_s
        if span_s < best_s:
            best, best_s = moved, span_s
    return best


def _v_schedule(problem: ScheduleProblem, hops: int) -> Schedule | NotApplicable:
    wrong = v_shaped(problem)
    if wrong is not None:
        return wrong
    limited = replace(problem, capacity=_limits(problem, hops))
    few = _shortened(limited, 3 * problem.ranks)
    tried = sorted(blocks(problem.ranks, hops), key=lambda block: (max(block.starts), block.starts, block.hops))[
        :_TRIED
    ]
    ordered = sorted(tried, key=lambda block: evaluate(few, _in_order(few, block)).span_s)[:_KEPT]
    made = [filled(limited, _in_order(limited, block)) for block in ordered]
    made += [schedule for _, schedule in _listed(limited, [rule for rule, _ in _listed(few, _rules(tried))[:_KEPT]])]
    fitting = [schedule for schedule in made if fits(limited, schedule)]
    if not fitting:
        return NotApplicable("no building block of this family fits the ranks and their memory")
    return min(fitting, key=lambda schedule: evaluate(problem, schedule).span_s)


def _limits(problem: ScheduleProblem, hops: int) -> tuple[float, ...]:
    """What the family may hold on each rank, within its capacity."""
    limits = []
    for rank, capacity in enumerate(problem.capacity):
        whole = sum(max(problem.stages[stage].held, default=0.0) for stage in problem.stages_of(rank))
        limits.append(min(capacity, whole * (hops * problem.ranks / (2 * PERIOD) + _MORE)))
    return tuple(limits)


def _shortened(problem: ScheduleProblem, most: int) -> ScheduleProblem:
    """The problem of the first microbatches alone."""
    count = min(most, problem.microbatches)

    def short(stage: StageWork) -> StageWork:
        names = ("forward_s", "input_s", "weight_s", "held")
        return replace(stage, **{name: getattr(stage, name)[:count] for name in names})

    return replace(problem, stages=tuple(map(short, problem.stages)), microbatches=count)


def _in_order(problem: ScheduleProblem, block: Block) -> Schedule:
    return tuple(rank_order(problem, block, rank) for rank in range(problem.ranks))


def _rules(tried: Sequence[Block]) -> list[_Rule]:
    return [(block, patience) for block in tried for patience in _PATIENCE]


def _listed(problem: ScheduleProblem, rules: Sequence[_Rule]) -> list[tuple[_Rule, Schedule]]:
    """Schedules by blocks as priorities, best first; those that run into the memory of a rank are left out."""
    if not rules:
        return []
    nodes, p = build_nodes(problem, spans=True), problem.ranks
    offset = np.full((len(rules), len(nodes.lanes)), _LAST)
    in_flight = np.ones((len(rules), 2 * p), dtype=int)
    for row, (block, _) in enumerate(rules):
        for rank in range(p):
            f0, f1, i1, i0 = block.at(rank)
            in_flight[row, rank], in_flight[row, 2 * p - 1 - rank] = (
                -(-(i0 + 1 - f0) // PERIOD),
                -(-(i1 + 1 - f1) // PERIOD),
            )
        for lane, numbers in enumerate(nodes.lanes):
            first = nodes.actions[numbers[0]]
            if first.kind != "W":
                units = block.at(problem.stages[first.stage].rank)
                unit = units[0 if first.kind == "F" else 3] if first.stage < p else units[1 if first.kind == "F" else 2]
                offset[row, lane] = unit / PERIOD
    patience = np.array([[patience] * p for _, patience in rules])
    listed = Lister(nodes).run(Rules(offset, in_flight, patience))
    best = [row for row in np.argsort(listed.makespan_s, kind="stable") if np.isfinite(listed.makespan_s[row])]
    return [(rules[row], nodes.schedule(listed.orders(row))) for row in best[:_KEPT]]
