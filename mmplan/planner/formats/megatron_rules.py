"""What holds for every script of Megatron-Core: no adapters, and experts under tensor parallelism."""

from dataclasses import replace

from mmplan.errors import CheckError
from mmplan.planner.formats.linearised import Draft, repriced
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


def experts_with_sequence_parallel(draft: Draft, module: ModelModule, target: str) -> Draft:
    """Experts refuse tp without sequence parallelism (megatron/core/transformer/moe/moe_layer.py, `forward`)."""
    scenario, shape = draft.plan.scenario, module.transformer
    if draft.plan.tp == 1 or scenario.technique.sequence_parallel or shape is None or shape.moe is None:
        return draft
    other = replace(scenario, technique=replace(scenario.technique, sequence_parallel=True))
    sentence = f"{target} trains experts with tp only under sequence parallelism"
    return draft.changed(repriced(draft.plan, scenario=other), sentence)
