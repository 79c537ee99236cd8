"""Scripts for Megatron-LM, read back by a few lines of our own: degrees, layout, batch and model are the plan's."""

import re
import shlex
from dataclasses import replace

import pytest
from random_plans import random_plan

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.errors import CheckError
from mmplan.planner.formats.exported import Exported
from mmplan.planner.formats.language_chain import language_stages, the_language_model
from mmplan.planner.formats.megatron import as_megatron_runs, export_megatron
from mmplan.planner.formats.megatron_layout import layout_stages
from mmplan.planner.plan import Plan, scenario_hash
from mmplan.planner.schedules.reschedule import with_family
from mmplan.scenario.scenario import Training

LANGUAGE_ONLY = ("qwen2.5-vl-7b-sft", "llava-1.5-7b-sft", "qwen2-audio-7b")


def arguments(made: Exported) -> dict[str, str]:
    """Flag -> value ('' of a switch) of all arrays of the script."""
    words: list[str] = []
    for block in re.findall(r"^(?:MODEL|PARALLEL|TRAINING)=\((.*?)^\)", made.files["megatron.sh"], re.M | re.S):
        words += shlex.split(block)
    found: dict[str, str] = {}
    for place, word in enumerate(words):
        if word.startswith("--"):
            assert word not in found
            follows = words[place + 1] if place + 1 < len(words) else "--"
            found[word] = "" if follows.startswith("--") else follows
    return found


def exported_plans(count: int) -> list[tuple[int, Plan, Exported]]:
    found = []
    for seed in range(count):
        try:
            found.append((seed, random_plan(seed), export_megatron(random_plan(seed))))
        except CheckError as refusal:
            assert str(refusal).count(".") < 8 and len(str(refusal)) < 300, seed
    return found


def test_random_plans_come_back_with_their_degrees_and_layers(request: pytest.FixtureRequest) -> None:
    cases = exported_plans(request.config.getoption("--round-trips") // 2)
    assert cases
    for seed, plan, made in cases:
        module = the_language_model(plan, "Megatron-LM")
        run, read = as_megatron_runs(plan, module).plan, arguments(made)
        names = {"tensor-model": "tp", "context": "cp", "pipeline-model": "pp"}
        assert {d: int(read[f"--{flag}-parallel-size"]) for flag, d in names.items()} == {
            "tp": plan.tp,
            "cp": plan.cp,
            "pp": plan.pp,
        }, seed
        assert int(read["--global-batch-size"]) == plan.dp * plan.microbatches * int(read["--micro-batch-size"]), seed
        stages = [replace(stage, others=()) for stage in language_stages(run, module)]
        if len(stages) > 1:
            assert layout_stages(read["--pipeline-model-parallel-layout"]) == tuple(stages), seed
        blocks = max(len(stage.blocks) for stage in stages)
        assert int(read.get("--recompute-num-layers", "1")) <= blocks, seed  # nobody else checks it
        assert int(read["--seq-length"]) % (plan.tp * plan.cp) == 0, seed
        assert ("--sequence-parallel" in read) <= (plan.tp > 1), seed
        assert all(loss.step_s is not None for loss in made.losses), seed


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
