"""Runs in fp16 under plans of every kind, with scales that differ between modalities."""

import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from case_processes import given_to
from checkpoint_cases import JOBS, ONE_STAGE, TWO_STAGES, meshed, tiny, with_experts
from tiny_plans import hand_plan
from worker_runs import WorkerRuns

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.reschedule import refuse_unusable, with_family
from mmplan.runtime.checkpoint.options import Checkpoints
from mmplan.runtime.measurement import Measurement
from mmplan.runtime.numerics import part_scales
from mmplan.runtime.numerics.loss_scale import LossScale
from mmplan.runtime.run_options import RunOptions
from mmplan.scenario.catalogue import catalogue_device
from mmplan.scenario.scenario import Optimizer, Scenario

PROCESSES = 4
ALIKE = {"vision": 2.0**12, "audio": 2.0**12, "text": 2.0**12, "shared": 2.0**12}
UNLIKE = {"vision": 2.0**15, "audio": 2.0**14, "text": 2.0**11, "shared": 2.0**13}
LOUD = {**ALIKE, "vision": 2.0**30}
QUIET = 3  # steps after which scales grow here
STEPS = 12  # of runs that overflow at first
OVERFLOWING = ("ZeRO-2 on two stages",)


def in_16_bits(scenario: Scenario) -> Scenario:
    """On devices that have a price for it, trained by plain gradient descent, whose updates are the gradients."""
    pools = tuple(replace(pool, device=catalogue_device("h100-sxm").device) for pool in scenario.cluster.pools)
    cluster = replace(scenario.cluster, pools=pools)
    return replace(scenario, precision="fp16", optimizer=Optimizer(name="sgd", learning_rate=1.0), cluster=cluster)


def _half(plan: Plan) -> Plan:
    return replace(plan, scenario=in_16_bits(plan.scenario))


def plans() -> dict[str, Plan]:
    """Name -> plan."""
    two = hand_plan(tiny(), TWO_STAGES)
    graph, costs = build_graph(two.scenario), AnalyticCostModel(two.scenario)
    wide = hand_plan(tiny(), ONE_STAGE, dp=2)
    recomputed = tuple(replace(stage, recompute="full") for stage in wide.stages)
    found = {
        "one process": hand_plan(tiny(), ONE_STAGE),
        "two stages": two,
        "split backwards": refuse_unusable(with_family(two, "zb-h1", graph, costs)),
        "replicas": replace(wide, stages=recomputed),
        "ZeRO-1": replace(wide, sharding="optimizer"),
        "ZeRO-2 on two stages": replace(hand_plan(tiny(), TWO_STAGES, dp=2), sharding="gradients"),
        "ZeRO-3": replace(hand_plan(tiny(), ONE_STAGE, dp=4), sharding="parameters"),
        "tensor parallel, images in turn": replace(wide, tp=2, spread=("vision", "projector"), sharding="optimizer"),
        "rows in parts": replace(hand_plan(tiny(), ONE_STAGE), cp=2, tp=2),
        "vision on its own ranks": meshed(tp=2, vision=2),
        "experts": replace(hand_plan(with_experts(), ONE_STAGE, dp=2), tp=2, ep=2, etp=2),
    }
    halves = {name: _half(plan) for name, plan in found.items()}
    return {
        **halves,
        "vision in fp32": _with_wide(halves["two stages"], "vision", "projector"),
        "text in fp32, ZeRO-1": _with_wide(halves["ZeRO-1"], "llm"),
    }


def _with_wide(plan: Plan, *wide: str) -> Plan:
    """These modules in fp32, the others in fp16."""
    model = plan.scenario.model
    modules = tuple(replace(m, precision="fp32" if m.name in wide else "fp16") for m in model.modules)
    return replace(plan, scenario=replace(plan.scenario, model=replace(model, modules=modules)))


def compressed(plan: Plan) -> Plan:
    scenario = replace(plan.scenario, optimizer=Optimizer(name="sgd", learning_rate=0.05))
    return replace(plan, scenario=replace(scenario, technique=replace(scenario.technique, compression="topk")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Overflowing:
    """A run whose vision overflows, at first always; the same from its middle on, and what both said."""

    unbroken: Measurement
    resumed: Measurement
    notes: list[str]


def run_scaled_cases(rank: int, folder: str) -> None:
    """Body of one of the four processes."""
    cases = _Cases(rank, Path(folder))
    made, jobs = given_to(folder)
    cases.run("alike", made["one process"], 1, ALIKE)
    for name, plan in made.items():
        cases.run(name, plan, 1, UNLIKE)
    job = jobs["replicas"]
    cases.run("job, alike", job, 1, ALIKE, JOBS["llava"])
    for sharding in ("none", "parameters"):
        cases.run(f"job, {sharding}", replace(job, sharding=sharding), 1, UNLIKE, JOBS["llava"])
    cases.run("job, tensor parallel", jobs["tensor parallel"], 1, UNLIKE, JOBS["llava"])
    results: dict[str, object] = {name: cases.overflowing(name, made[name]) for name in OVERFLOWING}
    for quiet in (QUIET, 2 * STEPS):
        results[f"compressed, {quiet}"] = cases.run(
            f"compressed, {quiet}", compressed(made["replicas"]), STEPS, UNLIKE, quiet=quiet
        )
    torch.save(results, Path(folder) / f"rank{rank}.pt")


class _Cases:
    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._folder, self._runs = rank, folder, WorkerRuns(rank, folder)

    def overflowing(self, name: str, plan: Plan) -> Overflowing | None:
        adam = replace(plan, scenario=replace(plan.scenario, optimizer=Optimizer(name="adamw", learning_rate=1e-3)))
        notes: list[str] = []
        unbroken = self.run(f"{name}, overflowing", adam, STEPS, LOUD, every=STEPS // 2, notes=notes)
        first, again = (self._folder / f"{name}, {part}" for part in ("overflowing", "resumed"))
        if self._rank == 0:
            half = f"step-{STEPS // 2:08}"
            shutil.copytree(first / half, again / half)
        resumed = self.run(f"{name}, resumed", adam, STEPS, LOUD, resume=True)
        return Overflowing(unbroken=unbroken, resumed=resumed, notes=notes) if unbroken and resumed else None

    def run(
        self,
        name: str,
        plan: Plan,
        steps: int,
        scales: dict[str, float],
        job: Path | None = None,
        *,
        every: int | None = None,
        resume: bool = False,
        notes: list[str] | None = None,
        quiet: int = QUIET,
    ) -> Measurement | None:
        folder = self._folder / name
        if self._rank < plan.rank_count:
            folder.mkdir(exist_ok=True)
        checkpoints = Checkpoints(folder=folder, every=every, resume=folder if resume else None, keep=3)
        options = RunOptions(steps=steps, timeout_s=60.0, job=job, checkpoints=checkpoints, max_skips=steps)
        with ExitStack() as stack:
            stack.enter_context(patch("mmplan.runtime.loss_scaling.part_scales", _begun_with(scales, quiet)))
            return self._runs.run(plan, options, None if notes is None else notes.append)


def _begun_with(scales: dict[str, float], quiet: int) -> object:
    rule = replace(part_scales.ScaleRule(), growth_interval=quiet)
    return lambda parts: part_scales.PartScales({part: LossScale(scale=scales[part]) for part in parts}, rule)
