"""A second process gives the same as none, whatever happens to it."""

import os
import signal
import threading
import time

import pytest

from mmplan.errors import InputError
from mmplan.planner import second_process
from mmplan.planner.second_process import Second, both, two_cores


@pytest.fixture(params=[True, False], ids=["two cores", "one core"])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(second_process, "two_cores", lambda: request.param and two_cores())
    return request.param and two_cores()


def test_questions_are_answered_in_turn_with_what_was_known(cores: bool) -> None:
    known = [10]
    second = Second[int, tuple[int, int]](lambda more: (known[0] + more, os.getpid()))
    answers = []
    for more in (1, 2):
        second.ask(more)
        answers.append(second.told())
    assert [value for value, _ in answers] == [11, 12]
    assert {pid == os.getpid() for _, pid in answers} == {not cores}
    second.close()
    second.ask(3)
    assert second.told() == (13, os.getpid())


def test_what_is_not_worth_a_process_gets_none() -> None:
    assert both(lambda: os.getpid(), lambda: os.getpid(), worth=False) == (os.getpid(), os.getpid())


def test_errors_are_raised_as_without_a_second_process(cores: bool, caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> int:
        raise InputError("no such thing", key="batch.global")

    with pytest.raises(InputError, match=r"batch\.global.*no such thing"):
        both(lambda: 1, refuse)
    assert not caplog.text
    with pytest.raises(InputError, match="no such thing"):
        both(refuse, lambda: time.sleep(60) if cores else None)  # nobody waits for the other


def test_a_process_that_dies_is_replaced_by_this_one(cores: bool, caplog: pytest.LogCaptureFixture) -> None:
    own = os.getpid()

    def dies() -> str:
        if os.getpid() != own:
            os.kill(os.getpid(), signal.SIGKILL)
        return "done"

    assert both(lambda: 1, dies) == (1, "done")
    assert ("ended early" in caplog.text) == cores


def test_a_process_that_is_stuck_is_replaced_by_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was forked while another thread held a lock."""
    monkeypatch.setattr(second_process, "LEAST_PATIENCE_S", 0.1)
    own = os.getpid()

    def hangs() -> str:
        if os.getpid() != own:
            time.sleep(60)
        return "done"

    assert both(lambda: 1, hangs) == (1, "done")


def test_an_answer_that_an_interrupt_left_behind_is_not_taken_for_the_next(cores: bool) -> None:
    second = Second[int, int](lambda value: 2 * value)
    second.ask(1)  # and an interrupt, so that nobody asks for the answer
    second.ask(5)
    assert second.told() == 10


def test_no_process_stays_behind() -> None:
    second = Second[None, int](lambda _: os.getpid())
    second.ask(None)
    child = second.told()
    del second
    if child != os.getpid():
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_other_threads_do_not_matter(cores: bool) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    found: list[tuple[int, int]] = []
    asker = threading.Thread(target=lambda: found.append(both(lambda: 1, lambda: 2)))
    asker.start()
    asker.join(60)
    done.set()
    thread.join()
    assert found == [(1, 2)]
