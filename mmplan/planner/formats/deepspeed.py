"""A plan as DeepSpeed's JSON: ZeRO stage, batch, precision, tensor, sequence and expert parallel sizes.

Pipelines are no words of that file but arguments of `PipelineModule`, which cuts layers into equal counts, runs 1F1B
and shards the optimizer's state at most (deepspeed/runtime/pipe, release 0.19); they are told in a note. DeepSpeed
numbers ranks pipe, data, sequence or model, the last fastest, as a plan does.
"""

import json
from dataclasses import replace
from itertools import pairwise

from mmplan.cost_models.build import build_graph
from mmplan.errors import CheckError
from mmplan.planner.check import require_structure
from mmplan.planner.contract import contract
from mmplan.planner.formats.exported import Exported
from mmplan.planner.formats.language_chain import without_spread
from mmplan.planner.formats.linearised import Draft, each_alone, recomputed_everywhere, repriced, require_fit
from mmplan.planner.formats.simple_schedule import under_1f1b
from mmplan.planner.formats.unsaid import unsaid
from mmplan.planner.plan import Plan
from mmplan.scenario.technique import SHARDINGS

TARGET = "DeepSpeed"
VERSION = "deepspeed 0.19"


def export_deepspeed(plan: Plan) -> Exported:
    """`ds_config.json`.

    Raises:
        CheckError: the plan is not sound, or needs what DeepSpeed has no word for.
    """
    require_structure(plan)
    _refuse(plan)
    draft = _sequence_exchange(without_spread(under_1f1b(each_alone(plan, TARGET), TARGET, chunks=False), TARGET))
    draft = _pipelined(draft)
    made = draft.plan
    require_fit(made, TARGET)
    text = json.dumps(_document(made), indent=2) + "\n"
    losses = (*draft.losses, *unsaid(plan, "deepspeed"))
    return Exported(
        target="deepspeed", version=VERSION, files={"ds_config.json": text}, losses=losses, notes=_notes(made)
    )


def _refuse(plan: Plan) -> None:
    if plan.tp > 1 and plan.cp > 1:
        raise CheckError(f"{TARGET} splits layers by tp or sequences by cp; the plan has tp={plan.tp} and cp={plan.cp}")
    if plan.pp > 1 and plan.cp > 1:
        raise CheckError(f"{TARGET}'s pipelines have no axis for sequences; the plan has pp={plan.pp} and cp={plan.cp}")
    if plan.scenario.technique.fp8 != "none":
        raise CheckError(f"{TARGET}'s file has no word for technique.fp8 {plan.scenario.technique.fp8}")
    if plan.scenario.technique.host_states != "none" and plan.sharding == "none":
        raise CheckError(f"{TARGET} keeps optimizer state in host memory under ZeRO only; the plan shards nothing")


def _sequence_exchange(draft: Draft) -> Draft:
    """Sequences are exchanged for heads (Ulysses), which needs whole heads."""
    plan, scenario = draft.plan, draft.plan.scenario
    if plan.cp == 1 or scenario.technique.context_parallel == "all-to-all":
        return draft
    for module in scenario.model.modules:
        if module.kind == "language_model" and module.transformer is not None and module.transformer.heads % plan.cp:
            heads = module.transformer.heads
            share = f"{heads} / cp={plan.cp} = {heads / plan.cp:g}"
            raise CheckError(f"{TARGET} gives each rank whole heads; {module.name} has {share}")
    other = replace(scenario, technique=replace(scenario.technique, context_parallel="all-to-all"))
    made = repriced(plan, scenario=other)
    does = "gathers" if scenario.technique.context_parallel == "gather" else "passes round"
    return draft.changed(made, f"{TARGET} exchanges heads for rows (Ulysses), the plan {does} keys and values")


def _pipelined(draft: Draft) -> Draft:
    """Equal counts of layers, and no gradients in shards."""
    plan = draft.plan
    if plan.pp == 1:
        return draft
    if plan.sharding in ("gradients", "parameters"):
        sentence = f"{TARGET}'s pipelines shard the optimizer's state at most, the plan its {plan.sharding}"
        draft = draft.changed(repriced(plan, sharding="optimizer"), sentence)
        plan = draft.plan
    draft = recomputed_everywhere(draft, f"{TARGET}'s pipeline")
    plan, cut = draft.plan, _equal_counts(plan)
    if [stage.layers for stage in plan.stages] == cut:
        return draft
    counts = ", ".join(str(len(layers)) for layers in cut[:3])
    sentence = f"{TARGET} cuts the model into equal counts of layers ({counts} ...)"
    return draft.changed(repriced(plan, stages=cut), sentence)


def _equal_counts(plan: Plan) -> list[tuple[str, ...]]:
    """As `partition_uniform` (deepspeed/runtime/utils.py): the first parts have one more."""
    groups = contract(build_graph(plan.scenario), ()).groups
    each, more = divmod(len(groups), plan.pp)
    ends = [0]
    for part in range(plan.pp):
        ends.append(ends[-1] + each + (part < more))
    return [tuple(layer for group in groups[first:last] for layer in group) for first, last in pairwise(ends)]


def _document(plan: Plan) -> dict[str, object]:
    scenario = plan.scenario
    optimizer = scenario.optimizer
    document: dict[str, object] = {
        "train_batch_size": scenario.global_batch,
        "train_micro_batch_size_per_gpu": plan.microbatch_size,
        "gradient_accumulation_steps": plan.microbatches,
        "bf16": {"enabled": scenario.precision == "bf16"},
        "fp16": {"enabled": scenario.precision == "fp16"},
        "data_types": {"grad_accum_dtype": optimizer.gradient_dtype},
        "optimizer": {
            "type": "AdamW" if optimizer.name == "adamw" else "SGD",
            "params": {"lr": optimizer.learning_rate},
        },
        "zero_optimization": {"stage": SHARDINGS.index(plan.sharding), "overlap_comm": False, **_offload(plan)},
    }
    if plan.tp > 1 and plan.pp == 1:
        document["tensor_parallel"] = {"autotp_size": plan.tp}
    if plan.cp > 1:
        document["sequence_parallel_size"] = plan.cp
    if plan.ep > 1:
        document["expert_parallel"] = {
            "enabled": True,
            "autoep_size": plan.ep,
            "expert_tensor_parallel_size": plan.etp,
        }
    if plan.stages[0].recompute != "none":
        inputs = scenario.technique.host_activations and plan.stages[0].recompute == "full"
        document["activation_checkpointing"] = {
            "partition_activations": False,
            "contiguous_memory_optimization": False,
            **({"cpu_checkpointing": True} if inputs else {}),
        }
    return document


def _offload(plan: Plan) -> dict[str, object]:
    kept = plan.scenario.technique.host_states
    names = {"none": (), "optimizer": ("offload_optimizer",), "parameters": ("offload_optimizer", "offload_param")}
    return {name: {"device": "cpu"} for name in names[kept]}


def _notes(plan: Plan) -> tuple[str, ...]:
    notes = [f"{plan.rank_count} ranks: deepspeed --num_nodes ... your_script.py --deepspeed_config ds_config.json"]
    if plan.pp > 1:
        axes = f"num_pp={plan.pp}, num_mp={plan.tp}, num_dp={plan.dp}"
        interval = ", activation_checkpoint_interval=1" if plan.stages[0].recompute == "full" else ""
        notes.append(
            f"PipelineModule(layers, partition_method='uniform'{interval}, "
            f"topology=PipeModelDataParallelTopology({axes}))"
        )
        notes += ["layers of a pipeline split themselves over the model axis"] if plan.tp > 1 else []
    elif plan.stages[0].recompute != "none":
        level = {"full": "all blocks", "selective": "the attention core"}.get(
            plan.stages[0].recompute, f"a {plan.stages[0].recompute} of the blocks"
        )
        notes.append(f"the plan recomputes {level}: turn that on in the model, the file only says how it is done")
    frozen = [module.name for module in plan.scenario.model.modules if module.training.mode == "frozen"]
    adapted = [module.name for module in plan.scenario.model.modules if module.training.mode == "lora"]
    notes += [f"{' and '.join(frozen)}: set requires_grad=False, as the plan keeps them frozen"] if frozen else []
    notes += [f"{' and '.join(adapted)}: add LoRA (peft) before deepspeed.initialize"] if adapted else []
    return tuple(notes)
