"""Real models whose experts lie on several of four processes against the whole model in one: loss, gradients, bytes."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from case_processes import run_on_ranks
from job_expert_cases import expert_plans, run_expert_cases
from job_plan_cases import PLANS, PROCESSES, job_of, require_gradients

from mmplan.planner.plan import Plan
from mmplan.runtime.ghost.model import saved_buffers

pytestmark = pytest.mark.distributed

NAMES = (
    "an expert on each rank",
    "two replicas of experts, ZeRO-3",
    "shared experts in two stages, ZeRO-2, recomputed",
    "over tensor-parallel ranks",
    "over a half of tensor-parallel ranks",
    "zeros for experts that are not chosen",
    "zeros, over tensor-parallel ranks and replicas",
    "images before experts, ZeRO-3",
    "frozen experts",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def plans(folder: Path) -> dict[str, tuple[str, Plan]]:
    return expert_plans(folder)


@pytest.fixture(scope="module")
def results(folder: Path, plans: dict[str, tuple[str, Plan]]) -> dict[str, list[Any]]:
    torch.save(plans, folder / PLANS)
    ranks = run_on_ranks(run_expert_cases, PROCESSES, folder)
    return {name: [rank[name] for rank in ranks] for name in plans}


def test_every_plan_is_named(plans: dict[str, tuple[str, Plan]]) -> None:
    assert tuple(plans) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_gradient_is_that_of_the_model_in_one_process(
    name: str, plans: dict[str, tuple[str, Plan]], results: dict[str, list[Any]]
) -> None:
    require_gradients(*plans[name], results[name])


@pytest.mark.parametrize("name", NAMES)
def test_ranks_have_some_experts_and_exchange_the_bytes_of_their_programs(
    name: str, plans: dict[str, tuple[str, Plan]], results: dict[str, list[Any]]
) -> None:
    """Rows at experts too: a stage ends a run that exchanges others than are foreseen (`GhostStage`)."""
    model = job_of(plans[name][0]).model()
    whole = {key: p.numel() for key, p in model.named_parameters() if ".experts." in key}
    held: Counter[str] = Counter()
    for rank in results[name]:
        assert rank.moved_bytes == rank.planned_bytes
        for part in rank.parts:
            held[part.name] += part.gradient.numel() if part.name in whole else 0
    plan = plans[name][1]
    copies = plan.dp * plan.tp // plan.ep if plan.sharding == "none" else 1  # replicas share out their state
    assert +held == {key: size * copies for key, size in whole.items()}


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_have_every_element_once(
    name: str, plans: dict[str, tuple[str, Plan]], results: dict[str, list[Any]]
) -> None:
    written: Counter[str] = Counter()
    for rank in results[name]:
        written += Counter(rank.written)
    model = job_of(plans[name][0]).model()
    held = {part.name for rank in results[name] for part in rank.parts}
    expected = {key: p.numel() for key, p in model.named_parameters() if key in held}
    assert written == expected | {key: buffer.numel() for key, buffer in saved_buffers(model).items()}
