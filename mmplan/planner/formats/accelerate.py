"""A plan as configuration of Hugging Face Accelerate 1.15: FSDP2, DDP or tensor parallelism by `accelerate launch`.

Loading the file checks next to nothing: the launcher turns it into variables, and `ParallelismConfig` reads these.
Unknown keys inside its mappings, and a product of degrees that is not `num_processes`, pass until training starts; they
are our own to get right.
"""

import json
from collections.abc import Mapping
from typing import Any

import yaml

from mmplan.planner.formats.exported import Exported
from mmplan.planner.formats.linearised import Draft
from mmplan.planner.formats.torchrun_head import processes_per_node, title
from mmplan.planner.formats.unsaid import fp8_losses
from mmplan.planner.formats.workarounds import (
    SPLIT,
    Workaround,
    all_recomputed,
    by_ring,
    residuals_whole,
    with_sharding,
    worked_around,
)
from mmplan.planner.plan import Plan

TARGET = "accelerate"
_PREFIX = "parallelism_config_"


def _gradients_too(draft: Draft, target: str) -> Draft:
    return with_sharding(draft, "gradients", f"{target}'s FSDP2 shards gradients with the optimizer's state")


def _sharded(draft: Draft, target: str) -> Draft:
    sentence = f"{target} has no replicas without FSDP2 beside tp or cp: gradients and optimizer state are sharded"
    return with_sharding(draft, "gradients", sentence)


WORKAROUNDS: Mapping[str, Workaround] = {
    **SPLIT,
    "ZeRO-1": _gradients_too,
    "replicas that shard nothing, beside tp or cp": _sharded,
    "context parallelism by all-to-all": by_ring,
    "recomputation by stage": all_recomputed,
    "recomputation of some blocks": all_recomputed,
    "recomputation of attention": all_recomputed,
    "sequence parallelism": residuals_whole,
}


def export_accelerate(plan: Plan) -> Exported:
    """`accelerate.yaml` for the launcher, `training.json` with what belongs into the training script.

    Raises:
        CheckError: the plan has pipeline stages or expert parallelism, which Accelerate has not, or does not fit as
            Accelerate runs it.
    """
    draft = worked_around(plan, TARGET, WORKAROUNDS)
    made = draft.plan
    comment = f"# {title(made, 'accelerate launch --config_file accelerate.yaml --machine_rank K')}\n"
    text = comment + yaml.safe_dump(_configuration(made), sort_keys=False)
    files = {"accelerate.yaml": text, "training.json": json.dumps(_training(made), indent=1) + "\n"}
    notes = ["training.json: gradient_accumulation_steps of Accelerator, batch size of the DataLoader, what to train"]
    if len(processes_per_node(made)) > 1 or processes_per_node(made)[0][0] > 1:
        notes.append("main_process_ip is a placeholder: the address of the first machine")
    if made.tp > 1:
        notes.append("the model has to be loaded with its tp plan: from_pretrained(tp_plan='auto', tp_size=...)")
    losses = (*draft.losses, *fp8_losses(plan, TARGET))
    return Exported(target=TARGET, version="accelerate 1.15", files=files, losses=losses, notes=tuple(notes))


def _configuration(plan: Plan) -> dict[str, Any]:
    machines = sum(nodes for nodes, _ in processes_per_node(plan))
    away = plan.scenario.technique.offload == "parameters"
    sharded = away or (plan.dp * plan.cp > 1 and plan.sharding != "none")
    kind = "FSDP" if sharded else "MULTI_GPU" if plan.rank_count > 1 else "NO"
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": _precision(plan),
        "num_machines": machines,
        "num_processes": plan.rank_count,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if machines > 1:
        values |= {"main_process_ip": "FIRST_MACHINE", "main_process_port": 29500}
    if sharded:
        values["fsdp_config"] = _fsdp(plan)
    if plan.width > 1:
        values["parallelism_config"] = _degrees(plan)
    if plan.scenario.technique.fp8 != "none":
        values["fp8_config"] = {"fp8_backend": "TE", "fp8_format": "HYBRID"}
    return values


def _precision(plan: Plan) -> str:
    if plan.scenario.technique.fp8 != "none":
        return "fp8"
    return {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}[plan.scenario.precision]


def _fsdp(plan: Plan) -> dict[str, Any]:
    """Blocks are the units of sharding and of recomputation; Accelerate asks the model which classes these are."""
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": plan.sharding == "parameters",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": plan.stages[0].recompute == "full",
        "fsdp_offload_params": plan.scenario.technique.offload == "parameters",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _degrees(plan: Plan) -> dict[str, Any]:
    """Their product is `num_processes`: replicas are all in dp_shard, which FSDP2 shards over together with cp."""
    degrees: dict[str, Any] = {
        f"{_PREFIX}dp_replicate_size": 1,
        f"{_PREFIX}dp_shard_size": plan.dp,
        f"{_PREFIX}tp_size": plan.tp,
        f"{_PREFIX}cp_size": plan.cp,
    }
    if plan.cp > 1:
        gathered = plan.scenario.technique.context_parallel == "gather"
        degrees[f"{_PREFIX}cp_comm_strategy"] = "allgather" if gathered else "alltoall"  # one part at a time
    return degrees


def _training(plan: Plan) -> dict[str, Any]:
    """What is no launcher's business."""
    modules = plan.scenario.model.modules
    return {
        "per_device_train_batch_size": plan.microbatch_size,
        "gradient_accumulation_steps": plan.microbatches,
        "activation_checkpointing": plan.stages[0].recompute == "full",
        "frozen": [module.name for module in modules if module.training.mode == "frozen"],
        "lora": {m.name: list(m.training.targets) for m in modules if m.training.mode == "lora"},
        "learning_rate": plan.scenario.optimizer.learning_rate,
        "optimizer": plan.scenario.optimizer.name,
    }
