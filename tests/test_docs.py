"""What the documents say is true of the code: examples load, fields exist, every command is listed."""

import re
from dataclasses import fields
from pathlib import Path
from textwrap import dedent

import pytest

import mmplan
from mmplan.cli import app
from mmplan.planner.alternative import Alternative
from mmplan.planner.plan import StagePlan
from mmplan.planner.prediction import RankPrediction
from mmplan.planner.replan import ModuleChange, Replan
from mmplan.planner.result import Considered, RunnerUp
from mmplan.planner.shadow_price import ZonePrice
from mmplan.planner.step_parts import RankParts
from mmplan.planner.switch_cost import SwitchCost
from mmplan.report.summary import PlanSummary
from mmplan.report.sweep import SweepRow
from mmplan.runtime.decompose import Decomposition
from mmplan.runtime.explain import ComputePrice
from mmplan.runtime.measurement import Measurement, RankMeasurement, TransferMeasurement
from mmplan.runtime.validate import Validation, ValidationRow
from mmplan.scenario.load import load_scenario

ROOT = Path(__file__).parents[1]
COMMANDS = sorted(
    command.callback.__name__.rstrip("_") for command in app.registered_commands if command.callback is not None
)


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_the_scenario_of_a_page_loads(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text()
    block = re.search(r"^    # yaml-language-server.*?(?=^\S)", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    file = tmp_path / "example.yaml"
    file.write_text(dedent(block[0]).replace("path/to/config.json", "llava-1.5-7b"))
    assert load_scenario(file).name


def test_the_error_in_the_guide_is_the_error_that_is_given(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    lines = ["name: x", "model: {hf_config: llava-1.5-7b}", "train:", "  vision: frozen", "", "", "", "data:"]
    file.write_text("\n".join([*lines, "  imagess: 1"]) + "\nbatch: {global: 1}\nprecision: bf16\ncluster: {}\n")
    (told,) = re.findall(r"error: my.yaml(:.*)", (ROOT / "docs" / "guide.md").read_text())
    with pytest.raises(mmplan.errors.InputError) as caught:
        load_scenario(file)
    assert str(caught.value) == f"{file}{told}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_readme_the_documents_and_the_changelog(command: str) -> None:
    for page in ("README.md", "docs/json.md", "CHANGELOG.md"):
        assert re.search(rf"`(mmplan )?{command}\b", (ROOT / page).read_text()), page


@pytest.mark.parametrize(
    "record",
    [
        *(PlanSummary, StagePlan, RankPrediction, Considered, RunnerUp),
        *(Measurement, RankMeasurement, TransferMeasurement, Validation, ValidationRow),
        *(Decomposition, RankParts, ComputePrice),
        *(SweepRow, Alternative, ZonePrice, Replan, ModuleChange, SwitchCost),
    ],
)
def test_every_field_of_a_document_is_named_in_its_description(record: type) -> None:
    text = (ROOT / "docs" / "json.md").read_text()
    unnamed = {field.name for field in fields(record) if f"`{field.name}`" not in text}
    assert unnamed <= {"memory_steps"}  # goes into the trace


@pytest.mark.parametrize("name", mmplan.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(mmplan, name) is not None
