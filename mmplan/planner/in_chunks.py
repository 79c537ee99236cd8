"""After the proof: the plan's degrees with two chunks of layers per rank, where simulation prefers that.

Schedules of two chunks, V-shaped ones above all, have no closed form that their steps reach, so they are no part of
the search. The layers are cut anew, tried under each of them, and the fastest plan within memory is kept if it saves
enough. What is proved beside it holds for every cut of every configuration, with any number of chunks and under any
schedule: some rank has the mean of the work.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layout import RECOMPUTE_LEVELS
from mmplan.planner.plan import ChunkCertificate, Plan, ScheduleCertificate
from mmplan.planner.plan_schedule import plan_schedule
from mmplan.planner.schedules.chunks import chunked_plan
from mmplan.planner.schedules.evaluate import evaluate
from mmplan.planner.schedules.plan_problem import plan_problem
from mmplan.planner.schedules.problem import NotApplicable
from mmplan.planner.schedules.reschedule import CHUNKS, LOOPED, V_SHAPED, WORTH, optimized, with_family
from mmplan.planner.simulate import simulate
from mmplan.planner.stage_graph import build_stage_graph

# Forwards (stages x microbatches): each costs about a millisecond under all families.
MOST_FORWARDS = 3_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a search for orders may do, see `best_schedule`."""

    search_s: float
    seed: int
    stop: Callable[[], bool]


def worth_chunks(plan: Plan) -> bool:
    """Whether chunks may be tried: nothing that the user says is against them, and the program is small."""
    rules = plan.scenario.constraints
    free = not rules.schedule and rules.modules == () and (not rules.vp or CHUNKS in rules.vp)
    small = plan.pp * CHUNKS * plan.microbatches <= MOST_FORWARDS
    return free and small and plan.pp > 1 and not plan.placement and plan.batch_factor == 1


def in_chunks(
    cut: Plan, scheduled: Plan, graph: ComputationGraph, costs: CostModel, *, floor_s: float, work: Work
) -> Plan:
    """The faster of a plan with one chunk per rank and the same degrees in chunks.

    Args:
        cut: the plan under 1F1B, of which the certificate speaks; `scheduled` is it under its best schedule.
        floor_s: no plan takes less, whatever its schedule.
    """
    found = min(_under_families(cut, graph, costs), key=lambda one: one.certificate.objective_s, default=None)
    if found is None:
        return scheduled
    most_s = simulate(scheduled, graph, costs).step_time_s * (1 - WORTH)
    step_s = simulate(found, graph, costs).step_time_s
    if step_s >= most_s:
        return scheduled
    best, step_s = _searched(found, step_s, graph, costs, work)
    floor_s = min(floor_s, step_s)
    gap = (step_s - floor_s) / step_s if step_s > 0 else 0.0
    proof = ChunkCertificate(stages=cut.stages, step_s=step_s, bound_s=floor_s, gap=gap)
    return replace(best, certificate=cut.certificate, chunk_certificate=proof)


def _under_families(cut: Plan, graph: ComputationGraph, costs: CostModel) -> Iterator[Plan]:
    """The degrees of a plan under every schedule of several chunks that fits; all chunks recompute alike, at the first
    level of the plan's stages at which one does."""
    levels = dict.fromkeys(sorted((stage.recompute for stage in cut.stages), key=RECOMPUTE_LEVELS.index))
    for names, v_shaped in ((LOOPED, False), (V_SHAPED, True)):
        for level in levels:
            alike = replace(cut, stages=tuple(replace(stage, recompute=level) for stage in cut.stages))
            chunked = chunked_plan(alike, graph, costs, CHUNKS, v_shaped=v_shaped)
            if isinstance(chunked, NotApplicable):
                continue
            choices = [with_family(chunked, name, graph, costs) for name in names]
            fitting = [choice.plan for choice in choices if choice.plan is not None and choice.fits]
            yield from fitting
            if fitting:
                break


def _searched(plan: Plan, step_s: float, graph: ComputationGraph, costs: CostModel, work: Work) -> tuple[Plan, float]:
    """The plan with better orders where a search finds some, with what it proves of the orders of these stages; and its
    step."""
    searched = optimized(plan, graph, costs, search_s=work.search_s, seed=work.seed, stop=work.stop)
    proof, searched_s = searched.schedule_certificate, simulate(searched, graph, costs).step_time_s
    assert proof is not None
    if searched_s < step_s * (1 - WORTH):
        return searched, searched_s
    return replace(plan, schedule_certificate=_of_family(plan, proof, graph, costs)), step_s


def _of_family(
    plan: Plan, found: ScheduleCertificate, graph: ComputationGraph, costs: CostModel
) -> ScheduleCertificate:
    """What a search that found nothing better proved of the orders of a family."""
    stages = build_stage_graph([stage.layers for stage in plan.stages], graph)
    makespan_s = evaluate(plan_problem(plan, graph, costs), plan_schedule(plan, stages)).makespan_s
    gap = (makespan_s - found.bound_s) / makespan_s if makespan_s > 0 else 0.0
    return replace(found, makespan_s=makespan_s, gap=gap, method=plan.schedule)
