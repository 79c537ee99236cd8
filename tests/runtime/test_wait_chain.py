"""Positions of ranks, and who waits for whom by them."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_plans import TWO_STAGES, hand_plan, tiny_scenario

from mmplan.planner.plan import Plan
from mmplan.runtime.inject import InjectedError, parse_injection
from mmplan.runtime.position import Position, Seen, place_words, position_path, process_lives, read_position, where
from mmplan.runtime.wait_chain import EVERYBODY, wait_chain


@pytest.fixture(scope="module")
def plan() -> Plan:
    return hand_plan(replace(tiny_scenario(), global_batch=4), TWO_STAGES)


def seen(rank: int, place: str, waits: str = "", **more: object) -> Seen:
    made = Seen(rank=rank, host=f"host{rank}", step=3, place=place, waits=waits, age_s=30.0, alive=True)
    return replace(made, **more)  # type: ignore[arg-type]


def test_a_rank_waits_for_a_gradient_of_one_that_computes(plan: Plan) -> None:
    ranks = {0: seen(0, "0B3", "1 RECV:llm.embed<llm.0 3"), 1: seen(1, "1F4", line="model.py, line 12, in forward: x")}
    assert wait_chain(plan, 2, ranks, 0) == (
        "rank 0 (host0) waits in step 3, B(3) of stage 0 for B(3) of stage 1 from rank 1, for 30 s; "
        "rank 1 (host1) has been in step 3, F(4) of stage 1 for 30 s (model.py, line 12, in forward: x)"
    )


def test_ranks_that_wait_for_each_other_are_a_circle(plan: Plan) -> None:
    ranks = {0: seen(0, "0B3", "1 RECV:llm.embed<llm.0 3"), 1: seen(1, "1F4", "0 RECV:llm.embed>llm.0 4")}
    told = wait_chain(plan, 2, ranks, 1)
    assert told.startswith("rank 1 (host1) waits in step 3, F(4) of stage 1 for F(4) of stage 0 from rank 0, for 30 s;")
    assert told.endswith("; so they wait for each other")


def test_a_send_that_nobody_takes_waits_for_its_taker(plan: Plan) -> None:
    ranks = {0: seen(0, "drain", "1 SEND:llm.embed>llm.0 2"), 1: seen(1, "data")}
    assert "for rank 1 to take llm.embed>llm.0 of microbatch 2, for 30 s; rank 1" in wait_chain(plan, 2, ranks, 0)


def test_a_barrier_waits_for_those_who_are_elsewhere_or_do_not_wait(plan: Plan) -> None:
    ranks = {rank: seen(rank, "meet", EVERYBODY, collective=True) for rank in range(4)}
    late = ranks | {2: seen(2, "data", line="job.py, line 9, in batches")}
    assert wait_chain(plan, 4, late, 0) == (
        "rank 0 (host0) waits in step 3, the barrier before the step for rank 2, for 30 s; "
        "rank 2 (host2) has been in step 3, the data of the step for 30 s (job.py, line 9, in batches)"
    )
    assert "for rank 3, for 30 s; rank 3 (" in wait_chain(plan, 4, ranks | {3: seen(3, "meet", EVERYBODY)}, 0)
    assert "for rank 1 and 1 more," in wait_chain(plan, 4, late | {1: seen(1, "data")}, 0)


def test_a_collective_waits_for_the_ranks_of_its_stage(plan: Plan) -> None:
    two = replace(plan, dp=2)
    ranks = {0: seen(0, "0F1"), 1: seen(1, "0F1"), 2: seen(2, "1REDUCE", collective=True), 3: seen(3, "1B0")}
    assert "for rank 3, for 30 s; rank 3 (host3) has been in step 3, B(0) of stage 1" in wait_chain(two, 4, ranks, 2)


def test_a_sum_over_stages_waits_for_the_rank_in_the_same_place_of_another_stage(plan: Plan) -> None:
    two = replace(plan, dp=2)
    ranks = {1: seen(1, "0TIE0", collective=True), 3: seen(3, "1REDUCE"), 0: seen(0, "0F1"), 2: seen(2, "1F1")}
    told = wait_chain(two, 4, ranks, 1)
    assert "the sum of gradients that stage 0 shares with others for rank 3, for 30 s; rank 3 (host3) has been" in told
    together = ranks | {3: seen(3, "1TIE0", collective=True)}
    assert wait_chain(two, 4, together, 1).startswith("rank 1 (host1) has been in step 3, the sum of gradients")


def test_who_is_gone_or_silent_ends_the_chain(plan: Plan) -> None:
    waiting = seen(0, "0B3", "1 RECV:llm.embed<llm.0 3")
    gone = {0: waiting, 1: seen(1, "1F4", "0 RECV:llm.embed>llm.0 4", alive=False)}
    assert wait_chain(plan, 2, gone, 0).endswith(
        "; the process of rank 1 (host1) is gone: it ended without a word in step 3, F(4) of stage 1"
    )
    silent = {0: waiting, 1: seen(1, "1F4", alive=None)}
    assert "; rank 1 (host1) does not answer: " in wait_chain(plan, 2, silent, 0)
    assert wait_chain(plan, 2, {0: waiting}, 0).endswith("; rank 1 has given no sign of life since it was to start")
    assert wait_chain(plan, 2, {0: waiting, 1: seen(1, "done", done=True)}, 0).endswith(
        "rank 1 (host1) has left the run"
    )


def test_a_position_is_read_by_another_process_and_stays_behind_it(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from mmplan.runtime.position import Position, position_path\n"
        "position = Position(3, position_path(pathlib.Path(sys.argv[1]), 3))\n"
        "position.begin(7)\n"
        "position.enter('1F3', '0 RECV:a>b 3')\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, env=environment)
    found = read_position(tmp_path, 3)
    assert found is not None
    assert (found.step, found.place, found.waits, found.alive) == (7, "1F3", "0 RECV:a>b 3", False)
    assert where(found) == "step 7, F(3) of stage 1"


def test_an_unreadable_position_is_none(tmp_path: Path) -> None:
    assert read_position(tmp_path, 0) is None
    position_path(tmp_path, 0).write_bytes(b"\0\xff garbage")
    assert read_position(tmp_path, 0) is None
    assert process_lives(os.getpid())


def test_places_are_said_in_words() -> None:
    assert place_words("0B12") == "B(12) of stage 0"
    assert place_words("2STEP") == "STEP of stage 2"
    assert place_words("0SEND1[a>b]@3") == "the send of a>b of microbatch 1 to rank 3"
    assert place_words("save") == "the checkpoint behind the step"


def test_faults_strike_where_the_position_says() -> None:
    position = Position(1, faults=tuple(map(parse_injection, ("raise rank=1 step=2 action=B0", "raise rank=0"))))
    position.begin(1)
    position.enter("0B0")
    position.begin(2)
    position.enter("0F0")
    with pytest.raises(InjectedError):
        position.enter("0B0")
