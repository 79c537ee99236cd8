"""Plans whose tensor-parallel degree does not divide heads, on four ranks together."""

from dataclasses import replace

from row_plan_cases import ONE_STAGE
from tiny_plans import TWO_STAGES, changed_module, hand_plan

from mmplan.planner.plan import Plan
from mmplan.scenario.scenario import Scenario


def padded_cases(models: dict[str, Scenario], in_parts: Plan) -> dict[str, Plan]:
    """Name -> plan; `in_parts` has backwards in two parts."""

    def heads(plan: Plan, queries: int, keys: int, **more: object) -> Plan:
        shape = {"heads": queries, "kv_heads": keys, "head_dim": 16, "pad_heads": True}
        return changed_module(plan, "llm", **shape, **more)

    four = replace(hand_plan(models["1f1b"], ONE_STAGE), tp=4)
    shared = replace(hand_plan(models["LoRA language model"], ONE_STAGE, dp=2), tp=2)
    stages = tuple(replace(stage, recompute="full") for stage in shared.stages)
    crossing = replace(hand_plan(models["cross-attention in two stages"], ONE_STAGE), tp=4)
    rows = replace(hand_plan(models["1f1b"], ONE_STAGE, microbatch_size=2), tp=2, cp=2)
    technique = replace(four.scenario.technique, sequence_parallel=True)
    in_rows = replace(four, scenario=replace(four.scenario, technique=technique))
    return {
        "a key head on two ranks, sequences in rows": heads(in_rows, 6, 2, qkv_bias=True, qk_norm=True),
        # 3 queries of each key head on two ranks, 2 and 1 of them
        "a key head on two ranks, unlike queries": heads(four, 6, 2, qkv_bias=True, qk_norm=True),
        "one key head, replicas that share weights, adapters": replace(
            heads(shared, 3, 1), sharding="parameters", stages=stages
        ),
        "a key head on two ranks, backwards in two parts": heads(replace(in_parts, tp=2), 3, 1, qk_norm=True),
        "key heads that tp does not divide": heads(replace(hand_plan(models["1f1b"], TWO_STAGES), tp=2), 6, 3),
        "fewer key heads than ranks, cross-attention": heads(crossing, 6, 3, qk_norm=True),
        "a key head on two ranks, rows": heads(rows, 5, 1),
    }
