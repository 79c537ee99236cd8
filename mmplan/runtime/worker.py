"""One process of a run: `torchrun --nproc-per-node N -m mmplan.runtime.worker plan.json --steps 10 --out run.json`.

Rank and world size come from torchrun's environment. gloo on CPU; NCCL where every local process has its own CUDA
device. `--scratch` is where a launcher looks for progress, process ids and the error of a rank.
"""

import argparse
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from mmplan.errors import InputError, MmplanError
from mmplan.planner.plan import Plan, load_plan
from mmplan.runtime.clock import Clock, CudaClock, WallClock
from mmplan.runtime.measurement import Measurement, OnStep, save_run
from mmplan.runtime.probe import probe_transfers
from mmplan.runtime.record import RankRun, fastest_step, measurement_of, step_measurement
from mmplan.runtime.rehearse import time_scale
from mmplan.runtime.requirements import DEFAULT_TIMEOUT_S, DEFAULT_UNIT_S, process_count
from mmplan.runtime.train import RankStep, prepare_rehearsal, prepare_training, run_steps

T = TypeVar("T")


def run_worker(
    plan: Plan, *, steps: int, rehearse: bool, unit_s: float, timeout_s: float, on_step: OnStep | None
) -> Measurement | None:
    """Take part in a run; the measurement on rank 0, None elsewhere. Collective over all processes of torchrun.

    Raises:
        InputError: torchrun did not start this process, or the number of its processes does not fit the plan.
        RunError: an action of this rank failed.
    """
    expected = process_count(plan, rehearse=rehearse)
    if "RANK" not in os.environ:
        raise InputError(
            f"this process was not started by torchrun: use --local {expected}, "
            f"or torchrun --nproc-per-node {expected} -m mmplan execute"
        )
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != expected:
        raise InputError(f"torchrun started {world} processes, the plan needs {expected}")
    device = _device(rehearse)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=timeout)
    replicas = _replica_group(plan, rank, timeout)
    hosts: list[str] = [""] * world
    dist.all_gather_object(hosts, socket.gethostname(), group=control)
    clock: Clock = CudaClock(control) if device.type == "cuda" else WallClock(control, one_host=len(set(hosts)) == 1)
    scale = time_scale(plan, unit_s) if rehearse else 1.0
    prepare = prepare_rehearsal(plan, rank, scale) if rehearse else prepare_training(plan, rank, device)

    def tell(step: int, done: RankStep) -> None:
        ranks = _gathered(done, rank, world, control)
        if ranks and on_step is not None:
            totals = step_measurement(step, ranks)
            on_step(step, totals.step_time_s, totals.losses)

    done = run_steps(prepare, steps=steps, replicas=replicas, device=device, clock=clock, on_step=tell)
    ends_s: list[list[float]] = [[]] * world
    dist.all_gather_object(ends_s, [step.timeline[-1].end_s for step in done], group=control)
    recorded = fastest_step(ends_s)
    probed_s = probe_transfers(done[recorded].program, device)
    run = RankRun(steps=tuple(done), probed_s=probed_s, host=hosts[rank], host_cores=_usable_cores())
    runs = _gathered(run, rank, world, control)
    dist.barrier(control)
    dist.destroy_process_group()
    if not runs:
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return measurement_of(plan, runs, recorded, device=name, backend=backend, rehearsed=rehearse, time_scale=scale)


def _gathered(value: T, rank: int, world: int, control: dist.ProcessGroup) -> list[T]:
    """The values of all ranks on rank 0, an empty list elsewhere; collective."""
    values = [value] * world if rank == 0 else None
    dist.gather_object(value, values, dst=0, group=control)
    return values or []


def _device(rehearse: bool) -> torch.device:
    """This process's CUDA device when there is one for each local process (never to sleep), else the CPU."""
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if rehearse or torch.cuda.device_count() < local_world:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _replica_group(plan: Plan, rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """The ranks that hold the same stage. Every rank makes all groups, in one order, as new_group demands."""
    own = None
    for stage in range(plan.pp if plan.dp > 1 else 0):
        ranks = list(range(stage * plan.dp, (stage + 1) * plan.dp))
        group = dist.new_group(ranks, timeout=timeout)
        own = group if rank in ranks else own
    return own


def main(arguments: list[str] | None = None) -> int:
    """Command line of one process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="mmplan.runtime.worker", description="one process of a run, under torchrun")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True, help="run.json, written by rank 0")
    parser.add_argument("--rehearse", action="store_true", help="sleep instead of computing")
    parser.add_argument("--unit-s", type=float, default=DEFAULT_UNIT_S, help="shortest sleep of a forward")
    parser.add_argument("--timeout-s", type=float, default=DEFAULT_TIMEOUT_S, help="of any communication")
    parser.add_argument("--scratch", type=Path, default=None)
    options = parser.parse_args(arguments)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rank = int(os.environ.get("RANK", "0"))
    try:
        if options.scratch is not None:
            (options.scratch / f"pid-{rank}").write_text(str(os.getpid()))
        measurement = run_worker(
            load_plan(options.plan),
            steps=options.steps,
            rehearse=options.rehearse,
            unit_s=options.unit_s,
            timeout_s=options.timeout_s,
            on_step=None if options.scratch is None else _progress_to(options.scratch / "progress.jsonl"),
        )
        if measurement is not None:
            save_run(measurement, options.out)
    except Exception as error:
        if options.scratch is not None:
            failure = {"at_s": time.time(), "rank": rank, "message": _one_line(error), "trace": traceback.format_exc()}
            partial = options.scratch / f"partial-{rank}"
            partial.write_text(json.dumps(failure))
            partial.replace(options.scratch / f"failure-{rank}.json")
        traceback.print_exc()
        return error.exit_code if isinstance(error, MmplanError) else 1
    return 0


def _progress_to(path: Path) -> OnStep:
    def on_step(step: int, step_time_s: float, losses: Mapping[str, float]) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "step_time_s": step_time_s, "losses": losses}) + "\n")

    return on_step


def _one_line(error: Exception) -> str:
    text = str(error) if isinstance(error, MmplanError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


if __name__ == "__main__":
    # Straight out: threads of a communication library must not keep a failed process alive.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
