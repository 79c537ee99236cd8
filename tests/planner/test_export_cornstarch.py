"""Plans as templates per modality: read back, they have the plan's layers, ranks and degrees."""

import json

import pytest
from export_readers import same_by_cornstarch
from random_plans import random_plan
from shaped_plans import modal_plan

from mmplan.errors import CheckError
from mmplan.planner.formats.cornstarch import export_cornstarch, read_templates

SEEDS = range(16)


def test_templates_have_the_plans_stages_and_degrees() -> None:
    written = 0
    for seed in SEEDS:
        plan = modal_plan(seed)
        try:
            made = export_cornstarch(plan)
        except CheckError:
            continue
        written += 1
        assert same_by_cornstarch(plan, made)
        document = read_templates(made.files["templates.json"])
        batch = document["num_microbatches"] * document["microbatch_size"] * document["dp_size"]
        assert batch == plan.scenario.global_batch
    assert written >= 12


def test_modalities_that_share_a_rank_are_refused() -> None:
    for seed in SEEDS:
        plan = random_plan(seed)
        held = [{layer.split(".")[0] for layer in stage.layers} for stage in plan.stages]
        if any({"vision", "llm"} <= names for names in held):
            with pytest.raises(CheckError):
                export_cornstarch(plan)


def test_a_damaged_document_is_seen() -> None:
    plan = next(p for p in map(modal_plan, SEEDS) if _written(p))
    document = json.loads(_written(p := plan))
    assert p.rank_count > 1
    document["templates"][0]["modules_per_stage"][0]["ranks"][1] += 1
    with pytest.raises(ValueError, match="has ranks"):
        read_templates(json.dumps(document))


def _written(plan) -> str:  # type: ignore[no-untyped-def]
    try:
        return export_cornstarch(plan).files["templates.json"]
    except CheckError:
        return ""
