"""`mmplan check --gradients`: a plan's first step against one process, of built-in models and of jobs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_plans import TWO_STAGES, hand_plan, tiny_scenario
from typer.testing import CliRunner

from mmplan.cli import app
from mmplan.commands.import_kinds import read_files
from mmplan.errors import InputError
from mmplan.planner.plan import save_plan
from mmplan.planner.search import optimize
from mmplan.report.formats import fragment_text
from mmplan.runtime.against_one_process import compare_with_one_process, differences, missing
from mmplan.runtime.first_gradients import GradientPart
from mmplan.runtime.gradient_differences import Comparison
from mmplan.scenario.load import load_scenario

DROPPING = """
import torch
from torch import nn

def model():
    return Net()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        block = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 6))
        self.blocks = nn.ModuleList([block])
    def forward(self, x):
        return self.blocks[0](x).square().mean()

def batches(size):
    for index in range(100):
        yield {"x": torch.randn(size, 6, generator=torch.Generator().manual_seed(index))}
"""
GRADIENT = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def part(values: torch.Tensor, *offset: int, name: str = "a") -> GradientPart:
    return GradientPart(name=name, offset=offset, values=values)


def test_differences_are_those_of_the_largest_element_wherever_a_rank_has_it() -> None:
    halves = [part(GRADIENT[:1], 0, 0), part(GRADIENT[1:] + torch.tensor([0.0, 0.002]), 1, 0)]
    (one,) = differences(halves, {"a": GRADIENT}, {"a"})
    assert (one.parameter, one.relative) == ("a", pytest.approx(0.002 / 4, rel=1e-3))
    assert missing(halves, {"a": GRADIENT}, {"a"}) == ()
    assert missing(halves[:1], {"a": GRADIENT}, {"a"}) == ("a",)


def test_gradients_that_are_no_numbers_and_frozen_weights_that_move_are_differences() -> None:
    parts = [part(GRADIENT * torch.nan, 0, 0), part(torch.tensor([0.5]), 0, name="frozen")]
    first, second = differences(parts, {"a": GRADIENT}, {"a"})
    assert first.relative == float("inf") and second.parameter == "frozen" and second.relative > 1


def test_gradients_that_are_zero_but_for_rounding_count_by_a_thousandth_of_the_largest() -> None:
    parts = [part(GRADIENT, 0, 0), part(torch.tensor([1e-9]), 0, name="key bias")]
    found = differences(parts, {"a": GRADIENT, "key bias": torch.tensor([0.0])}, {"a", "key bias"})
    assert found[0].relative == pytest.approx(1e-9 / 0.004)
    assert Comparison(processes=1, loss=1.0, loss_in_one=1.0, differences=found, missing=()).passed


def test_compressed_gradients_are_refused() -> None:
    plan = hand_plan(tiny_scenario(), TWO_STAGES)
    technique = replace(plan.scenario.technique, compression="topk")
    with pytest.raises(InputError, match=r"compresses gradients \(topk\): they are not those of one process"):
        compare_with_one_process(replace(plan, scenario=replace(plan.scenario, technique=technique)))


@pytest.mark.distributed
@pytest.mark.usefixtures("at_hand_once")
def test_a_plan_of_the_scenarios_own_model_has_the_gradients_of_one_process() -> None:
    """Whatever optimizer it has."""
    found = compare_with_one_process(hand_plan(replace(tiny_scenario(), global_batch=4), TWO_STAGES))
    assert found.passed and found.processes == 2 and len(found.differences) > 100
    assert 0 < found.differences[0].relative < 1e-6


@pytest.mark.distributed
@pytest.mark.usefixtures("at_hand_once")
def test_a_job_that_draws_numbers_of_its_own_is_named_with_its_worst_parameter(tmp_path: Path) -> None:
    """Dropout: each process draws for itself."""
    job = tmp_path / "job.py"
    job.write_text(DROPPING)
    text = fragment_text(read_files(["job", str(job)]))
    assert "# warning: tp is 1: 'blocks.0' draws random numbers (dropout)" in text
    file = tmp_path / "own.yaml"
    file.write_text(text.replace("devices_per_node: 4", "devices_per_node: 1"))
    save_plan(optimize(load_scenario(file)).plan, tmp_path / "plan.json")
    command = ["check", str(tmp_path / "plan.json"), "--gradients", "--job", str(job)]
    done = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "found.json")])
    told = " ".join(done.output.split())
    assert done.exit_code == 1
    assert "gradients of 4 trained parameters on 1 rank are not those of one process to 1e-05: loss 0." in told
    found = json.loads((tmp_path / "found.json").read_text())["gradients"]
    assert not found["passed"] and found["parameters"][0]["name"] in told
    assert found["parameters"][0]["relative"] > 0.01
