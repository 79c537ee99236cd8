"""One process of a run that `launch.execute` started by torchrun: `python -m mmplan.runtime.worker FOLDER`.

The folder holds plan.json and options.json; the launcher finds progress, process ids and the error of a rank there, and
run.json in the end. Rank and world size come from torchrun's environment. gloo on CPU; NCCL where the plan is for GPUs
and every process has its own CUDA device.
"""

import argparse
import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from mmplan.errors import EndedError, InputError, MmplanError
from mmplan.planner.modalities import stage_modalities
from mmplan.planner.plan import Plan, load_plan
from mmplan.planner.program import RankProgram
from mmplan.runtime.checkpoint.resume import find_start
from mmplan.runtime.checkpoint.run_checkpoints import RunCheckpoints
from mmplan.runtime.clock import Clock, CudaClock, WallClock
from mmplan.runtime.devices import backend_of, run_device
from mmplan.runtime.failure import described, trace_of
from mmplan.runtime.first_gradients import FirstGradients
from mmplan.runtime.ghost.job import load_job
from mmplan.runtime.ghost.save_weights import save_weights
from mmplan.runtime.ghost.train import JobGroups, prepare_job
from mmplan.runtime.groups import GroupOf, group_maker, peer_pairs, replica_group, tensor_ranks
from mmplan.runtime.health.run_health import RunHealth
from mmplan.runtime.health.run_taps import rank_taps, run_settings
from mmplan.runtime.limits import limits, time_scale
from mmplan.runtime.loss_scaling import LossScaling
from mmplan.runtime.measurement import Measurement, OnNote, OnStep, StepMeasurement, save_run
from mmplan.runtime.network import connect
from mmplan.runtime.places import idle_ranks, listed_ranks, one_process_each, place_of
from mmplan.runtime.position import NO_STEP
from mmplan.runtime.probe import probe_transfers
from mmplan.runtime.record import RankRun, measurement_of
from mmplan.runtime.requirements import process_count, refuse_forms
from mmplan.runtime.run_options import RunOptions, load_options
from mmplan.runtime.stage import Stage
from mmplan.runtime.step_ends import StepEnds
from mmplan.runtime.tensor_sums import TensorRanks
from mmplan.runtime.torchrun import OnFailure
from mmplan.runtime.trace import write_trace
from mmplan.runtime.train import Prepared, prepare_rehearsal, prepare_training, run_steps
from mmplan.runtime.update_check import UpdateCheck
from mmplan.runtime.wait_chain import EVERYBODY
from mmplan.runtime.watch import Watch, Watched, start_watch
from mmplan.scenario.document import counted

T = TypeVar("T")


def run_worker(
    plan: Plan,
    options: RunOptions,
    on_step: OnStep | None,
    on_note: OnNote | None,
    on_failure: OnFailure,
    folder: Path | None = None,
) -> Measurement | None:
    """Take part in a run; the measurement on rank 0, None elsewhere and where no step is left. Collective over all
    processes of torchrun.

    Args:
        on_failure: is told why, by another thread, when the run ends this process while it is stuck somewhere.
        folder: for the positions of ranks of this host; None: a temporary one.

    Raises:
        InputError: torchrun did not start this process, its processes or devices do not fit the plan, or the run cannot
            go on from its checkpoints.
        RunError: this rank or another one failed, or a loss is no number.
    """
    rank, world = _rank_and_world(plan, options)
    limit = limits(plan, options)
    watch = start_watch(
        Watched(
            plan=plan,
            rank=rank,
            world=world,
            limits=limit,
            faults=options.inject,
            on_failure=on_failure,
            folder=folder,
            file=options.failure_file,
            launcher=options.launcher,
        )
    )
    try:
        watch.position.enter("start")
        device = run_device(plan, rehearse=options.rehearse, share=options.share_devices)
        scale = time_scale(plan, options.unit_s) if options.rehearse else 1.0
        watch.meet()
        started = one_process_each(plan) if options.rehearse else plan
        backend = backend_of(device, share=options.share_devices)
        groups = _join(started, rank, device, backend, limit.wait_s)
        note = on_note if on_note is not None and rank == 0 else _nobody
        if idle := () if options.rehearse else idle_ranks(plan):
            note(f"idle, between the meshes: {counted(len(idle), 'rank')} of {world}, the first is {idle[0]}")
        start = find_start(plan, options, note)
        if start.finished and options.save_weights is None:
            _leave(watch)
            return None
        prepared = _prepared(plan, options, rank, device, groups, scale, note, start.samples)
        resumed = start.load(plan, prepared.stages, prepared.scales)
        gradients = None if options.gradients is None else FirstGradients(prepared.stages)
        checkpoints = None
        if options.checkpoints.folder is not None and not start.finished:
            checkpoints = RunCheckpoints(
                plan, options, prepared.stages, prepared.scales, timeout_s=limit.start_wait_s, note=note
            )
        watch.position.enter("start", EVERYBODY)
        dist.barrier()  # stages differ much in size: whoever is ready waits here, not in a step
        run = None
        if not start.finished:
            shown = (on_step, note)
            ends = _take_steps(plan, options, groups, prepared, device, watch, shown, start.steps, checkpoints)
            watch.position.begin(NO_STEP)
            watch.position.enter("end", EVERYBODY)
            run = _measured(plan, options, groups, device, scale, ends)
        if options.gradients is not None and gradients is not None:
            gradients.save(options.gradients / f"rank{rank}.pt")
        if options.save_weights is not None and prepared.model is not None:
            place = place_of(plan, rank)
            save_weights(options.save_weights, prepared.model, prepared.stages, groups.tensor, replica=place.replica)
        _leave(watch)
        return run and replace(run, resumed=resumed)
    except BaseException as error:
        raise watch.ended_by(error) from error


def _rank_and_world(plan: Plan, options: RunOptions) -> tuple[int, int]:
    """What torchrun made of this process, where that fits the plan."""
    expected = process_count(plan, rehearse=options.rehearse, own_model=options.job is not None)
    if options.job is None and not options.rehearse:
        refuse_forms(plan.scenario)
    if "RANK" not in os.environ:
        raise InputError(
            f"this process was not started by torchrun: use --local {expected}, "
            f"or torchrun --nproc-per-node {expected} -m mmplan execute"
        )
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != expected:
        raise InputError(f"torchrun started {world} processes, the plan needs {expected}")
    return rank, world


def _leave(watch: Watch) -> None:
    """Whoever goes first would take the connections of the others with it."""
    dist.barrier()
    watch.close()
    dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Groups:
    """Who talks over what. `network` carries tensors (gloo or NCCL), `control` (gloo) everything else.

    replicas: the ranks that hold the same weights, None without data parallelism; tensor: those that share layers,
    None where every rank has them whole; more: makes others; pairs: ranks that send each other tensors; hosts: of all
    ranks.
    """

    network: dist.ProcessGroup
    control: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    tensor: TensorRanks | None
    more: GroupOf
    pairs: set[tuple[int, int]]
    hosts: list[str]


def _join(plan: Plan, rank: int, device: torch.device, backend: str, timeout_s: float) -> _Groups:
    """The groups of a run, once all processes agree on the kind of device."""
    places = [("", "")] * dist.get_world_size()
    dist.all_gather_object(places, (socket.gethostname(), device.type))
    by_device = {kind: host for host, kind in places}
    if len(by_device) > 1:
        raise InputError(
            f"host {by_device['cuda']} has CUDA devices for its processes, host {by_device['cpu']} has none"
        )
    timeout = timedelta(seconds=timeout_s)
    return _Groups(
        network=dist.new_group(backend=backend, timeout=timeout),
        control=dist.new_group(backend="gloo", timeout=timeout),
        replicas=replica_group(plan, rank, backend, timeout),
        tensor=tensor_ranks(plan, rank, backend, timeout),
        more=group_maker(rank, backend, timeout),
        pairs=peer_pairs(plan),
        hosts=[host for host, _ in places],
    )


def _prepared(
    plan: Plan,
    options: RunOptions,
    rank: int,
    device: torch.device,
    groups: _Groups,
    scale: float,
    note: OnNote,
    samples: int,
) -> Prepared:
    """This rank's part of what is run. `samples`: those of a job's data that were trained on before."""
    if options.rehearse:
        return prepare_rehearsal(plan, rank, scale, groups.replicas, groups.more)
    if options.job is None:
        return prepare_training(plan, rank, device, groups.tensor, groups.replicas, groups.more)
    job = load_job(options.job, options.data)
    own = JobGroups(replicas=groups.replicas, tensor=groups.tensor, more=groups.more)
    return prepare_job(plan, job, rank, device, own, note, options.weights, samples)


def _take_steps(
    plan: Plan,
    options: RunOptions,
    groups: _Groups,
    prepared: Prepared,
    device: torch.device,
    watch: Watch,
    shown: tuple[OnStep | None, OnNote],
    before: tuple[StepMeasurement, ...],
    checkpoints: RunCheckpoints | None,
) -> StepEnds:
    """All steps behind those `before`."""
    rank, control = dist.get_rank(), groups.control
    one_host = len(set(groups.hosts)) == 1
    clock: Clock = CudaClock(control) if device.type == "cuda" else WallClock(control, one_host=one_host)
    modalities = stage_modalities(plan)
    connect(groups.pairs, rank, device, groups.network)
    taps, health = None, None
    if options.health is not None:
        settings = run_settings(plan, prepared.model, options.job, options.health_interval)
        taps = None if rank in idle_ranks(plan) else rank_taps(plan, prepared, settings)
        if rank == 0:
            health = RunHealth(options.health, plan, modalities, settings, one_clock=one_host)
    scaling = None if prepared.scales is None else LossScaling(prepared.scales, prepared.stages)
    skips = options.on_nan == "skip"
    ends = StepEnds(
        options=options,
        control=control,
        listed=range(dist.get_world_size()) if options.rehearse else listed_ranks(plan),
        steps=list(before),
        position=watch.position,
        on_step=shown[0],
        note=shown[1],
        taps=taps,
        health=health,
        scaling=scaling,
        checkpoints=checkpoints,
    )

    def prepare(step: int) -> tuple[RankProgram, Mapping[int, Stage]]:
        if taps is not None:
            taps.begin(step)
        return prepared.step(step)

    run_steps(
        prepare,
        fill=prepared.fill,
        steps=range(len(before), options.steps),
        network=groups.network,
        device=device,
        ranks=groups.tensor,
        clock=clock,
        modalities=modalities,
        position=watch.position,
        check=UpdateCheck(control if skips or scaling is not None else None, scaling, skips_losses=skips),
        on_step=ends.take,
    )
    if health is not None:
        health.close()
    return ends


def _measured(
    plan: Plan, options: RunOptions, groups: _Groups, device: torch.device, scale: float, ends: StepEnds
) -> Measurement | None:
    """The last checkpoint, then the transfers alone, then what all ranks saw, on rank 0; collective."""
    rank, world, control = dist.get_rank(), dist.get_world_size(), groups.control
    saved = () if ends.checkpoints is None else ends.checkpoints.finish()
    recorded = ends.kept.recorded
    assert recorded is not None, "a run has at least one step"
    run = RankRun(
        recorded=recorded,
        actions=ends.kept.statistics(rank),
        probed_s=probe_transfers(recorded.program, device, groups.network),
        host=groups.hosts[rank],
        host_cores=_usable_cores(),
    )
    runs = _gathered(run, rank, world, control)
    if options.trace is not None:
        traces = _gathered(ends.traced, rank, world, control)
        if traces:
            write_trace(traces, stage_modalities(plan), options.trace)
    if not runs:
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    measured = measurement_of(
        plan,
        runs,
        ends.steps,
        ends.kept.recorded_step,
        device=name,
        backend=backend_of(device, share=options.share_devices),
        rehearsed=options.rehearse,
        time_scale=scale,
        own_data=options.job is not None,
    )
    return replace(measured, checkpoints=saved)


def _gathered(value: T, rank: int, world: int, control: dist.ProcessGroup) -> list[T]:
    """The values of all ranks on rank 0, an empty list elsewhere; collective."""
    values = [value] * world if rank == 0 else None
    dist.gather_object(value, values, dst=0, group=control)
    return values or []


def _usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(arguments: list[str] | None = None) -> int:
    """Command line of one process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="mmplan.runtime.worker", description="one process of a run, under torchrun")
    parser.add_argument("scratch", type=Path)
    scratch: Path = parser.parse_args(arguments).scratch
    options = load_options(scratch / "options.json")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rank = int(os.environ.get("RANK", "0"))

    def report(message: str, trace: str = "", *, first: bool = True) -> None:
        partial = scratch / f"partial-{rank}"
        partial.write_text(json.dumps({"rank": rank, "message": message, "trace": trace, "first": first}))
        partial.replace(scratch / f"failure-{rank}.json")

    try:
        (scratch / f"pid-{rank}").write_text(str(os.getpid()))
        told = scratch / "progress.jsonl"
        plan = load_plan(scratch / "plan.json")
        measurement = run_worker(plan, options, _steps_to(told), _notes_to(told), report, scratch)
        if measurement is not None:
            save_run(measurement, scratch / "run.json")
    except BaseException as error:
        report(str(error) or described(error), trace_of(error), first=not isinstance(error, EndedError))
        traceback.print_exc()
        return error.exit_code if isinstance(error, MmplanError) else 1
    return 0


def _steps_to(path: Path) -> OnStep:
    def on_step(step: int, step_time_s: float, losses: Mapping[str, float]) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "step_time_s": step_time_s, "losses": losses}) + "\n")

    return on_step


def _notes_to(path: Path) -> OnNote:
    def on_note(text: str) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"note": text}) + "\n")

    return on_note


def _nobody(text: str) -> None:
    """Hears the notes of ranks that are not to speak."""


if __name__ == "__main__":
    # Straight out: threads of a communication library must not keep a failed process alive.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
