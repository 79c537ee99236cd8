"""Plans with sequence parallelism: ranks that share columns have rows of what these do not split, odd numbers of rows
among others."""

from dataclasses import replace
from typing import Any

from row_plan_cases import DEEP, ONE_STAGE, TALKER
from tiny_plans import changed_module, hand_plan

from mmplan.planner.plan import Plan
from mmplan.scenario.scenario import Scenario

TP = 2


def sequence_cases(models: dict[str, Scenario], plans: dict[str, Plan]) -> dict[str, Plan]:
    """Name -> plan; `plans`: others of one rank a stage, by name."""
    tiny, experts = models["1f1b"], models["experts, latent attention and DeepStack"]
    layers = tuple(name for stage in DEEP for name in stage)
    one, shared = hand_plan(tiny, ONE_STAGE, microbatch_size=2), hand_plan(experts, (layers,), dp=2)
    both = changed_module(one, "llm", heads=8, kv_heads=4, head_dim=16)
    names = (
        "two stages",
        "two replicas that share weights",
        "LoRA language model",
        "cross-attention",
        "experts, latent attention and DeepStack",
        "talker",
        "recomputed blocks",
        "two stages on a rank, backwards in two parts",
    )
    split = {name: replace(plans[name], tp=TP) for name in names}
    deep = split["experts, latent attention and DeepStack"]
    attention = tuple(replace(stage, recompute="selective") for stage in deep.stages)
    split["experts, latent attention and DeepStack"] = replace(deep, stages=attention)
    folded = plans["two stages on a rank, backwards in two parts"]
    lora = replace(folded, scenario=models["LoRA language model"])
    split |= {
        "adapters, backwards in two parts": replace(lora, scenario=replace(lora.scenario, global_batch=8), tp=TP),
        "rows over cp of a talker": replace(hand_plan(models["talker"], ((*TALKER[0], *TALKER[1]),)), cp=2, tp=2),
        "rows over cp, latent attention": replace(hand_plan(experts, (layers,), microbatch_size=2), cp=2, tp=2),
        "rows for heads": _with_technique(replace(both, cp=2, tp=2), context_parallel="all-to-all"),
        "experts over replicas, each over tp": replace(shared, tp=2, ep=2, etp=2),
        "an expert on each rank": replace(shared, tp=2, ep=4),
    }
    return {f"{name}, rows over tp": _with_technique(plan, sequence_parallel=True) for name, plan in split.items()}


def _with_technique(plan: Plan, **choices: Any) -> Plan:
    technique = replace(plan.scenario.technique, **choices)
    return replace(plan, scenario=replace(plan.scenario, technique=technique))
