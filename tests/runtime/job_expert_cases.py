"""Plans of real models whose experts lie on several ranks, and the code that their four processes run."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from job_plan_cases import PLANS, PROCESSES, cut, run_job_rank, scenario_of, with_training

from mmplan.planner.plan import Plan


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
        "frozen experts": ("qwen3_vl_moe", cut(frozen, "llm.0", dp=2, ep=2)),
    }


def run_expert_cases(rank: int, folder: str) -> None:
    """Body of one of the four processes; writes its results to `folder`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=90))
    plans = torch.load(Path(folder) / PLANS, weights_only=False)
    world, results = dist.new_group(range(PROCESSES)), dict[str, Any]()
    for name, (family, plan) in plans.items():
        results[name] = run_job_rank(family, plan, rank, world)
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
