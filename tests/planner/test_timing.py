"""The clock on programs small enough to time by hand."""

import pytest

from mmplan.errors import CheckError
from mmplan.planner.program import Action, Program, RankProgram
from mmplan.planner.timing import time_program


def program(*orders: tuple[Action, ...], microbatches: int = 1, replicas: int = 1) -> Program:
    ranks = tuple(
        RankProgram(rank=index, stage=index // replicas, replica=index % replicas, actions=actions)
        for index, actions in enumerate(orders)
    )
    return Program(ranks=ranks, microbatches=microbatches, replicas=replicas)


def test_a_transfer_delays_its_reader_and_not_its_sender() -> None:
    sender = (Action("F", 0, 0), Action("SEND", 0, 0, 1, "a>b", 8), Action("F", 0, 1))
    reader = (Action("RECV", 1, 0, 0, "a>b", 8), Action("F", 1, 0))
    timing = time_program(program(sender, reader, microbatches=2), ((2.0, 5.0, 3.0), (0.0, 1.0)))
    assert timing.start_s == ((0.0, 2.0, 2.0), (2.0, 7.0))
    assert timing.end_s == ((2.0, 7.0, 5.0), (7.0, 8.0))


def test_transfers_on_one_directed_link_queue_and_the_way_back_is_free() -> None:
    sender = (Action("F", 0, 0), Action("SEND", 0, 0, 1, "a>b", 8), Action("SEND", 0, 0, 1, "c>b", 8))
    reader = (
        Action("F", 1, 1),
        Action("SEND", 1, 1, 0, "x>y", 8),
        Action("RECV", 1, 0, 0, "a>b", 8),
        Action("RECV", 1, 0, 0, "c>b", 8),
        Action("F", 1, 0),
    )
    sender = (*sender, Action("RECV", 0, 1, 1, "x>y", 8))
    timing = time_program(program(sender, reader, microbatches=2), ((1.0, 4.0, 2.0, 0.0), (1.0, 4.0, 0.0, 0.0, 1.0)))
    assert timing.end_s[0] == (1.0, 5.0, 7.0, 5.0)
    assert timing.end_s[1] == (1.0, 5.0, 5.0, 7.0, 8.0)


def test_reduction_starts_when_the_last_replica_arrives() -> None:
    slow = (Action("F", 0, 0), Action("REDUCE", 0, bytes=4), Action("STEP", 0))
    timing = time_program(program(slow, slow, replicas=2), ((5.0, 2.0, 1.0), (1.0, 2.0, 1.0)))
    assert timing.start_s == ((0.0, 5.0, 7.0), (0.0, 5.0, 7.0))
    assert timing.end_s == ((5.0, 7.0, 8.0), (1.0, 7.0, 8.0))


def test_ranks_that_wait_for_each_other_are_named() -> None:
    first = (Action("RECV", 0, 0, 1, "b>a", 8), Action("F", 0, 0), Action("SEND", 0, 0, 1, "a>b", 8))
    second = (Action("RECV", 1, 0, 0, "a>b", 8), Action("F", 1, 0), Action("SEND", 1, 0, 0, "b>a", 8))
    with pytest.raises(CheckError, match="rank 0 at 0F0, rank 1 at 1F0"):
        time_program(program(first, second), ((0.0, 1.0, 1.0), (0.0, 1.0, 1.0)))


def test_a_receive_without_a_send_is_named() -> None:
    reader = (Action("F", 1, 0), Action("RECV", 1, 0, 0, "a>b", 8))
    with pytest.raises(CheckError, match="rank 0 never sends it"):
        time_program(program((Action("F", 0, 0),), reader), ((1.0,), (1.0, 0.0)))
