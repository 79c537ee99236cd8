"""`mmplan execute --health` reads of a plan, however it is split, what one process reads of the same data."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
from ghost_models import llava
from gradient_cases import cases
from row_plan_cases import ONE_STAGE
from test_jobs import STAGES
from tiny_plans import TWO_STAGES, hand_plan, tiny_scenario
from typer.testing import CliRunner

from mmplan.cli import app
from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.errors import MmplanError
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.reschedule import refuse_unusable, with_family
from mmplan.runtime.health.readings import load_readings
from mmplan.runtime.launch import execute
from mmplan.scenario.formats.hf_config import read_hf_config

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("at_hand")]

COMPARED = {"gradient_attenuation", "gradient_variance", "attention_collapse", "headroom"}


def plans() -> dict[str, Plan]:
    scenario = replace(cases()["cross-attention in two stages"].scenario, global_batch=4)
    alone, staged, graph = hand_plan(scenario, ONE_STAGE), hand_plan(scenario, TWO_STAGES), build_graph(scenario)
    shared = replace(hand_plan(scenario, TWO_STAGES, dp=2), sharding="optimizer")
    return {
        "alone": alone,
        "two replicas of two stages that share optimizer state": shared,
        "layers split in two": replace(alone, tp=2),
        "backwards in two parts": refuse_unusable(with_family(staged, "zb-h1", graph, AnalyticCostModel(scenario))),
    }


def readings(plan: Plan, file: Path, local: int) -> dict[tuple[str, str], float]:
    execute(plan, steps=1, local=local, health=file, health_interval=1)
    return {(r.monitor, r.of): r.value for r in load_readings(file) if r.value is not None}


@pytest.fixture(scope="module")
def alone_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone") / "health.jsonl"


@pytest.fixture(scope="module")
def alone(alone_file: Path) -> dict[tuple[str, str], float]:
    return readings(plans()["alone"], alone_file, 1)


@pytest.mark.parametrize("name", [name for name in plans() if name != "alone"])
def test_monitors_read_of_a_plan_what_one_process_reads(name: str, alone: Any, tmp_path: Path) -> None:
    plan = plans()[name]
    found = readings(plan, tmp_path / "health.jsonl", plan.rank_count)
    assert {monitor for monitor, _ in alone} >= COMPARED
    for key, value in alone.items():
        if key[0] in COMPARED:
            assert found[key] == pytest.approx(value, rel=2e-3), key
    assert (("feature_jitter", "stage 0 > stage 1") in found) == (plan.pp > 1)
    assert ("kv_shift" in {monitor for monitor, _ in found}) == (plan.tp > 1)


def test_the_header_says_what_is_not_watched_and_the_doctor_reads_the_file(alone: Any, alone_file: Path) -> None:
    header = json.loads(alone_file.read_text().splitlines()[0])
    assert header["silent"].keys() == {"robustness", "shared_conflict"}
    result = CliRunner().invoke(app, ["doctor", str(alone_file)])
    assert result.exit_code == 0, result.stdout


JOB = """
import sys

sys.path.insert(0, {folder!r})
from llava_job import batches, model

TEXT = "model.language_model.embed_tokens"
health = {{"embeddings": {{"vision": "model.multi_modal_projector", "text": {text}}}}}
"""


def of_job(plan: Plan, folder: Path, text: str = "TEXT") -> dict[tuple[str, str], float]:
    job, file = folder / "job.py", folder / "health.jsonl"
    job.write_text(JOB.format(folder=str(Path(__file__).parents[1]), text=text))
    execute(plan, steps=4, local=plan.rank_count, job=job, health=file, health_interval=1)  # JED of 8 samples
    return {(r.monitor, r.of): r.value for r in load_readings(file) if r.value is not None}


def test_monitors_read_of_a_model_of_ones_own_in_stages_what_one_process_reads(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(llava()[0]().config.to_dict()))
    scenario = replace(tiny_scenario(), model=read_hf_config(config), global_batch=4)
    whole = of_job(hand_plan(scenario, STAGES[1]), tmp_path)
    assert {monitor for monitor, _ in whole} == {"gradient_attenuation", "gradient_variance", "headroom", "jed"}
    found = of_job(hand_plan(scenario, STAGES[2], dp=2), tmp_path)
    for key, value in whole.items():
        assert found[key] == pytest.approx(value, rel=2e-3), key
    with pytest.raises(MmplanError, match="the model has no module 'tokens'"):
        of_job(hand_plan(scenario, STAGES[1]), tmp_path, text="'tokens'")
