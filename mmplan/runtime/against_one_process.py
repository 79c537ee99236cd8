"""A plan held against one process: the loss of its first step and every gradient, for built-in models and jobs.

The one process runs the model as its authors do, whole and without any of the plan's parallelism, on all samples of the
step. Each rank of the plan is a process here that takes its first step.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from mmplan.cost_models.build import build_graph
from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.planner.step_loads import part_size
from mmplan.runtime.first_gradients import GradientPart, by_long_steps
from mmplan.runtime.ghost.job import Job, load_job, taken
from mmplan.runtime.ghost.laying import cast_batch
from mmplan.runtime.ghost.recording import loss_of
from mmplan.runtime.ghost.weightless import build_weightless, initial_value
from mmplan.runtime.gradient_differences import Comparison, Difference
from mmplan.runtime.launch import execute
from mmplan.runtime.measurement import OnNote
from mmplan.runtime.model import MultimodalModel
from mmplan.runtime.places import Place, mesh_of_row
from mmplan.runtime.requirements import process_count
from mmplan.runtime.train import step_data, step_microbatches

CPU = torch.device("cpu")
Whole = tuple[dict[str, Tensor], dict[str, float]]  # gradients, and losses by module


def compare_with_one_process(
    plan: Plan, job: Path | None = None, data: Path | None = None, on_note: OnNote | None = None
) -> Comparison:
    """The first step of the plan, its ranks as processes of this machine, and of one process.

    Raises:
        InputError: the plan cannot be run, or changes gradients on purpose.
        RunError: a rank failed.
    """
    if plan.scenario.technique.compression != "none":
        raise InputError(
            f"the plan compresses gradients ({plan.scenario.technique.compression}): they are not those of one process "
            "by intention; set `constraints.compression: none` and optimize again"
        )
    plan = by_long_steps(plan)
    count = process_count(plan, rehearse=False, own_model=job is not None)
    with TemporaryDirectory(prefix="mmplan-gradients-") as name:
        folder = Path(name)
        run = execute(plan, local=count, steps=1, job=job, data=data, gradients=folder, on_note=on_note)
        assert run is not None, "a local run is measured here"
        saved = [torch.load(path, weights_only=False) for path in sorted(folder.iterdir())]
    expected, losses = _whole_model(plan) if job is None else _whole_job(plan, load_job(job, data))
    parts: list[GradientPart] = [part for own, _ in saved for part in own]
    trained: set[str] = {name for _, names in saved for name in names}
    return Comparison(
        processes=count,
        loss=sum(run.steps[0].losses.values()),
        loss_in_one=sum(losses.values()),
        differences=differences(parts, expected, trained),
        missing=missing(parts, expected, trained),
    )


def differences(parts: list[GradientPart], expected: Mapping[str, Tensor], trained: set[str]) -> tuple[Difference, ...]:
    """Of what ranks have of gradients, from those of one process; the largest first. What is not trained is to have
    none."""
    least = max((float(expected[name].abs().max()) for name in expected.keys() & trained), default=0.0) / 1000
    found: dict[str, float] = {}
    for part in parts:
        if part.name not in trained:
            whole = torch.zeros_like(part.values)
        elif part.name in expected:
            at = zip(part.offset, part.values.shape, strict=True)
            whole = expected[part.name][tuple(slice(first, first + size) for first, size in at)]
        else:  # no loss depends on it
            whole = torch.zeros_like(part.values)
        scale = max(least, float(expected[part.name].abs().max()) if part.name in expected else 0.0)
        error = float((part.values - whole).abs().max()) if part.values.numel() else 0.0
        relative = error / scale if scale else float(error > 0)
        found[part.name] = max(found.get(part.name, 0.0), relative if relative == relative else float("inf"))
    ordered = sorted(found.items(), key=lambda each: -each[1])
    return tuple(
        Difference(parameter=name, relative=relative) for name, relative in ordered if name in trained or relative
    )


def missing(parts: list[GradientPart], expected: Mapping[str, Tensor], trained: set[str]) -> tuple[str, ...]:
    """Trained parameters of which no ranks have some elements."""
    seen = Counter[str]()
    for part in parts:
        seen[part.name] += part.values.numel()
    return tuple(name for name in expected if name in trained and seen[name] < expected[name].numel())


def _whole_model(plan: Plan) -> Whole:
    """Of the scenario's own model on all microbatches of all replicas."""
    graph = build_graph(plan.scenario)
    model = MultimodalModel(graph.layers(), graph, precision="fp32", seed=plan.scenario.seed, device=CPU)
    data, losses = step_data(plan, 0), dict[str, float]()
    raw_modules = [module.name for module in plan.scenario.model.modules if module.projector is None]
    for replica in range(mesh_of_row(plan, 0).dp):
        for batch in step_microbatches(plan, data, Place(0, replica, 0), raw_modules, CPU):
            parts = model(batch)
            torch.stack(list(parts.values())).sum().backward()  # type: ignore[no-untyped-call]
            for module, loss in parts.items():
                losses[module] = losses.get(module, 0.0) + float(loss.detach())
    gradients: dict[str, Tensor] = {}
    named = ((layer.id, *each) for layer in graph.layers() for each in model.layer(layer.id).named_parameters())
    for layer, name, parameter in named:
        if parameter.grad is not None:
            gradients[f"{layer}/{name}"] = parameter.grad  # as ranks name them
    return gradients, losses


def _whole_job(plan: Plan, job: Job) -> Whole:
    """Of the job's model, which begins with the values of a run without weights."""
    model, bare = job.model(), build_weightless(job.model, plan.scenario.seed)
    for name, parameter in model.named_parameters():
        parameter.data = initial_value(name, bare.get_parameter(name), plan.scenario.seed, torch.float32)
    batches = taken(job, iter(job.batches(part_size(plan))), plan.parts * plan.microbatches)
    weights, total = [job.weight(batch) for batch in batches], 0.0
    for batch, weight in zip(batches, weights, strict=True):
        loss = loss_of(model(**cast_batch(batch, torch.float32))) * (weight / sum(weights))
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, {"": total}
