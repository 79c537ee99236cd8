"""Steps whose loss or gradients are no numbers: left out on all ranks, or the end of the run with where it began."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from case_processes import run_on_ranks
from nan_cases import FAULTS, PROCESSES, run_nan_cases
from safetensors.torch import load_file
from torch import Tensor, nn

from mmplan.errors import RunError
from mmplan.runtime.finite import OutputSums, Unsound, are_finite, require_numbers
from mmplan.runtime.measurement import StepMeasurement
from mmplan.runtime.optimizer import StageOptimizer
from mmplan.scenario.scenario import Optimizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nan")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    measured: dict[str, Any] = run_on_ranks(run_nan_cases, PROCESSES, folder)[0]
    return measured


def saved_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Weights and moments; generators of random numbers may go on."""
    found = {
        f"{path.name} {name}": tensor
        for path in checkpoint.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    return {name: tensor for name, tensor in found.items() if " random/" not in name}


@pytest.mark.distributed
@pytest.mark.parametrize("case", FAULTS)
def test_a_step_left_out_changes_no_bit_of_weights_and_moments(
    case: str, folder: Path, results: dict[str, Any]
) -> None:
    run, notes = results[case]
    assert [step.skipped for step in run.steps] == [False, True]
    assert all(math.isfinite(loss) for step in run.steps for loss in step.losses.values())
    assert any("step 1: " in note and "the step is left out, no weight has changed" in note for note in notes)
    before, after = (saved_tensors(folder / case / f"step-{step:08}") for step in (1, 2))
    assert before.keys() == after.keys()
    assert len(before) > 50
    assert [name for name, tensor in before.items() if not torch.equal(tensor, after[name])] == []


def step(index: int, *, skipped: bool = False, **losses: float) -> StepMeasurement:
    return StepMeasurement(index=index, step_time_s=1.0, losses=losses, skipped=skipped)


def test_a_run_of_numbers_goes_on() -> None:
    assert require_numbers([step(2)], {"llm": 3.0}, [None, None], max_skips=0) == ""


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_run_and_says_where_it_began(loss: float) -> None:
    found = [Unsound(0, -1, "stage 0"), Unsound(1, 2, "llm.4"), Unsound(1, 0, "llm.5"), None]
    with pytest.raises(
        RunError,
        match=rf"^step 3: the loss of 'llm' is {loss}; first seen in the output of llm.5 \(stage 1, microbatch 0, "
        r"rank 2\); a smaller `optimizer.learning_rate` may help, and --on-nan skip ",
    ):
        require_numbers([step(3)], {"llm": loss}, found, max_skips=5)


def test_gradients_alone_end_a_run_and_the_last_stage_is_the_first_to_be_named() -> None:
    found = [Unsound(0, -1, "stage 0"), Unsound(1, -1, "stage 1")]
    with pytest.raises(RunError, match=r"^step 3: a gradient is no number; first seen in the gradients of stage 1 "):
        require_numbers([step(3)], {"llm": 1.0}, found, max_skips=5)


def test_more_steps_in_a_row_than_allowed_end_the_run() -> None:
    steps = [step(0), step(1, skipped=True), step(2, skipped=True)]
    found = [Unsound(0, -1, "stage 0")]
    assert "left out" in require_numbers(steps, {"llm": math.nan}, found, max_skips=2)
    with pytest.raises(RunError, match="2 steps in a row left out, --max-skips allows 1"):
        require_numbers(steps, {"llm": math.nan}, found, max_skips=1)


def test_the_first_output_that_is_no_number_is_found() -> None:
    sums = OutputSums()
    for microbatch, layer, value in ((0, "a", 1.0), (0, "b", math.inf), (1, "a", math.nan)):
        sums.add(microbatch, layer, torch.tensor([1.0, value]))
    sums.add(1, "ids", torch.tensor([1]))
    assert sums.first_unsound() == (0, "b")
    sums.clear()
    assert sums.first_unsound() is None


def test_infinities_of_both_signs_do_not_cancel() -> None:
    assert not are_finite([torch.tensor([math.inf, -math.inf])])
    assert are_finite([torch.full((4,), 3e4, dtype=torch.float16)])  # whose sum is no float16
    assert are_finite([])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_forgone_update_leaves_the_optimizer_as_it_was(name: str) -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(3, 2)).detach()]
    gradients = [torch.randn(3, 2)]
    optimizer = StageOptimizer(weights, gradients, Optimizer(name=name, learning_rate=0.1))  # type: ignore[arg-type]
    optimizer.step()
    before = [{key: value.clone() for key, value in state.items()} for state in optimizer.state()]
    updates = optimizer.updates
    optimizer.poison()
    assert not optimizer.finite()
    optimizer.forgo()
    optimizer.step()
    assert optimizer.updates == updates
    assert all(torch.equal(b[k], a[k]) for b, a in zip(before, optimizer.state(), strict=True) for k in b)
    gradients[0].fill_(1.0)
    optimizer.step()
    assert not torch.equal(before[0]["weight"], optimizer.state()[0]["weight"])
