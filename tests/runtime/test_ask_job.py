"""What `check --job` says before any process starts: the trials of all ranks, asked as threads of one process."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from job_expert_cases import expert_plans
from job_plan_cases import cut, job_of, job_plans, recorded_scenario, scenario_of, sequential
from job_plan_runs import CPU
from meshed_job_cases import meshed_jobs
from meshed_plan_cases import SIGHT, own
from typer.testing import CliRunner

from mmplan.cli import app
from mmplan.errors import InputError
from mmplan.planner.plan import save_plan
from mmplan.runtime.ghost.before_run import ask_job, why_not_run
from mmplan.runtime.ghost.train import JobGroups, prepare_job
from mmplan.runtime.groups import group_maker
from mmplan.runtime.network import all_reduce, all_to_all, gather_rows, pass_on
from mmplan.runtime.thread_group import ThreadGroup, Threads
from mmplan.units import format_bytes

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def few_batches() -> Iterator[None]:
    with patch("mmplan.runtime.ghost.before_run.FIRST_BATCHES", 6):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("asked")


def test_plans_that_run_are_told_to_run(folder: Path) -> None:
    plans = job_plans(folder) | expert_plans(folder) | meshed_jobs(folder)
    for name in (
        "cross-attention, rows, tensor parallel, ZeRO-3, recomputed",
        "Qwen2.5-VL, images in turn, rows, tensor parallel",
        "cross-attention, sequence parallel",
        "zeros, over tensor-parallel ranks and replicas",
        "LLaVA, slices from tp 2",
    ):
        family, plan = plans[name]
        assert not [note for note in ask_job(plan, job_of(family)) if "stays whole" in note], name
    family, plan = plans["over tensor-parallel ranks"]
    notes = [note for note in ask_job(plan, job_of(family)) if "stays whole" in note]
    assert notes and all("stays whole on each of the 2 tensor-parallel ranks" in note for note in notes)


def test_sequence_parallelism_needs_blocks_whose_attention_is_split(folder: Path) -> None:
    """Here by heads, which plans refuse before that."""
    plan = cut(sequential(scenario_of("llava", folder)), tp=4)
    told = "no block can be run on some rows of a sequence: 'model[.]language_model[.]layers[.]0' cannot be"
    with patch("mmplan.runtime.ghost.before_run.process_count"), pytest.raises(InputError, match=told):
        ask_job(plan, job_of("llava"))


def test_what_stays_whole_counts_as_memory(folder: Path) -> None:
    """Weights and gradients in fp32, 8 bytes each: of a head of 120 x 32 that two ranks have whole, because others have
    other rows, a half is more than the plan counts. Tied tables under ZeRO-3 are shared out like all else."""
    split = cut(scenario_of("llava", folder), "llm.0", tp=2)
    assert not any("stage 1" in note for note in ask_job(split, job_of("llava")))
    plan = replace(split, cp=2)
    head = 120 * 32 // 2 * 8
    (told,) = ask_job(plan, job_of("llava"))  # the table of stage 0 is split as it is without cp
    assert f"stage 1 holds {format_bytes(head)} of weights, gradients and optimizer state and " in told
    full = replace(plan.stages[1], capacity_bytes=head, memory_bytes=1)
    with pytest.raises(InputError, match=r"more than the 15 KiB of a device: set `constraints\.tp: \[1\]`"):
        ask_job(replace(plan, stages=(plan.stages[0], full)), job_of("llava"))
    tied = cut(scenario_of("gemma3", folder), "llm.0", dp=2, sharding="parameters")
    assert ask_job(tied, job_of("gemma3")) == ()


def test_buffers_that_replicas_have_each_their_own_are_told() -> None:
    plan = cut(recorded_scenario("normed"), dp=2)
    (told,) = ask_job(plan, job_of("normed"))
    assert told.startswith("a forward changes buffers: running_mean, running_var, num_batches_tracked of blocks.0.norm")
    assert "the ranks of dp=2 have each their own" in told and "normed_job.py:18" in told
    assert ask_job(replace(plan, dp=1), job_of("normed")) == ()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_three_steps_of_eight_microbatches_are_counted_as_twenty_four(recompute: str) -> None:
    scenario = replace(recorded_scenario("normed"), global_batch=8)
    groups = JobGroups(replicas=None, tensor=None, more=group_maker(0, "gloo", timedelta(seconds=9)))
    notes: list[str] = []
    with patch("mmplan.runtime.ghost.train.FIRST_BATCHES", 6):
        plan = cut(scenario, recompute=recompute)
        prepared = prepare_job(plan, job_of("normed"), 0, CPU, groups, notes.append)
    for step in range(3):
        _, stages = prepared.step(step)
        for microbatch in range(8):
            stages[0].forward(microbatch, {})
            stages[0].backward(microbatch, {})
    counts = [int(b.tensor) for b in prepared.stages[0].buffers if b.name.endswith("num_batches_tracked")]
    assert counts == [24, 24, 0] and not notes


def test_eager_attention_is_told_how_to_switch(folder: Path) -> None:
    def eager() -> nn.Module:
        model = job_of("llava").model()
        model.config.text_config._attn_implementation = "eager"
        return model

    plan = cut(scenario_of("llava", folder), cp=2)
    with pytest.raises(InputError, match='its attention is "eager": make the model with `attn_implementation="sdpa"`'):
        ask_job(plan, replace(job_of("llava"), model=eager))


def test_what_a_trial_refuses_is_told_with_the_constraint(folder: Path) -> None:
    plan = cut(scenario_of("llava", folder), "llm.0", tp=2)
    told, notes = why_not_run(plan, HERE / "dropout_job.py", None)
    assert told is not None and not notes
    assert "draws random numbers (dropout)" in told and "`constraints.tp: [1]`" in told
    told, _ = why_not_run(replace(plan, tp=1, cp=2), HERE / "dropout_job.py", None)
    assert told is not None and "'model.language_model.layers.0' cannot be run on some rows of a sequence" in told
    assert "set `constraints.cp: [1]`" in told
    told, _ = why_not_run(plan, HERE / "mixtral_job.py", None)
    assert told is not None and "the model's modules do not make up the layers of the plan" in told
    spread = replace(plan, spread=("vision", "projector"), patches=("vision",))
    told, _ = why_not_run(spread, HERE / "llava_job.py", None)
    assert told is not None and "set `constraints.spread: [vision, projector]`" in told
    apart = replace(cut(plan.scenario, "projector.0"), meshes=(replace(own(*SIGHT, first=1), cp=2),))
    told, _ = why_not_run(apart, HERE / "llava_job.py", None)
    assert told is not None and "set `constraints.modules: {vision: {cp: 1}}`" in told


def test_a_parameter_that_stages_of_unlike_meshes_hold_is_told_with_the_constraint(folder: Path) -> None:
    """The glue of this model reads a norm of the tower beside the head."""
    plan = cut(scenario_of("gemma3", folder), "projector.0")
    with pytest.raises(InputError, match=r"layer_norm1\.weight' is held by stages 0 and 1, .* `constraints\.modules`"):
        ask_job(replace(plan, meshes=(own(*SIGHT, first=1),)), job_of("glue"))


def test_batches_that_a_replica_runs_in_turn_are_told(folder: Path) -> None:
    plan = replace(cut(scenario_of("llava", folder), "projector.0", samples=2), meshes=(own(*SIGHT, dp=2, first=1),))
    (told,) = ask_job(plan, job_of("llava"))
    assert told.startswith("a replica of all other modules runs a microbatch as 2 batches of 1 sample, because")


def test_check_ends_with_one_where_the_job_does_not_run(folder: Path) -> None:
    plan, file = cut(scenario_of("llava", folder), "llm.0", tp=2), folder / "plan.json"
    save_plan(plan, file)
    with patch("mmplan.planner.check.check_plan", return_value=()):  # made by hand, without memory
        for job, code in (("llava_job.py", 0), ("dropout_job.py", 1)):
            answer = folder / "answer.json"
            run = CliRunner().invoke(app, ["check", str(file), "--job", str(HERE / job), "--json", str(answer)])
            assert run.exit_code == code, run.output
            assert (json.loads(answer.read_text())["not_executed"] is None) == (code == 0)
    with pytest.raises(InputError, match="no such file"):
        why_not_run(plan, folder / "nowhere.py", None)


def test_threads_exchange_what_processes_would() -> None:
    threads, ranks = Threads(), (0, 1, 2)

    def work(rank: int) -> tuple[list[float], ...]:
        group = ThreadGroup(threads, threads.meeting(ranks), rank)
        total = torch.tensor([float(rank)])
        all_reduce(total, group)
        rows = gather_rows(torch.full((rank, 1), float(rank)), (0, 1, 2), group)
        received = torch.empty(rank * 3, 1)
        all_to_all(received, torch.full((3, 1), float(rank)), [rank] * 3, [0, 1, 2], group)
        (before,) = pass_on([torch.tensor([float(rank)])], group).there()
        return total.tolist(), rows.flatten().tolist(), received.flatten().tolist(), before.tolist()

    found = threads.run(ranks, work)
    assert found == [
        ([3.0], [1.0, 2.0, 2.0], [], [2.0]),
        ([3.0], [1.0, 2.0, 2.0], [0.0, 1.0, 2.0], [0.0]),
        ([3.0], [1.0, 2.0, 2.0], [0.0, 0.0, 1.0, 1.0, 2.0, 2.0], [1.0]),
    ]


def test_an_error_of_one_rank_ends_those_that_wait_for_it() -> None:
    threads, ranks, before = Threads(), (0, 1), threading.active_count()

    def work(rank: int) -> None:
        if rank == 1:
            raise InputError("one says no")
        all_reduce(torch.zeros(1), ThreadGroup(threads, threads.meeting(ranks), rank))

    with pytest.raises(InputError, match="one says no"):
        threads.run(ranks, work)
    assert threading.active_count() == before
