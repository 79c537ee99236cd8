"""Runs that save and go on under plans of every kind, and the code that four processes run them by."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from case_processes import given_to
from tiny_plans import hand_plan, tiny_scenario
from worker_runs import WorkerRuns

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.mesh import Mesh
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.reschedule import refuse_unusable, with_family
from mmplan.runtime.checkpoint.options import Checkpoints
from mmplan.runtime.measurement import Measurement
from mmplan.runtime.run_options import RunOptions
from mmplan.scenario.scenario import ModelModule, Moe, Optimizer, Scenario, Training
from mmplan.scenario.technique import Compression, Sharding

PROCESSES = 4
JOBS = {name: Path(__file__).parent / f"{name}_job.py" for name in ("llava", "dropout")}
TWO_STAGES = (
    ("vision.embed", "vision.0", "projector.0", "audio.embed", "audio.0", "audio_projector.0", "llm.embed"),
    ("llm.0-1", "llm.head", "llm.loss"),
)
ONE_STAGE = (tuple(layer for stage in TWO_STAGES for layer in stage),)
LLAVA_TWO_STAGES = (
    ("vision.embed", "vision.0-1", "projector.0", "llm.embed", "llm.0"),
    ("llm.1-2", "llm.head", "llm.loss"),
)
LLAVA_ONE_STAGE = (tuple(layer for stage in LLAVA_TWO_STAGES for layer in stage),)


def tiny(**changes: ModelModule) -> Scenario:
    """The tiny scenario with fewer blocks, trained by AdamW, and with some modules in place of its own."""
    scenario = replace(tiny_scenario(), global_batch=4, optimizer=Optimizer(name="adamw", learning_rate=1e-3))
    modules = tuple(changes.get(module.name, module) for module in map(_short, scenario.model.modules))
    return replace(scenario, model=replace(scenario.model, modules=modules))


def _short(module: ModelModule) -> ModelModule:
    blocks = 2 if module.kind == "language_model" else 1
    return replace(module, transformer=module.transformer and replace(module.transformer, layers=blocks))


def with_experts() -> Scenario:
    """Its language model has four experts."""
    llm = tiny().model.module("llm")
    assert llm.transformer is not None
    return tiny(llm=replace(llm, transformer=replace(llm.transformer, moe=Moe(experts=4, topk=2, expert_ffn=48))))


def saved_plans() -> dict[str, Plan]:
    """Name -> plan that saves and goes on under itself."""
    model = tiny().model
    vision, llm = model.module("vision"), model.module("llm")
    assert vision.transformer is not None and llm.transformer is not None and llm.vocabulary is not None
    adapted = replace(llm, training=Training(mode="lora", rank=4, targets=("q", "v", "down")))
    frozen = tiny(vision=replace(vision, training=Training(mode="frozen")), llm=adapted)
    experts = with_experts()
    # Numbers of parameters that replicas cannot share equally, and a matrix that two layers have.
    odd = tiny(
        vision=replace(vision, transformer=replace(vision.transformer, ffn=255)),
        llm=replace(llm, vocabulary=replace(llm.vocabulary, tied=True)),
    )
    two = hand_plan(tiny(), TWO_STAGES)
    chunks = with_family(two, "interleaved", build_graph(two.scenario), AnalyticCostModel(two.scenario))
    half = hand_plan(tiny(), TWO_STAGES, dp=2)
    half = replace(half, scenario=replace(half.scenario, precision="bf16"))  # which this device has no price for
    return {
        "two chunks on a rank": refuse_unusable(chunks),
        "experts over replicas, each over tp": replace(hand_plan(experts, ONE_STAGE, dp=2), tp=2, ep=2, etp=2),
        "experts over ranks, ZeRO-3": replace(hand_plan(experts, ONE_STAGE, dp=4), ep=2, sharding="parameters"),
        "ZeRO-1, odd": replace(hand_plan(odd, ONE_STAGE, dp=2), sharding="optimizer"),
        "ZeRO-2 on two stages, in 16 bits": replace(half, sharding="gradients"),
        "ZeRO-3, frozen and LoRA": replace(hand_plan(frozen, ONE_STAGE, dp=4), sharding="parameters"),
        "tensor parallel, experts": replace(hand_plan(experts, TWO_STAGES), tp=2),
        "images in turn, ZeRO-2": replace(
            hand_plan(tiny(), ONE_STAGE, dp=2), tp=2, spread=("vision", "projector"), sharding="gradients"
        ),
        "a table on two stages, ZeRO-3": replace(hand_plan(odd, TWO_STAGES, dp=2), sharding="parameters"),
        "a table on two stages, compressed": compressed(hand_plan(odd, TWO_STAGES, dp=2), "topk"),
        "compressed on two stages": compressed(hand_plan(tiny(), TWO_STAGES, dp=2), "topk"),
        "compressed, images in turn": compressed(
            replace(hand_plan(tiny(), ONE_STAGE, dp=2), tp=2, spread=("vision", "projector")), "fp8"
        ),
        "tensor parallel, ZeRO-3": replace(hand_plan(odd, ONE_STAGE, dp=2), tp=2, sharding="parameters"),
    }


def compressed(plan: Plan, compression: Compression) -> Plan:
    """Whose replicas send few bytes of their gradients."""
    technique = replace(plan.scenario.technique, compression=compression)
    return replace(plan, scenario=replace(plan.scenario, technique=technique))


def moved_plans() -> list[Plan]:
    """Each goes on from what the one before has saved; the first ones keep nothing twice."""
    one = hand_plan(tiny(), ONE_STAGE)
    two = hand_plan(tiny(), TWO_STAGES)
    chunks = with_family(two, "interleaved", build_graph(two.scenario), AnalyticCostModel(two.scenario))
    recomputed = hand_plan(tiny(), TWO_STAGES, dp=2)
    stages = tuple(replace(stage, recompute="full") for stage in recomputed.stages)
    return [
        one,
        refuse_unusable(chunks),
        two,
        replace(hand_plan(tiny(), ONE_STAGE, dp=4), sharding="parameters"),
        replace(recomputed, sharding="optimizer", stages=stages),
        replace(hand_plan(tiny(), ONE_STAGE, dp=2), tp=2, sharding="parameters"),
        replace(hand_plan(tiny(), TWO_STAGES, microbatch_size=2), tp=2),
        replace(hand_plan(tiny(), ONE_STAGE), tp=4),  # two key heads, each on two ranks
        replace(hand_plan(tiny(), ONE_STAGE, dp=2), cp=2, sharding="optimizer"),
        replace(hand_plan(tiny(), ONE_STAGE), cp=2, tp=2),
        meshed(tp=2, vision=2),
        meshed(dp=2, vision=1, sharding="parameters"),
        replace(hand_plan(tiny(), ONE_STAGE, dp=4), sharding="gradients"),
        one,
    ]


def meshed(*, vision: int, tp: int = 1, dp: int = 1, sharding: Sharding = "none") -> Plan:
    """Vision on as many replicas of its own, the rest on tp x dp ranks."""
    sight = ("vision.embed", "vision.0", "projector.0")
    rest = tuple(layer for layer in ONE_STAGE[0] if layer not in sight)
    plan = hand_plan(tiny(), (sight, rest), dp=dp, microbatch_size=2 // dp)
    mesh = Mesh(modules=("vision", "projector"), tp=1, dp=vision, first_rank=tp * dp)
    return replace(plan, tp=tp, sharding=sharding, meshes=(mesh,))


def moved_experts() -> list[Plan]:
    """The same of a model with experts."""
    one, wide = hand_plan(with_experts(), ONE_STAGE), hand_plan(with_experts(), ONE_STAGE, dp=2)
    return [
        one,
        replace(wide, tp=2, ep=4),
        replace(wide, tp=2, ep=2, etp=2, sharding="optimizer"),
        replace(hand_plan(with_experts(), ONE_STAGE, dp=4), ep=2, sharding="parameters"),
        one,
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """A run without a break, and the second half of one that went on from its middle."""

    unbroken: Measurement
    resumed: Measurement


def run_checkpoint_cases(rank: int, folder: str) -> None:
    """Body of one of the four processes; rank 0 writes what was measured to `folder`."""
    runs = _Runs(rank, Path(folder))
    results: dict[str, object] = {}
    # Made once, because that takes longer than a run.
    saved, moved, experts, jobs = given_to(folder)
    for name, plan in saved.items():
        results[name] = runs.saved(name, plan)
    results["moved"], results["moved experts"] = runs.moved("moved", moved), runs.moved("moved experts", experts)
    results |= {f"job {name}": runs.saved(f"job {name}", jobs[0], job) for name, job in JOBS.items()}
    results["moved job"] = runs.moved_job(jobs[:-1])
    results["job compressed"] = runs.saved("job compressed", jobs[-1], JOBS["llava"])
    torch.save(results, Path(folder) / f"rank{rank}.pt")


class _Runs:
    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._folder, self._runs = rank, folder, WorkerRuns(rank, folder)

    def saved(self, name: str, plan: Plan, job: Path | None = None) -> Continued | None:
        """Three steps with checkpoints behind the second and the last, and the last one again."""
        first, again = (self._folder / f"{name}, {part}" for part in ("unbroken", "resumed"))
        unbroken = self._run(plan, 3, Checkpoints(folder=first, every=2), job)
        if self._rank == 0:
            shutil.copytree(first / "step-00000002", again / "step-00000002")
        resumed = self._run(plan, 3, Checkpoints(folder=again, resume=again), job)
        return Continued(unbroken=unbroken, resumed=resumed) if unbroken and resumed else None

    def moved(self, name: str, plans: list[Plan]) -> list[Measurement | None]:
        """All steps under the first plan; then a step under each plan in turn, starting anew."""
        folder = self._folder / name
        runs = [self._run(plans[0], len(plans), Checkpoints())]
        for step, plan in enumerate(plans, start=1):
            runs.append(self._run(plan, step, Checkpoints(folder=folder, resume=folder)))
        return runs

    def moved_job(self, plans: list[Plan]) -> list[Measurement | None]:
        """The fourth step of a job under its own plan and under four other ones, and its weights saved by each; by the
        second once more, without a step."""
        runs = []
        if self._rank == 0:
            ready = self._folder / "job llava, unbroken"
            for part in ("ZeRO-3", "split", "rows"):
                shutil.copytree(ready, self._folder / f"job llava, {part}", dirs_exist_ok=True)  # others may be here
        for part, plan in zip(("unbroken", "resumed", "ZeRO-3", "split", "rows"), plans, strict=True):
            folder = self._folder / f"job llava, {part}"
            going_on = Checkpoints(folder=folder, resume=folder)
            runs.append(self._run(plan, 4, going_on, JOBS["llava"], self._folder / f"{part} weights"))
        resumed = self._folder / "job llava, resumed"
        going_on = Checkpoints(folder=resumed, resume=resumed)
        assert self._run(plans[1], 4, going_on, JOBS["llava"], self._folder / "same weights") is None
        return runs

    def _run(
        self,
        plan: Plan,
        steps: int,
        checkpoints: Checkpoints,
        job: Path | None = None,
        save_weights: Path | None = None,
    ) -> Measurement | None:
        if checkpoints.folder is not None and self._rank < plan.rank_count:
            checkpoints.folder.mkdir(exist_ok=True)
        options = RunOptions(steps=steps, timeout_s=60.0, job=job, save_weights=save_weights, checkpoints=checkpoints)
        return self._runs.run(plan, options)
