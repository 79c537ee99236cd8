"""What a plan's ranks would say of a user's own model before they train it, asked in one process.

Ranks that share layers are threads, and make the trials that a run makes (`laying.share`), of all stages at once.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.graph import ComputationGraph
from mmplan.errors import InputError
from mmplan.planner.mesh import Mesh
from mmplan.planner.plan import Plan
from mmplan.planner.step_loads import part_size
from mmplan.runtime.ghost.job import Job, load_job, taken
from mmplan.runtime.ghost.job_memory import require_memory
from mmplan.runtime.ghost.laying import Laid, lay, share
from mmplan.runtime.ghost.recording import Batch, Recording
from mmplan.runtime.ghost.run_notes import own_buffers, told_parts
from mmplan.runtime.ghost.train import FIRST_BATCHES
from mmplan.runtime.groups import tensor_ranks_of
from mmplan.runtime.places import place_of
from mmplan.runtime.requirements import process_count
from mmplan.runtime.thread_group import Threads

CPU = torch.device("cpu")


def why_not_run(plan: Plan, file: Path, data: Path | None) -> tuple[str | None, tuple[str, ...]]:
    """What a run would refuse of a job, None where it runs it, and what it would note.

    Raises:
        InputError: the job cannot be loaded.
    """
    job = load_job(file, data)
    try:
        return None, ask_job(plan, job)
    except InputError as error:
        return str(error), ()


def ask_job(plan: Plan, job: Job) -> tuple[str, ...]:
    """What a run would note: what stays whole on ranks that share layers, buffers that each has its own of.

    Raises:
        InputError: what a run would refuse of the job before its first step.
    """
    process_count(plan, rehearse=False, own_model=True)
    graph, notes = build_graph(plan.scenario), list[str]()
    first = taken(job, iter(job.batches(part_size(plan))), max(FIRST_BATCHES, plan.parts * plan.microbatches))
    laid = lay(plan, job, graph, first)
    own: list[str] = []
    for mesh in dict.fromkeys(map(plan.mesh, range(len(plan.stages)))):
        stages = [stage for stage in range(len(plan.stages)) if plan.mesh(stage) == mesh]
        shared = _ask(_with_fewest(plan, mesh), graph, laid, stages, first, notes.append)
        require_memory(plan, graph, shared.held, stages, notes.append)
        own += own_buffers(plan, shared, mesh)
    return *notes, *told_parts(plan), *own


def _ask(
    plan: Plan,
    graph: ComputationGraph,
    laid: tuple[Laid, tuple[Recording, ...]],
    stages: Sequence[int],
    first: Sequence[Batch],
    note: Callable[[str], None],
) -> Laid:
    """What the ranks of some stages of one mesh share, as if they were one stage."""
    ranks, threads, (whole, recordings) = plan.stage_ranks(stages[0]), Threads(), laid

    def ask(rank: int) -> Laid:
        own = replace(whole, recorder=copy.copy(whole.recorder))  # which ranks tell what they share
        shared = tensor_ranks_of(plan, rank, threads.groups_of(rank))
        told = note if rank == ranks[0] else _nobody
        return share(plan, graph, (own, recordings), place_of(plan, rank), stages, shared, CPU, first, told)[0]

    return threads.run(ranks, ask)[0]


def _with_fewest(plan: Plan, mesh: Mesh) -> Plan:
    """The plan with as few replicas of a mesh as hold a set of experts."""
    layout = plan.layout(next(stage for stage in range(len(plan.stages)) if plan.mesh(stage) == mesh))
    sets = layout.ep * layout.etp
    dp = sets // math.gcd(sets, mesh.width) if layout.ep > 1 else 1
    if not mesh.modules:
        return replace(plan, dp=dp)
    return replace(plan, meshes=tuple(replace(one, dp=dp) if one == mesh else one for one in plan.meshes))


def _nobody(text: str) -> None:
    """Hears what only one rank is to say."""
