"""What torchtitan is told of a plan, whatever the file: degrees, parts of the model, schedule, batch, recomputation.

torchtitan numbers ranks pp, dp_replicate, dp_shard, cp, tp, the last fastest, as a plan does. It pipelines the decoder
of one model, vision encoders in the first part, and takes any order of a chain as CSV of torch's runtime. FSDP2 shards
gradients (reshard `never`) or parameters (`always`), over dp * cp ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mmplan.cost_models.build import build_graph
from mmplan.errors import CheckError
from mmplan.planner.check import require_structure
from mmplan.planner.formats.language_chain import (
    LanguageStage,
    language_stages,
    on_a_chain,
    the_language_model,
    without_spread,
)
from mmplan.planner.formats.linearised import (
    Draft,
    each_alone,
    recomputed_everywhere,
    repriced,
    require_fit,
    with_sequence_parallel,
)
from mmplan.planner.formats.sequence_length import padded, sequence_length
from mmplan.planner.formats.serial_chain import is_chain
from mmplan.planner.formats.simple_schedule import under_1f1b
from mmplan.planner.formats.unsaid import unsaid
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.torch_export import torch_csv
from mmplan.planner.stage_graph import build_stage_graph
from mmplan.scenario.scenario import ModelModule

NATIVE = {"1f1b": "1F1B", "gpipe": "GPipe"}  # the orders follow from the name
RESHARD = {"none": "default", "gradients": "never", "parameters": "always"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TitanJob:
    """`plan` as it runs, what became of it in `draft`; `parts`: stages; `csv`: the orders, where no name says them."""

    draft: Draft
    module: ModelModule
    parts: tuple[LanguageStage, ...]
    parallelism: Mapping[str, object]
    training: Mapping[str, object]
    recompute: bool
    csv: str

    @property
    def plan(self) -> Plan:
        return self.draft.plan


def titan_job(plan: Plan, target: str, *, before_0_3: bool = False) -> TitanJob:
    """The job. Before 0.3 experts could be split by tp beside ep, tp always came with sequence parallelism, replicas
    that shard nothing stood alone (DDP), and only FSDP cast to bf16 beside tp or a pipeline.

    Raises:
        CheckError: the plan is not sound, or needs what torchtitan has no word for.
    """
    require_structure(plan)
    module = the_language_model(plan, target)
    _refuse(plan, target)
    draft = _summed_in_fp32(_passed_round(_ordered(each_alone(plan, target), target), target), target)
    draft = _sharded(draft, target, before_0_3=before_0_3)
    draft = on_a_chain(without_spread(draft, target), module, target)
    if before_0_3:
        draft = with_sequence_parallel(draft, f"{target} has tp only with sequence parallelism")
    elif draft.plan.ep > 1 and draft.plan.etp > 1:
        draft = draft.changed(repriced(draft.plan, etp=1), f"{target} keeps every expert whole on its rank")
    draft = padded(recomputed_everywhere(draft, target), module, target)
    made = draft.plan
    require_fit(made, target)
    csv = torch_csv(made, build_graph(made.scenario)) if len(made.stages) > 1 and made.orders else ""
    return TitanJob(
        draft=replace(draft, losses=(*draft.losses, *unsaid(plan, "torchtitan"))),
        module=module,
        parts=language_stages(made, module),
        parallelism=_parallelism(made, bool(csv)),
        training=_training(made, module),
        recompute=made.stages[0].recompute == "full",
        csv=csv,
    )


def part_names(job: TitanJob, head: str) -> list[list[str]]:
    """Names of the modules in every part. The last norm stands beside the last block, as the plan has it."""
    last = max((index for index, part in enumerate(job.parts) if part.blocks), default=len(job.parts) - 1)
    return [
        [
            *(["vision_encoder"] if part.others else []),
            *(["tok_embeddings"] if part.embedding else []),
            *(f"layers.{block}" for block in part.blocks),
            *(["norm"] if index == last else []),
            *([head] if part.head else []),
        ]
        for index, part in enumerate(job.parts)
    ]


def _refuse(plan: Plan, target: str) -> None:
    for module in plan.scenario.model.modules:
        if module.training.mode != "full":
            how = "frozen" if module.training.mode == "frozen" else "trained by LoRA"
            raise CheckError(f"{target} trains all parameters of a model; the plan has {module.name} {how}")
        if module.kind not in ("vision_encoder", "projector", "language_model"):
            raise CheckError(
                f"{target}'s models have vision encoders alone; the plan has {module.name} ({module.kind})"
            )
    if plan.scenario.precision == "fp16":
        raise CheckError(f"{target} trains in bf16 or fp32; the plan has fp16")
    if plan.scenario.technique.fp8 != "none":
        raise CheckError(
            f"{target} makes FP8 models in its registry; the plan has technique.fp8 {plan.scenario.technique.fp8}"
        )


def _ordered(draft: Draft, target: str) -> Draft:
    """Any order of a chain laid round the ranks, or down and up them; else 1F1B."""
    plan = draft.plan
    stages = build_stage_graph([stage.layers for stage in plan.stages], build_graph(plan.scenario))
    if plan.orders and not is_chain(stages):
        return under_1f1b(draft, target)
    if not plan.placement:
        return draft
    p, count = plan.pp, len(plan.stages)
    round_them = tuple(stage % p for stage in range(count))
    down_and_up = tuple(stage if stage < p else 2 * p - 1 - stage for stage in range(count))
    if p > 1 and (plan.placement == round_them or (count == 2 * p and plan.placement == down_and_up)):
        return draft
    return under_1f1b(draft, target)


def _passed_round(draft: Draft, target: str) -> Draft:
    """Context parallelism is torch's, which never trades rows for heads, and is told to hold a part at a time."""
    scenario = draft.plan.scenario
    if draft.plan.cp == 1 or scenario.technique.context_parallel == "ring":
        return draft
    other = replace(scenario, technique=replace(scenario.technique, context_parallel="ring"))
    does = "gathers them" if scenario.technique.context_parallel == "gather" else "exchanges heads for rows"
    sentence = f"{target} passes keys and values round, the plan {does}"
    return draft.changed(repriced(draft.plan, scenario=other), sentence)


def _summed_in_fp32(draft: Draft, target: str) -> Draft:
    """`mixed_precision_reduce` takes float32 alone."""
    scenario = draft.plan.scenario
    if scenario.optimizer.gradient_dtype == "fp32":
        return draft
    other = replace(scenario, optimizer=replace(scenario.optimizer, gradient_dtype="fp32"))
    sentence = f"{target} sums gradients in fp32, the plan in {scenario.optimizer.gradient_dtype}"
    return draft.changed(repriced(draft.plan, scenario=other), sentence)


def _sharded(draft: Draft, target: str, *, before_0_3: bool) -> Draft:
    """FSDP2 shards gradients at least, and whenever context parallelism or experts beyond tp are used.

    Raises:
        CheckError: bf16 without FSDP beside tp or a pipeline, which before 0.3 is fp32 (distributed/utils.py).
    """
    plan = draft.plan
    others = plan.tp > 1 or plan.pp > 1
    if before_0_3 and others and plan.dp * plan.cp == 1 and plan.scenario.precision == "bf16":
        raise CheckError(f"{target} computes in bf16 beside tp or a pipeline only where FSDP shards; the plan has dp=1")
    if plan.sharding == "optimizer":
        sentence = f"{target} shards gradients where it shards the optimizer's state"
        return draft.changed(repriced(plan, sharding="gradients"), sentence)
    lone = plan.sharding == "none" and plan.dp * plan.cp > 1
    experts = plan.ep > 1 and plan.ep * (plan.ranks_per_expert if before_0_3 else 1) > plan.tp
    if lone and (plan.cp > 1 or experts or (before_0_3 and others)):
        what = (
            "context parallelism"
            if plan.cp > 1
            else "expert parallelism beyond tp"
            if experts
            else "tp or a pipeline beside replicas"
        )
        return draft.changed(repriced(plan, sharding="gradients"), f"{target} shards gradients under {what}")
    return draft


def _parallelism(plan: Plan, by_csv: bool) -> dict[str, object]:
    """Fields of `ParallelismConfig`, names of 0.2 and 0.3 alike."""
    sharded = plan.sharding != "none"
    values: dict[str, object] = {
        "data_parallel_replicate_degree": 1 if sharded else plan.dp,
        "data_parallel_shard_degree": plan.dp if sharded else 1,
        "fsdp_reshard_after_forward": RESHARD[plan.sharding],
        "tensor_parallel_degree": plan.tp,
        "context_parallel_degree": plan.cp,
        "pipeline_parallel_degree": plan.pp,
        "expert_parallel_degree": plan.ep,
    }
    if len(plan.stages) > 1:
        v_shaped = len(plan.stages) == 2 * plan.pp and plan.placement[plan.pp] == plan.pp - 1
        looped = "ZBVZeroBubble" if v_shaped else "PipelineScheduleMulti"  # where parts lie; CSV orders
        values["pipeline_parallel_schedule"] = looped if by_csv else NATIVE[plan.schedule]
        values["pipeline_parallel_microbatch_size"] = plan.microbatch_size
    return values


def _training(plan: Plan, module: ModelModule) -> dict[str, object]:
    """A pipeline splits the local batch into microbatches; without one a local batch is a microbatch."""
    microbatches = plan.microbatches if len(plan.stages) > 1 else 1
    return {
        "local_batch_size": plan.microbatch_size * microbatches,
        "global_batch_size": plan.scenario.global_batch,
        "seq_len": sequence_length(plan, module),
        "mixed_precision_param": {"bf16": "bfloat16", "fp32": "float32"}[plan.scenario.precision],
        **({"enable_cpu_offload": True} if plan.scenario.technique.offload == "parameters" else {}),
    }
