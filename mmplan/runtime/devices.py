"""Where a process computes, and over which library its tensors travel."""

import os

import torch

from mmplan.errors import InputError
from mmplan.planner.plan import Plan


def run_device(plan: Plan, *, rehearse: bool, share: bool = False) -> torch.device:
    """This process's CUDA device; the CPU to sleep on, for a plan for CPUs, and on a machine without CUDA.

    Args:
        share: processes may be more than devices; they take them in turn.

    Raises:
        InputError: there are CUDA devices, but fewer than processes: NCCL refuses two ranks on one device.
    """
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    for_cpu = all(pool.device.name.startswith("cpu") for pool in plan.scenario.cluster.pools)
    count = 0 if rehearse or for_cpu else torch.cuda.device_count()
    if count == 0:
        return torch.device("cpu")
    if count < local_world and not share:
        raise InputError(
            f"{local_world} processes on this machine, and {count} CUDA devices: start one process for each device, "
            "give --share-devices (over gloo, for a check), set CUDA_VISIBLE_DEVICES= (empty) to compute on the CPU, "
            "or rehearse the plan"
        )
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


def backend_of(device: torch.device, *, share: bool) -> str:
    """NCCL between GPUs of their own; gloo between processes that share one, and on CPUs."""
    return "nccl" if device.type == "cuda" and not share else "gloo"
