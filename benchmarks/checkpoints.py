"""What saving costs training: seconds it stands still for a checkpoint that a thread writes, and for one it waits for.

    python benchmarks/checkpoints.py      # writes benchmarks/checkpoints.csv

Two processes on this machine train a language model whose state has the given size; a checkpoint every second step.
`waited` is the same run, except that every save waits until the checkpoint is there. Ratios are to a step without a
checkpoint behind it, of the medians. `load` is the load average before the run.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
import torch.distributed as dist
from measured import MACHINE, ROOT, write_rows
from torch import multiprocessing

from mmplan.planner.plan import Plan, load_plan, save_plan
from mmplan.planner.search import optimize
from mmplan.runtime.checkpoint.before_run import checkpoint_bytes
from mmplan.runtime.checkpoint.options import Checkpoints
from mmplan.runtime.checkpoint.run_checkpoints import RunCheckpoints
from mmplan.runtime.measurement import Measurement, StepMeasurement, load_run, save_run
from mmplan.runtime.run_options import RunOptions
from mmplan.runtime.worker import run_worker
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Distribution

RANKS, EVERY, STEPS = 2, 2, 9
WIDTHS = {"small": 256, "large": 1024}  # of the language model
SAVE = RunCheckpoints.save_if_due


def plan_of(width: int) -> Plan:
    scenario = load_scenario(ROOT / "scenarios" / "tiny.yaml")
    llm = scenario.model.module("llm")
    assert llm.transformer is not None
    shape = replace(llm.transformer, hidden=width, ffn=3 * width, head_dim=width // 4, layers=4)
    model = replace(scenario.model, modules=(replace(llm, transformer=shape),), edges=())
    data = replace(scenario.data, text_tokens=Distribution(values=(64.0,), weights=(1.0,)))
    constraints = replace(scenario.constraints, pp=(2,), dp=(1,), tp=(1,))
    return optimize(replace(scenario, model=model, data=data, global_batch=8, constraints=constraints)).plan


def save_and_wait(self: RunCheckpoints, step: int, steps: Sequence[StepMeasurement]) -> None:
    SAVE(self, step, steps)
    self._settle()


def one_process(rank: int, folder: str) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    join, plan = dist.init_process_group, load_plan(Path(folder) / "plan.json")
    # torchrun's store, that of the first process here.
    places = dist.FileStore(f"{folder}/places", -1)
    if rank == 0:
        agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        places.set("port", str(agent.port))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["MASTER_PORT"] = places.get("port").decode()
    for mode in ("written by a thread", "waited for"):
        store, checkpoints = dist.FileStore(f"{folder}/store {mode}", RANKS), Path(folder) / mode
        checkpoints.mkdir(exist_ok=True)
        options = RunOptions(steps=STEPS, checkpoints=Checkpoints(folder=checkpoints, every=EVERY, keep=1))

        def init(backend: str, timeout: timedelta, store: dist.Store = store) -> None:
            join(backend, store=store, rank=rank, world_size=RANKS, timeout=timeout)

        with (
            patch.object(dist, "init_process_group", init),
            patch.object(RunCheckpoints, "save_if_due", save_and_wait if mode == "waited for" else SAVE),
        ):
            run = run_worker(plan, options, None, None, print)
        if run is not None:
            save_run(run, Path(folder) / f"{mode}.json")


def row_of(size: str, mode: str, plan: Plan, run: Measurement, load: float) -> dict[str, object]:
    saved = [checkpoint for checkpoint in run.checkpoints[:-1] if checkpoint.problem is None]
    behind = {checkpoint.step for checkpoint in saved}  # the steps during which the thread writes
    calm_s = median(step.step_time_s for step in run.steps[1:] if step.index not in behind)
    stall_s = median(checkpoint.stall_s for checkpoint in saved)
    return {
        "model": size,
        "mode": mode,
        "ranks": RANKS,
        "state_mib": round(checkpoint_bytes(plan) / 2**20),
        "checkpoints": len(saved),
        "step_s": f"{calm_s:.3f}",
        "stall_s": f"{stall_s:.4f}",
        "write_s": f"{median(checkpoint.write_s for checkpoint in saved):.4f}",
        "stall_of_step": f"{stall_s / calm_s:.4f}",
        "step_behind_of_step": f"{median(run.steps[step].step_time_s for step in behind) / calm_s:.3f}",
        "load": f"{load:.1f}",
        "machine": MACHINE,
    }


def main() -> None:
    rows: list[dict[str, object]] = []
    for size, width in WIDTHS.items():
        with TemporaryDirectory(dir=ROOT / "benchmarks") as folder:  # a disk, where /tmp may be memory
            plan, load = plan_of(width), os.getloadavg()[0]
            save_plan(plan, Path(folder) / "plan.json")
            multiprocessing.start_processes(one_process, args=(folder,), nprocs=RANKS, start_method="spawn")
            for mode in ("written by a thread", "waited for"):
                rows.append(row_of(size, mode, plan, load_run(Path(folder) / f"{mode}.json"), load))
                print(rows[-1], flush=True)
    write_rows("checkpoints.csv", rows)


if __name__ == "__main__":
    main()
