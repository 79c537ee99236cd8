"""What holds for every script of Megatron-Core: no adapters, and experts under tensor parallelism."""

from mmplan.errors import CheckError
from mmplan.planner.formats.linearised import Draft, with_sequence_parallel
from mmplan.planner.plan import Plan
from mmplan.scenario.scenario import ModelModule


def refuse_adapters(plan: Plan, target: str) -> None:
    """CheckError names the first module with LoRA."""
    for module in plan.scenario.model.modules:
        if module.training.mode == "lora":
            raise CheckError(
                f"{module.name} is trained by LoRA, for which {target} has no word (Megatron-Bridge's recipes and "
                "ms-swift have)"
            )


def refuse_uneven_exchange(plan: Plan, module: ModelModule, target: str) -> None:
    """CheckError where context parallelism by all-to-all would cut heads; no parser of Megatron checks it."""
    shape = module.transformer
    if plan.cp == 1 or plan.scenario.technique.context_parallel != "all-to-all" or shape is None:
        return
    for what, count in (("heads", shape.heads), ("kv_heads", shape.kv_heads)):
        if count % (plan.tp * plan.cp):
            share = f"{count} / (tp {plan.tp} x cp {plan.cp}) = {count / plan.tp / plan.cp:g}"
            raise CheckError(f"{target} exchanges whole heads: {module.name}: {what} = {share}")


def experts_with_sequence_parallel(draft: Draft, module: ModelModule, target: str) -> Draft:
    """Experts refuse tp without sequence parallelism (megatron/core/transformer/moe/moe_layer.py, `forward`)."""
    if module.transformer is None or module.transformer.moe is None:
        return draft
    return with_sequence_parallel(draft, f"{target} trains experts with tp only under sequence parallelism")
