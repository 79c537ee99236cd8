"""Real models whose experts lie on several of four processes against the whole model in one: loss, gradients, bytes."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from case_processes import run_on_ranks
from job_expert_cases import expert_plans, run_expert_cases
from job_plan_cases import cut, job_of, scenario_of
from job_plan_runs import PROCESSES, require_gradients, require_written_once
from safetensors.torch import load_file
from tiny_plans import tiny_scenario
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.runtime.ghost.expert_flow import find_experts
from mmplan.runtime.ghost.job import functions_of
from mmplan.runtime.ghost.refusals import refuse_plan
from mmplan.runtime.ghost.weightless import build_weightless, set_parameter
from mmplan.runtime.launch import execute
from mmplan.runtime.run_options import Checkpoints
from mmplan.scenario.scenario import Optimizer

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("at_hand")]

NAMES = (
    "an expert on each rank",
    "two replicas of experts, ZeRO-3",
    "shared experts in two stages, ZeRO-2, recomputed",
    "over tensor-parallel ranks",
    "over a half of tensor-parallel ranks",
    "zeros for experts that are not chosen",
    "zeros, over tensor-parallel ranks and replicas",
    "images before experts, ZeRO-3",
    "rows, over all ranks, ZeRO-3",
    "rows, tensor parallel, recomputed",
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
    ranks = run_on_ranks(run_expert_cases, PROCESSES, folder, plans)
    return {name: [rank[name] for rank in ranks] for name in plans} | {
        name: [rank[name] for rank in ranks[:2]] for name in ("own", "calls")
    }


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
            held[part.name] += part.values.numel() if part.name in whole else 0
    plan = plans[name][1]
    copies = plan.dp * plan.width // plan.ep if plan.sharding == "none" else 1  # replicas share out their state
    assert +held == {key: size * copies for key, size in whole.items()}


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_have_every_element_once(
    name: str, plans: dict[str, tuple[str, Plan]], results: dict[str, list[Any]]
) -> None:
    require_written_once(plans[name][0], results[name])


def test_experts_of_one_s_own_are_shared_where_a_trial_is_right(results: dict[str, list[Any]]) -> None:
    first, second = results["own"]
    assert first == second
    assert first["linear"] == "listed, 2"
    place = r"job_expert_cases\.py:\d+: the plan has ep=2, and the experts of 'blocks\.0' \(Routed\) cannot be shared: "
    assert re.search(place + r"output 0 differs when it is split: set `constraints\.ep: \[1\]`", first["centred"])
    assert "'blocks.0' draws random numbers (dropout), which ranks that share its experts would" in first["dropout"]


def test_replicas_whose_microbatches_use_other_blocks_are_told_before_they_wait(results: dict[str, list[Any]]) -> None:
    for different, same in results["calls"]:
        assert "their microbatches of one step do not use the same blocks" in different
        assert not same


class TwoArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ModuleList([nn.Bilinear(8, 8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x, x) for expert in self.list]).sum(0)


class Stacked(nn.Module):
    """Called with rows that are sorted and cut already."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 8, 8))

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        return torch.cat([rows @ one for rows, one in zip(x.tensor_split(4), self.weight, strict=True)])


class Sorted(nn.Module):
    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({f"part{index}": Stacked() for index in range(count)})

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x, torch.full((4,), 2))
        return x


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (nn.Linear(8, 8), "no module has 4 experts along the first dim of its parameters, or as a list"),
        (TwoArguments(), "the experts in 'list' are called with more than their rows"),
        (Sorted(), "'parts.part0' is not called with rows, chosen experts and weights, or with a row for every"),
        (Sorted(2), "several modules have 4 experts each: parts.part0 and parts.part1"),
    ],
)
def test_experts_that_are_not_understood_are_named(block: nn.Module, reason: str) -> None:
    weightless = build_weightless(lambda: block)
    for name, parameter in list(weightless.named_parameters()):
        set_parameter(weightless, name, nn.Parameter(torch.empty_like(parameter, device="meta")))
    found = find_experts(weightless, (torch.empty(8, 8, device="meta"),), {}, 4)
    assert isinstance(found, str) and found.startswith(reason)


def test_what_experts_of_jobs_cannot_have_beside_them_is_refused() -> None:
    plan = replace(cut(tiny_scenario(), dp=2), ep=2)
    with pytest.raises(InputError, match=r"etp=2, and experts of your own model lie whole on each of their ranks"):
        refuse_plan(replace(plan, tp=2, etp=2))
    compressed = replace(plan.scenario, technique=replace(plan.scenario.technique, compression="topk"))
    with pytest.raises(InputError, match=r"compresses gradients \(topk\) and has ep=2, .*`constraints\.ep: \[1\]` or"):
        refuse_plan(replace(plan, scenario=compressed))


def test_a_run_goes_on_with_experts_on_other_ranks_and_saves_them(folder: Path) -> None:
    adam = Optimizer(name="adamw", learning_rate=0.01)
    scenario = replace(scenario_of("mixtral", folder), optimizer=adam)
    shares = {"job": Path(__file__).parent / "mixtral_job.py", "timeout_s": 90.0}
    alone, moved, saved = folder / "alone", folder / "moved", folder / "checkpoints"
    execute(cut(scenario), local=1, steps=3, save_weights=alone, **shares)
    first = cut(scenario, dp=2, ep=2, sharding="optimizer")
    execute(first, local=2, steps=2, checkpoints=Checkpoints(folder=saved), **shares)
    again = Checkpoints(folder=saved, resume=saved)
    execute(cut(scenario, tp=2, ep=2), local=2, steps=3, checkpoints=again, save_weights=moved, **shares)
    expected, found = (
        {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()} for path in (alone, moved)
    )
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].allclose(value, atol=1e-3), key  # an Adam step is at most 0.01 long
    run = execute(first, local=2, steps=1, weights=alone, **shares)
    assert run is not None
    model = AutoModelForCausalLM.from_pretrained(alone)
    batches = [one for one, _ in zip(functions_of(shares["job"], "batches")["batches"](1), range(4), strict=False)]
    counts = [one["labels"].numel() - len(one["labels"]) for one in batches]
    with torch.no_grad():
        loss = sum(float(model(**one).loss) * n for one, n in zip(batches, counts, strict=True)) / sum(counts)
    assert run.steps[0].losses["llm"] == pytest.approx(loss, rel=1e-5)
