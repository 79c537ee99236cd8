"""Runs that go on from a checkpoint: to the bit under the same plan, to rounding under any other one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from case_processes import run_on_ranks
from checkpoint_cases import (
    JOBS,
    LLAVA_ONE_STAGE,
    LLAVA_TWO_STAGES,
    ONE_STAGE,
    PROCESSES,
    Continued,
    compressed,
    moved_experts,
    moved_plans,
    run_checkpoint_cases,
    saved_plans,
    tiny,
)
from ghost_models import llava, saved_config
from safetensors.torch import load_file
from tiny_plans import hand_plan
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from mmplan.planner.plan import Plan
from mmplan.planner.switch_cost import switch_cost
from mmplan.runtime.checkpoint.before_run import checkpoint_bytes, drops_unsaid, unsaid_bytes
from mmplan.runtime.checkpoint.folder import committed, read_manifest
from mmplan.runtime.checkpoint.listing import list_checkpoints
from mmplan.runtime.checkpoint.options import Checkpoints
from mmplan.runtime.launch import execute
from mmplan.runtime.measurement import Measurement
from mmplan.scenario.formats.hf_config import read_hf_config

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("at_hand")]

SAVED, MOVED = saved_plans(), moved_plans()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def job_plans(folder: Path) -> list[Plan]:
    """Plans of the model that the jobs train: that of most runs, four under which one of them is gone on with, and the
    first one compressed."""
    config = saved_config(llava()[0](), folder)
    scenario = replace(tiny(), model=read_hf_config(config))
    shared = replace(hand_plan(scenario, LLAVA_TWO_STAGES, dp=2), sharding="parameters")
    one, two = hand_plan(scenario, LLAVA_ONE_STAGE, dp=2), hand_plan(scenario, LLAVA_TWO_STAGES)
    rows = replace(two, cp=2, sharding="optimizer")
    return [one, two, shared, replace(two, tp=2), rows, compressed(one, "topk")]


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    measured: dict[str, Any] = run_on_ranks(
        run_checkpoint_cases, PROCESSES, folder, (SAVED, MOVED, moved_experts(), job_plans(folder))
    )[0]
    return measured


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """Weights and moments, without the states of random generators, which differ between processes."""
    files = {file.stem: load_file(file) for file in sorted(checkpoint.glob("*.safetensors"))}
    return {
        f"{rank} {key}" if key.startswith("unsaid/") else key: value
        for rank, file in files.items()
        for key, value in file.items()
        if not key.startswith("random/")
    }


@pytest.mark.parametrize("name", [*SAVED, *(f"job {job}" for job in (*JOBS, "compressed"))])
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(name: str, results: dict[str, Any], folder: Path) -> None:
    case: Continued = results[name]
    assert [step.losses for step in case.resumed.steps] == [step.losses for step in case.unbroken.steps]
    assert [step.index for step in case.resumed.steps] == [0, 1, 2]
    first, again = (tensors_of(folder / f"{name}, {part}" / "step-00000003") for part in ("unbroken", "resumed"))
    assert first.keys() == again.keys()
    for key, value in first.items():
        assert value.equal(again[key]), key
    before = tensors_of(folder / f"{name}, unbroken" / "step-00000002")
    assert any(not value.equal(before[key]) for key, value in first.items())


@pytest.mark.parametrize("name", SAVED)
def test_every_element_is_written_once(name: str, results: dict[str, Any], folder: Path) -> None:
    """As many bytes as are expected before a run, and no rank without a part where replicas share the work."""
    case: Continued = results[name]
    parts = [
        sum(value.nbytes for key, value in load_file(file).items() if not key.startswith(("random/", "unsaid/")))
        for file in sorted((folder / f"{name}, unbroken" / "step-00000003").glob("*.safetensors"))
    ]
    assert sum(parts) == checkpoint_bytes(SAVED[name])
    assert len(parts) == SAVED[name].rank_count and min(parts) > 0
    assert [saved.step for saved in case.unbroken.checkpoints] == [2, 3]
    assert all(saved.problem is None and saved.bytes > sum(parts) for saved in case.unbroken.checkpoints)


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize("name", ["compressed on two stages", "compressed, images in turn", "job compressed"])
def test_what_is_not_said_of_compressed_gradients_is_kept_by_each_rank(name: str, folder: Path) -> None:
    kept = [
        {key: value for key, value in load_file(file).items() if key.startswith("unsaid/")}
        for file in sorted((folder / f"{name}, resumed" / "step-00000002").glob("*.safetensors"))
    ]
    assert all(any(tensor.any() for tensor in one.values()) for one in kept)
    if name in SAVED:
        assert 0 < sum(tensor.nbytes for one in kept for tensor in one.values()) <= unsaid_bytes(SAVED[name])


@pytest.mark.usefixtures("results")
def test_under_another_plan_what_was_not_said_is_left_out_with_a_word(folder: Path) -> None:
    found = committed(folder / "compressed on two stages, resumed")[0]
    assert not drops_unsaid(found, read_manifest(found), SAVED["compressed on two stages"])
    assert drops_unsaid(found, read_manifest(found), hand_plan(tiny(), ONE_STAGE))


@pytest.mark.parametrize("name", ["moved", "moved experts"])
def test_other_plans_go_on_where_the_last_one_stopped(name: str, results: dict[str, Any]) -> None:
    """On 1, 2, 2, 4, ... and 1 ranks: cuts, chunks, replicas, tp, ep, every sharding, recomputation, microbatches."""
    unbroken, *moved = results[name]
    last: Measurement = moved[-1]
    assert len(last.steps) == len(moved) == len(unbroken.steps)
    for step, expected in zip(last.steps, unbroken.steps, strict=True):
        assert step.losses == pytest.approx(expected.losses, rel=1e-5)
    assert last.resumed is not None and last.resumed.step == len(moved) - 1


@pytest.mark.parametrize("step", [1, 2, 3])
def test_what_moves_between_ranks_is_what_replan_has_priced(step: int, results: dict[str, Any]) -> None:
    """Where no plan keeps anything twice, each element is read once, and to the byte as much of it was another's."""
    _, *moved = results["moved"]
    resumed, before, now = moved[step].resumed, MOVED[step - 1], MOVED[step]
    assert resumed.read_bytes == checkpoint_bytes(now)
    assert resumed.moved_bytes == switch_cost(before, now).moved_bytes > 0


def test_a_job_goes_on_under_another_plan_and_its_weights_are_read_by_its_library(
    results: dict[str, Any], folder: Path
) -> None:
    same, *others = results["moved job"]
    for moved in others:
        assert [step.losses["llm"] for step in moved.steps] == pytest.approx(
            [step.losses["llm"] for step in same.steps], rel=1e-5
        )
    shared = tensors_of(folder / "job llava, ZeRO-3" / "step-00000004")
    assert any(not key.endswith(("@0", "@0,0", "@")) for key in shared)  # the replicas have written shares
    kinds = {
        "resumed weights": "resumed",
        "same weights": "resumed",
        "ZeRO-3 weights": "ZeRO-3",
        "split weights": "split",
        "rows weights": "rows",
    }
    for written, run in kinds.items():
        saved = tensors_of(folder / f"job llava, {run}" / "step-00000004")
        model = LlavaForConditionalGeneration.from_pretrained(folder / written)
        for name, parameter in model.named_parameters():
            assert parameter.equal(joined(saved, name, parameter)), name


def joined(saved: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    """A weight of the boxes that a checkpoint has of it."""
    whole = torch.full_like(like, torch.nan)
    for key, box in saved.items():
        if key.startswith(f"{name}:weight@"):
            offset = [int(first) for first in key.rpartition("@")[2].split(",") if first]
            whole[tuple(slice(a, a + n) for a, n in zip(offset, box.shape, strict=True))] = box
    return whole


def test_the_job_that_drops_and_counts_does_both(results: dict[str, Any], folder: Path) -> None:
    """Else its case would say nothing of random states and buffers."""
    dropping, plain = results["job dropout"], results["job llava"]
    assert dropping.unbroken.steps[0].losses != plain.unbroken.steps[0].losses
    saved = tensors_of(folder / "job dropout, resumed" / "step-00000003")
    assert int(saved["model.language_model.layers.1.calls:buffer@"]) > 0


@pytest.mark.usefixtures("results")
def test_a_run_says_what_it_goes_on_from_and_what_is_damaged(folder: Path) -> None:
    """Through the launcher; the last plan that moved has one rank."""
    saved, notes = folder / "moved", list[str]()
    newest = saved / f"step-{len(MOVED):08}" / "plan.json"
    newest.write_bytes(newest.read_bytes()[:-1])
    checkpoints = Checkpoints(folder=saved, resume=saved)
    run = execute(MOVED[-1], steps=len(MOVED), local=1, checkpoints=checkpoints, on_note=notes.append)
    assert run is not None and run.resumed is not None
    (damage,) = run.resumed.damaged
    assert damage.startswith(f"{newest.parent.name}: plan.json has ")
    before = saved / f"step-{len(MOVED) - 1:08}"
    assert notes == [
        f"{damage}: this checkpoint is damaged, the one before is used",
        f"going on behind step {len(MOVED) - 1} from {before}",
    ]
    assert [checkpoint.step for checkpoint in run.checkpoints] == [len(MOVED)]
    assert list_checkpoints(saved)[0].damage is None
