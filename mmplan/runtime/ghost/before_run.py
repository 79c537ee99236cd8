"""What a plan's ranks would say of a user's own model before they train it, asked in one process.

Ranks that share layers are threads, and make the trials that a run makes (`laying.share`), of all stages at once.
"""

import copy
import math
from dataclasses import replace
from pathlib import Path

import torch

from mmplan.cost_models.build import build_graph
from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.runtime.ghost.job import Job, load_job, taken
from mmplan.runtime.ghost.job_memory import require_memory
from mmplan.runtime.ghost.laying import Laid, lay, own_buffers, share
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
    graph = build_graph(plan.scenario)
    first = taken(job, iter(job.batches(plan.microbatch_size)), max(FIRST_BATCHES, plan.dp * plan.microbatches))
    laid, recordings = lay(plan, job, graph, first)
    fewest = replace(plan, dp=plan.ep * plan.etp // math.gcd(plan.ep * plan.etp, plan.width) if plan.ep > 1 else 1)
    ranks, threads, notes = fewest.stage_ranks(0), Threads(), list[str]()

    def ask(rank: int) -> Laid:
        own = replace(laid, recorder=copy.copy(laid.recorder))  # which ranks tell what they share
        shared = tensor_ranks_of(fewest, rank, threads.groups_of(rank))
        at, stages = place_of(fewest, rank), range(len(plan.stages))
        note = notes.append if rank == ranks[0] else _nobody
        return share(fewest, graph, (own, recordings), at, stages, shared, CPU, first, note)[0]

    shared = threads.run(ranks, ask)[0]
    require_memory(plan, graph, shared.held, range(len(plan.stages)), notes.append)
    return *notes, *own_buffers(plan, shared)


def _nobody(text: str) -> None:
    """Hears what only one rank is to say."""
