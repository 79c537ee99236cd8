"""Faults on purpose in whole runs: all ranks end, and the message names rank, host, step, action and cause."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_plans import AUDIO, TWO_STAGES, VISION, hand_plan, tiny_scenario

from mmplan.errors import RunError
from mmplan.planner.plan import Plan, save_plan
from mmplan.runtime.inject import parse_injection
from mmplan.runtime.launch import execute

pytestmark = pytest.mark.distributed


def two_stage_plan() -> Plan:
    return hand_plan(replace(tiny_scenario(), global_batch=4), TWO_STAGES)


def failure(fault: str, plan: Plan, **options: object) -> str:
    """What a run with the fault says."""
    with pytest.raises(RunError) as caught:
        execute(plan, steps=4, local=plan.rank_count, inject=[parse_injection(fault)], **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_rank_that_raises_is_named_and_its_traceback_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "run.failure.txt"
    told = failure("raise rank=0 step=2 action=B1", two_stage_plan(), failure_file=file)
    host = os.uname().nodename
    assert told.startswith(f"rank 0 ({host}), step 2, B(1) of stage 0: InjectedError: injected by --inject; ")
    assert str(file) in told
    assert "Traceback (most recent call last):" in file.read_text()


def test_a_killed_rank_is_named_with_its_signal_and_where_it_was() -> None:
    told = failure("kill rank=1 step=1 action=F2", two_stage_plan())
    assert "rank 1 (" in told
    assert "was killed by signal 9 (SIGKILL) in step 1, F(2) of stage 1, which the kernel sends when memory" in told


def test_a_halted_process_is_named_by_the_rank_that_waits_for_it() -> None:
    told = failure("stop rank=1 step=1 action=F2", two_stage_plan(), timeout_s=4.0)
    assert told.startswith("after the time limit of 4 s: rank 0 (")
    # gradients of earlier microbatches may be under way when the process is halted: its threads send them
    assert re.search(r" waits in step 1, B\(([012])\) of stage 0 for B\(\1\) of stage 1 from rank 1, for ", told)
    assert ") does not answer: its process is halted, or its host or network gone; " in told
    assert " ago it was in step 1, F(2) of stage 1" in told


def test_a_step_that_nobody_waits_for_ends_at_its_own_limit() -> None:
    one = ((*VISION, *AUDIO, "llm.embed", "llm.0-5", "llm.head", "llm.loss"),)
    plan = hand_plan(replace(tiny_scenario(), global_batch=2), one)
    told = failure("stall rank=0 step=1 action=data", plan, step_timeout_s=5.0)
    assert told.startswith("step 1 takes longer than the limit of 5 s: rank 0 (")
    assert " has been in step 1, the data of the step for " in told


def test_a_rank_of_another_torchrun_hears_that_one_was_killed(tmp_path: Path) -> None:
    """Two hosts, as far as one machine can be two."""
    save_plan(two_stage_plan(), tmp_path / "plan.json")
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    run = ["-m", "mmplan", "execute", "plan.json", "--steps", "4", "--inject", "kill rank=1 step=1 action=F2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *meet]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo"}
    hosts = [
        subprocess.Popen(
            [*torchrun, "--node-rank", str(host), *run],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    try:
        said = [host.communicate(timeout=150)[1] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert all(host.returncode for host in hosts)
    (line,) = [line for line in said[0].splitlines() if line.startswith("error: ")]
    # the first gradient may have been on its way when its sender was killed, and the last features not yet
    gradient = r"B\(([012])\) of stage 0 for B\(\1\) of stage 1 from rank 1, for "
    features = r"the send of llm\.embed>llm\.0 of microbatch 3 to rank 1 "
    assert any(re.search(rf"\) waits in step 1, {waits}", line) for waits in (gradient, features))
    assert ") is gone: it ended without a word in step 1, F(2) of stage 1" in line


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
