"""Fifty steps of a real model under plans of two processes, and in a plain loop of one that knows nothing of mmplan."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from case_processes import given_to, meeting
from ghost_models import llava, saved_config
from job_plan_cases import cut
from llava_job import batches
from tiny_plans import tiny_scenario

from mmplan.planner.plan import Plan
from mmplan.runtime.clock import WallClock
from mmplan.runtime.executor import run_step
from mmplan.runtime.ghost.job import load_job
from mmplan.runtime.ghost.train import JobGroups, prepare_job
from mmplan.runtime.ghost.weightless import build_weightless, initial_value
from mmplan.runtime.groups import group_maker, replica_group, tensor_ranks
from mmplan.scenario.formats.hf_config import read_hf_config
from mmplan.scenario.scenario import Optimizer

JOB = Path(__file__).parent / "llava_job.py"
PROCESSES, STEPS, MICROBATCHES = 2, 50, 2
LEARNING_RATE = 0.1
CPU = torch.device("cpu")


def curve_plans(folder: Path) -> dict[str, Plan]:
    config = read_hf_config(saved_config(llava()[0](), folder))
    optimizer = Optimizer(name="sgd", learning_rate=LEARNING_RATE)
    scenario = replace(tiny_scenario(), model=config, global_batch=MICROBATCHES, optimizer=optimizer)
    return {
        "two stages": cut(scenario, "llm.0"),
        "two tensor-parallel ranks": cut(scenario, tp=2),
        "rows on two context-parallel ranks": cut(scenario, cp=2),
    }


def curve_of_a_plain_loop(seed: int) -> list[float]:
    """Losses of the model as its authors train it, from the values that a run begins with."""
    job = load_job(JOB)
    model, bare = job.model(), build_weightless(job.model, seed)
    for name, parameter in model.named_parameters():
        parameter.data = initial_value(name, bare.get_parameter(name), seed, torch.float32)
    optimizer, stream, losses = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), batches(1), list[float]()
    for _ in range(STEPS):
        step = list(islice(stream, MICROBATCHES))
        labels = [float((batch["labels"][:, 1:] != -100).sum()) for batch in step]
        optimizer.zero_grad()
        parts = [model(**batch).loss * (count / sum(labels)) for batch, count in zip(step, labels, strict=True)]
        total = torch.stack(parts).sum()
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
    return losses


def curve_on_rank(plan: Plan, rank: int, control: dist.ProcessGroup) -> list[float]:
    """What this rank adds to the losses."""
    timeout = timedelta(seconds=90)
    groups = JobGroups(
        replicas=replica_group(plan, rank, "gloo", timeout),
        tensor=tensor_ranks(plan, rank, "gloo", timeout),
        more=group_maker(rank, "gloo", timeout),
    )
    prepared = prepare_job(plan, load_job(JOB), rank, CPU, groups, lambda text: None)
    losses = []
    for step in range(STEPS):
        program, stages = prepared.step(step)
        clock = WallClock(control, one_host=True)
        clock.start()
        run_step(program, stages, device=CPU, clock=clock)
        told: list[Mapping[str, float]] = [stage.losses() for stage in stages.values()]
        first = groups.tensor is None or groups.tensor.index == 0  # tensor-parallel ranks have the same loss
        losses.append(sum(loss for one in told for loss in one.values()) if first else 0.0)
    return losses


def run_curves(rank: int, folder: str) -> None:
    """Body of one of the processes, which get the plans."""
    with meeting(rank, folder, PROCESSES, timeout_s=90.0) as results:
        world = dist.new_group(range(PROCESSES))
        results |= {name: curve_on_rank(plan, rank, world) for name, plan in given_to(folder).items()}
