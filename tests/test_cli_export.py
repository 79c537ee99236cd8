"""`mmplan export` as a person calls it: targets in the help, files in folders, what is refused."""

from pathlib import Path

import pytest
from random_plans import random_plan
from typer.testing import CliRunner

from mmplan.cli import app
from mmplan.commands.export_targets import TARGETS
from mmplan.commands.formats import TARGET_NAMES
from mmplan.errors import MmplanError
from mmplan.planner.plan import save_plan


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    plans = (random_plan(seed, ("qwen2.5-vl-7b-sft",)) for seed in range(50))
    plan = next(p for p in plans if p.pp > 1 and not p.spread and {"vision.0", "llm.0"} <= set(p.stages[0].layers))
    save_plan(plan, tmp_path / "a.plan.json")
    return tmp_path / "a.plan.json"


def test_the_help_names_every_target() -> None:
    assert TARGET_NAMES.split(", ") == sorted(TARGETS)


def test_one_file_goes_into_a_folder_or_under_a_name(plan_file: Path) -> None:
    folder = plan_file.parent
    for output in (folder, folder / "run.sh"):
        result = CliRunner().invoke(app, ["export", str(plan_file), "--to", "megatron", "-o", str(output)])
        assert result.exit_code == 0, result.output
    assert (folder / "megatron.sh").read_text() == (folder / "run.sh").read_text()


def test_several_files_make_the_folder(plan_file: Path) -> None:
    output = plan_file.parent / "torch"
    result = CliRunner().invoke(app, ["export", str(plan_file), "--to", "torch-pipelining", "-o", str(output)])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in output.iterdir()) == ["device_mesh.json", "orders.csv"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--to", "megatorn"], "did you mean 'megatron'"),
        (["--to", "megatron", "-o", "no/such/folder/x.sh"], "does not exist"),
        (["--to", "megatron-mimo"], "ranks of its own"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(plan_file: Path, words: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["export", str(plan_file), *words])
    assert isinstance(result.exception, MmplanError) and told in str(result.exception)
