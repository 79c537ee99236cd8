"""Families by one rule of list scheduling, on any DAG with any number of stages per rank.

Depth first: a rank prefers what is nearest to an end, input gradients before forwards. Encoders ahead: encoders run
their forwards as early as memory allows and their backwards last, in front of a backbone in 1F1B order. Encoders in
bubbles: a rank takes encoder work, forward and backward, only where the backbone would leave it idle, in pieces as
small as its stages are (Optimus, Feng et al., arXiv 2408.03505, moves encoder kernels into the bubbles of the LLM).
Weight gradients come where a rank would wait; a stage that is frozen has none.
"""

import numpy as np

from mmplan.planner.schedule import Schedule
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem
from mmplan.planner.schedules.search.listing import Lister, Rules
from mmplan.planner.schedules.search.nodes import build_nodes

_CLASS = 1e4  # between classes of urgency, far above any microbatch index


def depth_first(problem: ScheduleProblem) -> Schedule | NotApplicable:
    depths = problem.depths()
    order = sorted(range(len(problem.stages)), key=lambda stage: (depths[stage], -stage))
    place = {stage: index for index, stage in enumerate(order)}
    urgency = {("I", stage): place[stage] for stage in order}
    urgency |= {("F", stage): len(order) + place[stage] for stage in order}
    return _listed(problem, urgency, list(depths))


def encoders_ahead(problem: ScheduleProblem) -> Schedule | NotApplicable:
    missing = _encoders_or_reason(problem)
    if missing is not None:
        return missing
    urgency, limits = {}, []
    for stage, (work, depth) in enumerate(zip(problem.stages, problem.depths(), strict=True)):
        encoder = work.role == "encoder"
        urgency["F", stage] = 0 if encoder else 2
        urgency["I", stage] = 3 if encoder else 1
        limits.append(problem.microbatches if encoder else depth)
    return _listed(problem, urgency, limits)


def encoders_in_bubbles(problem: ScheduleProblem) -> Schedule | NotApplicable:
    missing = _encoders_or_reason(problem)
    if missing is not None:
        return missing
    urgency, limits = {}, []
    for stage, (work, depth) in enumerate(zip(problem.stages, problem.depths(), strict=True)):
        encoder = work.role == "encoder"
        urgency["F", stage] = 2 if encoder else 1
        urgency["I", stage] = 3 if encoder else 0
        limits.append(problem.microbatches if encoder else depth)
    return _listed(problem, urgency, limits)


def _encoders_or_reason(problem: ScheduleProblem) -> NotApplicable | None:
    roles = {stage.role for stage in problem.stages}
    return None if {"encoder", "backbone"} <= roles else NotApplicable("no stage holds an encoder alone")


def _listed(
    problem: ScheduleProblem, urgency: dict[tuple[str, int], int], limits: list[int]
) -> Schedule | NotApplicable:
    """Args: urgency: class of each (kind, stage), least first, W last of all; limits: microbatches in flight."""
    nodes = build_nodes(problem)
    offset = np.zeros((1, len(nodes.lanes)))
    for lane, numbers in enumerate(nodes.lanes):
        first = nodes.actions[numbers[0]]
        offset[0, lane] = _CLASS * urgency.get((first.kind, first.stage), len(urgency))
    rules = Rules(offset, np.array([limits]), np.zeros((1, problem.ranks)))
    listed = Lister(nodes).run(rules)
    if not np.isfinite(listed.makespan_s[0]):
        return NotApplicable("its rule runs into the memory of a rank")
    return nodes.schedule(listed.orders(0))
