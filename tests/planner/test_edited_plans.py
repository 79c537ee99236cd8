"""plan.json edited by hand: every command answers with a finding or one sentence, whatever stands in the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmplan.errors import CheckError, InputError
from mmplan.planner.check import check_plan
from mmplan.planner.plan import load_plan, save_plan
from mmplan.planner.search import optimize
from mmplan.report.simulation import simulate_plan
from mmplan.runtime.launch import execute
from mmplan.scenario.load import load_scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    save_plan(optimize(load_scenario(SCENARIOS / "tiny.yaml"), gap=0.0).plan, path)  # one chunk per rank
    return path.read_text()


def edited(document: str, edit: Edit, tmp_path: Path) -> Path:
    values = json.loads(document)
    edit(values)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (
            lambda d: d["stages"][0].update(forward_s=-1),
            "stages.0.forward_s: not a plan: expected a number of at least 0",
        ),
        (lambda d: d["stages"][1].update(finish_s=float("nan")), "stages.1.finish_s: not a plan: expected a number"),
        (lambda d: d["stages"][1].update(memory_bytes=10**400), "stages.1.memory_bytes: not a plan: expected a number"),
        (lambda d: d["stages"][1].update(capacity_bytes=0), "stages.1.capacity_bytes: not a plan: expected a number"),
        (lambda d: d["certificate"].update(bound_s=float("inf")), "certificate.bound_s: not a plan: expected a number"),
        (lambda d: d.pop("dp"), "dp: not a plan: Field required"),
        (lambda d: d.update(stages=7), "stages: not a plan: Input should be a valid array"),
        (lambda d: d.update(schema_version=99), "schema version 99, this mmplan reads 1"),
        (lambda d: d["stages"][0].update(layers=["llm.0-999999999"]), "stages: 'llm.0-999999999' is not a range"),
    ],
)
def test_what_is_no_plan_is_refused_when_it_is_read(document: str, edit: Edit, sentence: str, tmp_path: Path) -> None:
    path = edited(document, edit, tmp_path)
    with pytest.raises(InputError) as error:
        load_plan(path)
    assert str(error.value).startswith(f"{path}: {sentence}")


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda d: d["scenario"]["model"]["edges"][1].update(producer="nobody"), "the plan says its scenario has hash"),
        (lambda d: d["scenario"]["data"]["images"]["weights"].pop(), "the plan says its scenario has hash"),
        (lambda d: d["scenario"]["cluster"]["pools"][0].update(nodes=-1), "the plan says its scenario has hash"),
        (lambda d: d.update(dp=7), "pp=2 x dp=7 x tp=1 = 14 devices"),
        (lambda d: d.update(dp=-1), "pp=2, dp=-1, tp=1"),
        (lambda d: d.update(tp=0), "pp=2, dp=2, tp=0"),
        (lambda d: d.update(microbatches=8_000_000), "dp=2 x 1 samples x 8000000 microbatches"),
        (lambda d: d["stages"].append(d["stages"][0]), "layer"),
        (lambda d: d["stages"].reverse(), "stage 1 feeds the earlier stage 0"),
        (lambda d: d.update(stages=[]), "layer"),
    ],
)
def test_what_cannot_be_run_is_a_finding_and_neither_simulated_nor_executed(
    document: str, edit: Edit, sentence: str, tmp_path: Path
) -> None:
    plan = load_plan(edited(document, edit, tmp_path))
    assert check_plan(plan)[0].message.startswith(sentence)
    with pytest.raises(CheckError) as error:
        simulate_plan(plan)
    assert str(error.value).startswith(f"the plan is not sound: {sentence}")
    with pytest.raises(CheckError):
        simulate_plan(plan, step=0)
    with pytest.raises(CheckError):
        execute(plan, steps=1, local=4)


def test_a_plan_against_the_wishes_of_its_scenario_is_a_finding_and_can_be_simulated(
    document: str, tmp_path: Path
) -> None:
    plan = load_plan(edited(document, lambda d: d.update(tp=2, dp=1, microbatches=16), tmp_path))
    assert [finding.rule for finding in check_plan(plan)] == ["constraints"]
    assert simulate_plan(plan).step_time_s > 0


def test_a_plan_that_is_not_there_is_told_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "best.plan.json").write_text("{}")
    with pytest.raises(InputError, match=r"no such file; did you mean 'best\.plan\.json'\?"):
        load_plan(tmp_path / "bst.plan.json")
    with pytest.raises(InputError, match="expected a plan file, found a directory"):
        load_plan(tmp_path)
