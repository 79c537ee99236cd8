"""Plans of real models whose experts lie on several ranks, and the code that their four processes run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from job_plan_cases import cut, scenario_of, with_training
from job_plan_runs import PROCESSES, job_process
from torch import Tensor, nn

from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.runtime.ghost.expert_flow import Experts, find_experts
from mmplan.runtime.ghost.expert_trials import find_expert_splits, require_equal_calls
from mmplan.runtime.ghost.recording import Recorder, Recording
from mmplan.runtime.ghost.units import find_units
from mmplan.runtime.ghost.weightless import build_weightless
from mmplan.runtime.tensor_sums import ExpertRanks, TensorRanks


def expert_plans(folder: Path) -> dict[str, tuple[str, Plan]]:
    """Name -> family and plan."""
    names = ("mixtral", "qwen2_moe", "deepseek_v3", "llama4", "qwen3_vl_moe")
    mixtral, shared, deepseek, llama, vision = (scenario_of(name, folder) for name in names)
    frozen = with_training(vision, "llm", "frozen")
    return {
        "an expert on each rank": ("mixtral", cut(mixtral, dp=4, ep=4)),
        "two replicas of experts, ZeRO-3": ("mixtral", cut(mixtral, dp=4, ep=2, sharding="parameters")),
        "shared experts in two stages, ZeRO-2, recomputed": (
            "qwen2_moe",
            cut(shared, "llm.0", dp=2, ep=2, sharding="gradients", recompute="full"),
        ),
        "over tensor-parallel ranks": ("deepseek_v3", cut(deepseek, "llm.0", tp=2, ep=2)),
        "over a half of tensor-parallel ranks": ("deepseek_v3", cut(deepseek, tp=4, ep=2)),
        "zeros for experts that are not chosen": ("llama4", cut(llama, dp=4, ep=2, sharding="optimizer")),
        "zeros, over tensor-parallel ranks and replicas": ("llama4", cut(llama, tp=2, dp=2, ep=4)),
        "images before experts, ZeRO-3": (
            "qwen3_vl_moe",
            cut(vision, "llm.0", dp=2, ep=2, sharding="parameters"),
        ),
        "rows, over all ranks, ZeRO-3": ("mixtral", cut(mixtral, dp=2, cp=2, ep=4, sharding="parameters")),
        "rows, tensor parallel, recomputed": ("deepseek_v3", cut(deepseek, tp=2, cp=2, ep=2, recompute="full")),
        "frozen experts": ("qwen3_vl_moe", cut(frozen, "llm.0", dp=2, ep=2)),
    }


class Routed(nn.Module):
    """Two experts of each token, of four that are one's own."""

    def __init__(self, expert: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList([expert() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(1).topk(2)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            total = total.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return x + total


class RoutedBlocks(nn.Module):
    def __init__(self, expert: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Routed(expert), Routed(expert)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Centred(nn.Linear):
    """Not a function of each row alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def recorded(expert: Callable[[], nn.Module]) -> tuple[Recorder, Recording]:
    model = build_weightless(lambda: RoutedBlocks(expert))
    recorder = Recorder(model, find_units(model))
    return recorder, recorder.record({"x": torch.randn(40, 8)})


def told_of(expert: Callable[[], nn.Module], ranks: TensorRanks, rank: int) -> str:
    """How the first block's experts are shared, or why not."""
    recorder, _ = recorded(expert)
    found = find_experts(recorder.unit("blocks.0"), *recorder.arguments[recorder.form("blocks.0")], 4)
    assert isinstance(found, Experts)
    try:
        split = find_expert_splits(recorder, {"blocks.0": found}, {}, ranks, rank, torch.device("cpu"))["blocks.0"]
    except InputError as error:
        return str(error)
    return f"{split.experts.form}, {split.topk}"


def told_of_calls(ranks: TensorRanks, rank: int) -> list[str]:
    """What is said of steps whose microbatches use other blocks on each rank, and the same."""
    _, recording = recorded(lambda: nn.Linear(8, 8))
    fewer = replace(recording, calls=recording.calls[rank:])
    found = []
    for one in (fewer, recording):
        try:
            require_equal_calls([one], {"blocks.0", "blocks.1"}, ranks, torch.device("cpu"))
            found.append("")
        except InputError as error:
            found.append(str(error))
    return found


def run_expert_cases(rank: int, folder: str) -> None:
    """Body of one of the four processes; writes its results to `folder`."""
    with job_process(rank, folder) as results:
        alone = [dist.new_group([one]) for one in range(PROCESSES)]
        pair = dist.new_group([0, 1])
        if rank < 2:
            experts = ExpertRanks(degree=2, tp=1, index=rank, group=pair, replicas=None)
            ranks = TensorRanks(degree=1, index=0, group=alone[rank], experts=experts)
            kinds: dict[str, Callable[[], nn.Module]] = {
                "linear": lambda: nn.Linear(8, 8),
                "centred": lambda: Centred(8, 8),
                "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
            }
            results["own"] = {name: told_of(expert, ranks, rank) for name, expert in kinds.items()}
            results["calls"] = told_of_calls(ranks, rank)
