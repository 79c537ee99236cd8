"""The numbers a plan is judged by, gathered once for tables, pages and JSON."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmplan.errors import InputError
from mmplan.planner.interval import StepInterval, plan_interval
from mmplan.planner.mesh import Mesh
from mmplan.planner.overlap import overlap_rate
from mmplan.planner.plan import Plan
from mmplan.planner.plan_cost import cost_of, tokens_of
from mmplan.planner.prediction import Prediction, TimedAction


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSummary:
    """One plan in one column of `mmplan compare`.

    `step_time_s` is simulated and lies between `step_time_p10_s` and `step_time_p90_s` in 8 of 10 cases; under any
    schedule no mean step of the space searched takes less than `any_schedule_s`, to which it has `any_schedule_gap`
    (None where that is not known). `objective_s` is the closed form that the search minimises and `bound_s` bounds.
    Bytes are those of all ranks in one step: `stage_bytes` sent between stages, `gradient_stage_bytes` of these as
    gradients, `reduce_bytes` of gradient buffers.
    `overlap_rate`: time in which a rank computes and communicates at once, over the time it communicates (1 when it
    never communicates). `recompute` is that of each stage; `schedule_gap`: by what part of its makespan a searched
    schedule can be longer than the best of this cut; for `sharding`, `spread`, `patches`, `together` and
    `batch_factor` see `Layout`, for `prefetch` see `Plan`.
    `meshes` has a text for each where these are not all alike; `dp`, `tp` and `cp` are then those of the last.
    `idle_ranks` of the run lie between those of meshes and have no work. Costs are those of the other ranks for the
    simulated step, in the currency of the scenario's prices; None where it has none.
    """

    name: str
    step_time_s: float
    step_time_p10_s: float
    step_time_p90_s: float
    any_schedule_s: float | None
    any_schedule_gap: float | None
    objective_s: float
    bound_s: float
    gap: float
    status: str
    samples_per_s: float
    tokens_per_s_per_device: float
    bubble: float
    pp: int
    dp: int
    tp: int
    cp: int
    ep: int
    etp: int
    sharding: str
    offload: str
    compression: str
    fp8: str
    sequence_parallel: bool
    spread: tuple[str, ...]
    patches: tuple[str, ...]
    together: tuple[str, ...]
    batch_factor: int
    prefetch: tuple[str, ...]
    meshes: tuple[str, ...]
    idle_ranks: int
    recompute: tuple[str, ...]
    microbatch_size: int
    microbatches: int
    schedule: str
    schedule_gap: float | None
    devices: int
    worst_memory_bytes: int
    capacity_bytes: int
    stage_bytes: int
    gradient_stage_bytes: int
    reduce_bytes: int
    overlap_rate: float
    cost_per_step: float | None
    cost_per_million_tokens: float | None


def summarise(name: str, plan: Plan, prediction: Prediction, interval: StepInterval | None = None) -> PlanSummary:
    """All of it from a plan and its simulated step; `interval` is that of the step if it is known already."""
    batch = plan.scenario.global_batch
    tokens, cost = tokens_of(plan.scenario), cost_of(plan, prediction.step_time_s)
    listed = sum(plan.mesh(rank.stage).width for rank in prediction.ranks)
    units = plan.rank_count // listed  # a listed rank stands for these and for those of its tensor-parallel group
    alike = {rank.rank: units * plan.mesh(rank.stage).width for rank in prediction.ranks}
    worst = max(plan.stages, key=lambda stage: stage.memory_bytes / stage.capacity_bytes)
    interval = interval or plan_interval(plan, prediction.step_time_s)
    floor_s = min(plan.certificate.any_schedule_s, prediction.step_time_s) or None
    return PlanSummary(
        name=name,
        step_time_s=prediction.step_time_s,
        step_time_p10_s=interval.p10_s,
        step_time_p90_s=interval.p90_s,
        any_schedule_s=floor_s,
        any_schedule_gap=None if floor_s is None else 1 - floor_s / prediction.step_time_s,
        objective_s=plan.certificate.objective_s,
        bound_s=plan.certificate.bound_s,
        gap=plan.certificate.gap,
        status=plan.certificate.status,
        samples_per_s=batch / prediction.step_time_s,
        tokens_per_s_per_device=tokens / prediction.step_time_s / plan.rank_count,
        bubble=prediction.bubble,
        pp=plan.pp,
        dp=plan.dp,
        tp=plan.tp,
        cp=plan.cp,
        ep=plan.ep,
        etp=plan.etp,
        sharding=plan.sharding,
        offload=plan.scenario.technique.offload,
        compression=plan.scenario.technique.compression,
        fp8=plan.scenario.technique.fp8,
        sequence_parallel=plan.scenario.technique.sequence_parallel and plan.tp > 1,
        spread=plan.spread,
        patches=plan.patches,
        together=plan.together,
        batch_factor=plan.batch_factor,
        prefetch=plan.prefetch,
        meshes=mesh_texts(plan),
        idle_ranks=plan.world - plan.rank_count,
        recompute=tuple(stage.recompute for stage in plan.stages),
        microbatch_size=plan.microbatch_size,
        microbatches=plan.microbatches,
        schedule=plan.schedule,
        schedule_gap=None if plan.schedule_certificate is None else plan.schedule_certificate.gap,
        devices=plan.rank_count,
        worst_memory_bytes=worst.memory_bytes,
        capacity_bytes=worst.capacity_bytes,
        stage_bytes=sum(alike[rank.rank] * rank.received_bytes for rank in prediction.ranks),
        gradient_stage_bytes=sum(
            alike[t.rank] * t.action.bytes * t.action.copies for t in received_gradients(prediction)
        ),
        reduce_bytes=sum(alike[rank.rank] * rank.reduce_bytes for rank in prediction.ranks),
        overlap_rate=overlap_rate(prediction.timeline),
        cost_per_step=None if cost is None else cost.per_step,
        cost_per_million_tokens=None if cost is None else cost.per_million_tokens,
    )


def ranked(summaries: Sequence[PlanSummary], rank: str | None) -> list[PlanSummary]:
    """Plans with the shortest step first: `p50` by the simulated time, `p90` by its P90; None leaves their order.

    Raises:
        InputError: another word.
    """
    orders: dict[str, Callable[[PlanSummary], float]] = {
        "p50": lambda summary: summary.step_time_s,
        "p90": lambda summary: summary.step_time_p90_s,
    }
    if rank is not None and rank not in orders:
        raise InputError(f"--rank: expected 'p50' or 'p90', found '{rank}'")
    return list(summaries) if rank is None else sorted(summaries, key=orders[rank])


def names_of(files: Sequence[Path]) -> tuple[str, ...]:
    """Short distinct names of plan files: the file name without `.plan.json`, else the path.

    Raises:
        InputError: one file is named twice.
    """
    for index, file in enumerate(files):
        if file in files[:index]:
            raise InputError("the same plan is named twice", file=file)
    stems = [file.name.removesuffix(".json").removesuffix(".plan") for file in files]
    return tuple(stem if stems.count(stem) == 1 else str(file) for stem, file in zip(stems, files, strict=True))


def mesh_texts(plan: Plan) -> tuple[str, ...]:
    """`vision and projector 1 x 8 x 1 x 1` for each mesh; nothing where all modules share one."""
    if not plan.meshes:
        return ()
    stages: dict[Mesh, set[int]] = {}
    for stage in range(len(plan.stages)):
        stages.setdefault(plan.mesh(stage), set()).add(plan.row(stage))
    return tuple(
        f"{' and '.join(mesh.modules) or 'others'} {len(rows)} x {mesh.dp} x {mesh.cp} x {mesh.tp}"
        for mesh, rows in sorted(stages.items(), key=lambda item: item[0] == plan.base)
    )


def received_gradients(prediction: Prediction) -> list[TimedAction]:
    """Gradients that the listed ranks get from other stages in one step."""
    return [t for t in prediction.timeline if t.action.kind == "RECV" and "<" in t.action.tensor]
