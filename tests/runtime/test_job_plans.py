"""Real models under plans on up to four processes against the whole model in one: loss, every gradient, bytes."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from case_processes import chosen, run_on_ranks
from job_fault_cases import FAULTS
from job_plan_cases import SPLIT, STATISTICS, job_plans
from job_plan_runs import (
    MORE_PROCESSES,
    PROCESSES,
    require_buffers,
    require_gradients,
    require_written_once,
    run_job_cases,
    run_uneven_jobs,
)
from meshed_job_cases import meshed_jobs, uneven_jobs

from mmplan.planner.plan import Plan

pytestmark = pytest.mark.distributed

UNEVEN = (
    "LLaVA, 3 replicas of the tower beside 2, ZeRO-3",
    "LLaVA, 2 replicas of the tower beside 3, recomputed",
    "LLaVA, slices to rows on 2 x tp 2",
)
MIXED = (
    "own model as recorded, in four stages",
    "Qwen2-Audio as recorded, in two stages",
    "adapters, ZeRO-3",
    "a tower in bf16, cut inside, ZeRO-3, recomputed",
    "LLaVA in two stages, ZeRO-3, recomputed",
    "Gemma 3, tied over stages, ZeRO-3",
    "Gemma 3, tied over stages, tensor parallel",
    "LLaVA in two stages, rows, split backwards",
    "images in turn, tensor parallel, split backwards",
    "an encoder as recorded in bf16",
    "Gemma 3, tied, tensor parallel, ZeRO-3",
    "DeepStack, sequence parallel, recomputed, ZeRO-1",
    "Gemma 3, tied over stages, sequence parallel, split backwards",
    "frozen tower, rows on four ranks",
    "frozen language model in two stages, rows",
    "Gemma 3 in two stages, rows gathered",
    "Qwen2.5-VL, rows gathered, recomputed",
    "cross-attention, rows, tensor parallel, ZeRO-3, recomputed",
    "cut inside the tower, images in turn, ZeRO-3, recomputed",
    "frozen tower, images in turn on four ranks",
    "Qwen2-Audio, clips in turn, ZeRO-2",
    "LLaVA, tower on ranks of its own, ZeRO-3",
    "LLaVA, tower on tp 2, language model on 2 replicas",
    "LLaVA, tower cut in two, language model on 2 replicas",
    "LLaVA, 3 replicas of the tower, ZeRO-2",
    "LLaVA, a frozen tower beside 3 replicas",
    "LLaVA, a tower, a rank idle",
    "LLaVA, slices to tp 2",
    "LLaVA, slices from tp 2",
    "LLaVA, tower on 2 replicas, language model on tp 2",
    "LLaVA, tower on 2 replicas, rows over tp",
    "cross-attention, slices from tp 2 to rows",
    "Qwen2.5-VL, tower on 2 replicas, rows gathered",
    "Qwen2-Audio, clips on tp 2, broadcasts",
    "Gemma 3, tied over stages, a tower of its own",
    "DeepStack, tower on 2 replicas, slices to tp 2",
    "a tower on tp 2 beside experts over 2 replicas, ZeRO-3",
    *UNEVEN,
)
EVERY = (
    "LLaVA, ZeRO-3",
    "LLaVA in two stages, ZeRO-2",
    "LLaVA in two stages, ZeRO-3, recomputed",
    "Gemma 3, tied, ZeRO-3",
    "Gemma 3, tied over stages",
    "Gemma 3, tied over stages, ZeRO-3",
    "a head in glue, ZeRO-3",
    "Gemma 3, tied over four stages",
    "Gemma 3, tied over chunks",
    "two shared sets over chunks",
    "LLaVA in two stages, tensor parallel, attention recomputed",
    "LLaVA in two stages, sequence parallel",
    "DeepStack, sequence parallel, recomputed, ZeRO-1",
    "cross-attention, sequence parallel",
    "Gemma 3, tied over stages, sequence parallel, split backwards",
    "LLaVA in two stages, tensor parallel, split backwards",
    "LLaVA in two stages, rows, split backwards",
    "images in turn, tensor parallel, split backwards",
    "LLaVA, four tensor-parallel ranks",
    "frozen tower, tensor parallel, ZeRO-3",
    "Gemma 3, tied over stages, tensor parallel",
    "Gemma 3, tied, tensor parallel, ZeRO-3",
    "DeepStack, tensor parallel, ZeRO-3",
    "cross-attention, tensor parallel, ZeRO-3, recomputed",
    "LLaVA in two stages, rows, ZeRO-3",
    "frozen tower, rows on four ranks",
    "Gemma 3, tied over stages, rows",
    "a head in glue, rows, ZeRO-1",
    "Qwen2.5-VL, rows, recomputed",
    "DeepStack in two stages, rows",
    "frozen language model in two stages, rows",
    "frozen language model in two stages, tensor parallel",
    "LLaVA, rows for heads, recomputed",
    "Gemma 3 in two stages, rows for heads",
    "Gemma 3 in two stages, rows gathered",
    "Qwen2.5-VL, rows gathered, recomputed",
    "Gemma 3, rows, tensor parallel",
    "cross-attention, rows, tensor parallel, ZeRO-3, recomputed",
    "LLaVA in two stages, images in turn",
    "cut inside the tower, images in turn, ZeRO-3, recomputed",
    "frozen tower, images in turn on four ranks",
    "Qwen2.5-VL, images in turn, rows, tensor parallel",
    "Qwen2-Audio, clips in turn, ZeRO-2",
    "own model as recorded, in two stages",
    SPLIT,
    "own model as recorded, in two stages, tensor parallel",
    "Qwen2-Audio as recorded, in two stages, tensor parallel, recomputed",
    "own model as recorded, in four stages",
    STATISTICS,
    "Whisper as recorded, tied over stages, ZeRO-3",
    "Qwen2-Audio as recorded, in two stages",
    "a tower in bf16, in two stages, ZeRO-1",
    "a tower in bf16, cut inside, ZeRO-3, recomputed",
    "an encoder as recorded in bf16",
    "adapters in two stages",
    "adapters, ZeRO-3",
    "adapters, tensor parallel, ZeRO-2",
    "cross-attention, rows, ZeRO-3, recomputed",
    "LLaVA, tower on ranks of its own, ZeRO-3",
    "LLaVA, tower on 2 replicas, language model on tp 2",
    "LLaVA, tower on tp 2, language model on 2 replicas",
    "LLaVA, tower on 2 replicas, a chain of two stages, ZeRO-3, recomputed",
    "LLaVA, tower cut in two, language model on 2 replicas",
    "LLaVA, 3 replicas of the tower, ZeRO-2",
    "LLaVA, a frozen tower beside 3 replicas",
    "LLaVA, a tower, a rank idle",
    "LLaVA, slices to tp 2",
    "LLaVA, broadcasts to tp 2",
    "LLaVA, slices from tp 2",
    "LLaVA, tower on 2 replicas, rows",
    "LLaVA, tower on 2 replicas, rows over tp",
    "cross-attention, slices from tp 2 to rows",
    "Qwen2.5-VL, tower on 2 replicas, rows gathered",
    "Qwen2-Audio, clips on tp 2, broadcasts",
    "Gemma 3, tied over stages, a tower of its own",
    "DeepStack, tower on 2 replicas, slices to tp 2",
    "a tower on tp 2 beside experts over 2 replicas, ZeRO-3",
    *UNEVEN,
)
NAMES = tuple(chosen(dict.fromkeys(EVERY), MIXED))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def plans(folder: Path) -> dict[str, tuple[str, Plan]]:
    return chosen(job_plans(folder) | meshed_jobs(folder) | uneven_jobs(folder), MIXED)


@pytest.fixture(scope="module")
def results(folder: Path, plans: dict[str, tuple[str, Plan]]) -> dict[str, list[Any]]:
    even = {name: plan for name, plan in plans.items() if name not in UNEVEN}
    ranks = run_on_ranks(run_job_cases, PROCESSES, folder, even)
    found = {name: [rank[name] for rank in ranks] for name in (*even, *FAULTS)}
    if uneven := {name: plan for name, plan in plans.items() if name in UNEVEN}:
        (folder / "uneven").mkdir()
        more = run_on_ranks(run_uneven_jobs, MORE_PROCESSES, folder / "uneven", uneven)
        found |= {name: [rank[name] for rank in more] for name in uneven}
    return found | {"splits": [ranks[0]["splits"], ranks[1]["splits"]]}


def test_every_plan_is_named(plans: dict[str, tuple[str, Plan]]) -> None:
    assert tuple(plans) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_gradient_is_that_of_the_model_in_one_process(
    name: str, plans: dict[str, tuple[str, Plan]], results: dict[str, list[Any]]
) -> None:
    require_gradients(*plans[name], results[name])


@pytest.mark.parametrize("fault", FAULTS)
def test_errors_put_in_on_purpose_are_caught(
    fault: str, plans: dict[str, tuple[str, Plan]], results: dict[str, list[Any]]
) -> None:
    with pytest.raises(AssertionError, match=r"^[\w.]+: relative error \d"):
        require_gradients(*plans[SPLIT], results[fault])


@pytest.mark.parametrize("name", NAMES)
def test_ranks_exchange_the_bytes_of_their_programs(name: str, results: dict[str, list[Any]]) -> None:
    for rank in results[name]:
        assert rank.moved_bytes == rank.planned_bytes


def test_each_set_of_stages_that_share_something_has_a_sum_of_its_own(results: dict[str, list[Any]]) -> None:
    """Of four chunks the first and the last share a norm, the second and the last, on one rank, a table."""
    assert [rank.ties for rank in results["two shared sets over chunks"]] == [1, 1, 2, 2]
    assert [rank.ties for rank in results["Gemma 3, tied over four stages"]] == [0, 1, 0, 1]
    assert not any(rank.ties for rank in results["Gemma 3, tied, ZeRO-3"])


@pytest.mark.parametrize("name", [name for name in NAMES if "split backwards" in name])
def test_weight_gradients_of_shared_layers_wait_for_their_turn(name: str, results: dict[str, list[Any]]) -> None:
    """Of 4 microbatches, in each stage: of the language model's second block and the head, or of the first and more. Of
    one's own model 2 replicas have 2 each: weights and biases of the bridge and of a block's two linears, or more."""
    least = 2 * 6 if name == SPLIT else 4 * 8
    assert all(rank.postponed >= least for rank in results[name])


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_have_every_element_once(
    name: str, plans: dict[str, tuple[str, Plan]], results: dict[str, list[Any]]
) -> None:
    require_written_once(plans[name][0], results[name])


def test_running_statistics_see_each_microbatch_once(
    plans: dict[str, tuple[str, Plan]], results: dict[str, list[Any]]
) -> None:
    """Neither the recording before the run nor the recomputation counts; what replicas have each their own is told."""
    require_buffers(*plans[STATISTICS], results[STATISTICS])
    (told,) = results[STATISTICS][0].notes
    assert "running_mean, running_var, num_batches_tracked of blocks.0.norm (" in told and "normed_job.py:18)" in told
    assert "; running_mean, running_var, num_batches_tracked of blocks.1.norm (" in told and "blocks.2" not in told
    assert "the ranks of dp=2 have each their own" in told


@pytest.mark.parametrize("name", [name for name in NAMES if "tensor" in name])
def test_blocks_of_every_kind_are_shared_where_their_heads_can_be(name: str, results: dict[str, list[Any]]) -> None:
    for rank in results[name]:
        assert rank.split > 0
        told = [text for text in rank.notes if re.search(r"blocks.*\.0: (.*) \(|layers\.0: (.*) \(", text)]
        assert len(told) == (2 if "four" in name else 0), rank.notes  # heads for two ranks in both towers


def test_what_is_wrong_when_it_is_split_stays_whole(results: dict[str, list[Any]]) -> None:
    first, second = results["splits"]
    assert first == second
    assert first["softmax"] == (["blocks.0"], ("blocks.1: 1 and 3 (output 0 differs when it is split)",))
    split, whole = first["norm"]  # of all columns, of which a rank has some
    assert split == ["blocks.0"] and "blocks.1: 1 and 3 (RuntimeError: Given normalized_shape=[12]" in whole[0]
    assert first["convolution"] == (["blocks.0", "blocks.1"], ())  # the same for every column
    assert "'blocks.1' draws random numbers (dropout), which ranks that share it" in first["dropout"]
