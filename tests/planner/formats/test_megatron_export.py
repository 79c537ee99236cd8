"""Scripts for Megatron-LM: what is refused, what is run in another way and priced."""

from dataclasses import replace

import pytest
from random_plans import random_plan
from read_back import layout_stages, megatron_arguments

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.errors import CheckError
from mmplan.planner.formats.language_chain import LanguageStage
from mmplan.planner.formats.megatron import export_megatron
from mmplan.planner.formats.megatron_layout import layout_text
from mmplan.planner.plan import Plan, scenario_hash
from mmplan.planner.schedules.chunks import balanced_ends
from mmplan.planner.schedules.reschedule import with_family
from mmplan.scenario.scenario import Training
from mmplan.scenario.technique import ContextParallel

LANGUAGE_ONLY = ("qwen2.5-vl-7b-sft", "llava-1.5-7b-sft", "qwen2-audio-7b")


def plan_like(**wanted: object) -> Plan:
    """The first random plan of a plain model with these degrees."""
    plans = (random_plan(seed, LANGUAGE_ONLY) for seed in range(300))
    return next(plan for plan in plans if all(getattr(plan, name) == value for name, value in wanted.items()))


def test_a_schedule_that_megatron_lacks_is_run_as_1f1b_and_priced() -> None:
    plan = plan_like(schedule="1f1b", pp=4)
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    searched = with_family(plan, "gpipe", graph, costs).plan
    assert searched is not None
    told = [loss for loss in export_megatron(searched).losses if "schedule gpipe" in loss.sentence]
    assert len(told) == 1 and told[0].step_s is not None


def test_an_adapter_is_refused_by_the_name_of_its_module() -> None:
    plan = plan_like(pp=2)
    modules = tuple(
        replace(module, training=Training(mode="lora", rank=8, targets=("q",))) if module.name == "llm" else module
        for module in plan.scenario.model.modules
    )
    scenario = replace(plan.scenario, model=replace(plan.scenario.model, modules=modules))
    with pytest.raises(CheckError, match="llm is trained by LoRA"):
        export_megatron(replace(plan, scenario=scenario, scenario_hash=scenario_hash(scenario)))


def test_unlike_recomputation_of_stages_is_one_number_with_its_price() -> None:
    plans = (random_plan(seed, LANGUAGE_ONLY) for seed in range(300))
    plan = next(p for p in plans if len({s.recompute for s in p.stages}) > 1 and p.pp > 2 and not p.spread)
    told = [loss for loss in export_megatron(plan).losses if "recomputes" in loss.sentence]
    assert len(told) <= 1 and all(loss.step_s is not None and loss.step_s > 0 for loss in told)


def test_a_stage_of_the_token_table_alone_is_a_lone_letter() -> None:
    stages = [
        LanguageStage(embedding=True, blocks=(), head=False, others=()),
        LanguageStage(embedding=False, blocks=(0, 1, 2), head=False, others=()),
        LanguageStage(embedding=False, blocks=(3,), head=True, others=()),
    ]
    assert layout_text(stages) == "E|t*3|tL"
    assert layout_stages("E|t*3|tL") == stages


def test_context_parallelism_by_heads_is_refused_where_heads_do_not_divide() -> None:
    """No layer of Megatron checks it before a run."""
    plan = next(
        p for p in (random_plan(seed, ("qwen2.5-vl-7b-sft",)) for seed in range(300)) if p.cp == 2 and p.tp == 4
    )
    technique = replace(plan.scenario.technique, context_parallel="all-to-all")
    scenario = replace(plan.scenario, technique=technique)
    with pytest.raises(CheckError, match=r"heads = 28 / \(tp 4 x cp 2\) = 3.5"):
        export_megatron(replace(plan, scenario=scenario, scenario_hash=scenario_hash(scenario)))


@pytest.mark.parametrize(("way", "word"), [("ring", "p2p"), ("gather", "all_gather"), ("all-to-all", "a2a")])
def test_each_way_of_context_parallelism_has_its_word(way: ContextParallel, word: str) -> None:
    plan = next(
        p for p in (random_plan(seed, ("qwen2.5-vl-7b-sft",)) for seed in range(300)) if p.cp == 2 and p.tp == 1
    )
    scenario = replace(plan.scenario, technique=replace(plan.scenario.technique, context_parallel=way))
    made = export_megatron(replace(plan, scenario=scenario, scenario_hash=scenario_hash(scenario)))
    assert megatron_arguments(made)["--cp-comm-type"] == word


def test_experts_under_tensor_parallelism_get_sequence_parallelism() -> None:
    plan = next(p for p in (random_plan(seed, ("kimi-k2.5-1t",)) for seed in range(200)) if p.tp > 1)
    made = export_megatron(plan)
    assert "--sequence-parallel" in megatron_arguments(made)
    assert any("sequence parallelism" in loss.sentence for loss in made.losses)


def test_stages_beside_the_slowest_are_cut_evenly() -> None:
    """One part takes 10 s whatever the cut; a cut that only bounds the slowest may leave 1, 1 and 10 s for the rest."""
    assert balanced_ends([10.0, *[1.0] * 12], 4) == [1, 5, 9, 13]
