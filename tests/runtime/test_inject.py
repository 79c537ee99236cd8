"""Faults to rehearse: what users write, and where they strike."""

import pytest
from tiny_plans import TWO_STAGES, hand_plan, tiny_scenario

from mmplan.errors import InputError
from mmplan.runtime.inject import InjectedError, Injection, check_injections, parse_injection, strike


def test_a_fault_is_read_from_its_words() -> None:
    assert parse_injection("kill rank=1 step=3 action=B2 signal=term") == Injection(
        kind="kill", rank=1, step=3, action="B2", signal="SIGTERM"
    )
    assert parse_injection("  stall   rank=0 ") == Injection(kind="stall", rank=0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is no fault; expected KIND rank=N"),
        ("explode rank=1", "'explode' is no fault"),
        ("kill", "no rank"),
        ("kill rank=-1", "rank is a number"),
        ("kill rank=1 rank=2", "'rank=2' is not understood"),
        ("kill rank=1 step=", "'step=' is not understood"),
        ("kill rank=1 color=red", "'color=red' is not understood"),
        ("kill rank=1 action=X2", "'X2' is no action: F2, 1B2, REDUCE, STEP or start, data, save, end"),
        ("kill rank=1 signal=NOPE", "signal=NOPE needs a kill and a signal's name"),
        ("raise rank=1 signal=TERM", "signal=TERM needs a kill"),
        ("nan rank=1 action=data", "only actions compute something"),
    ],
)
def test_other_words_are_refused(text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_injection(text)
    assert said in str(caught.value)


def test_a_fault_strikes_at_its_step_and_action() -> None:
    fault = parse_injection("raise rank=0 step=2 action=F1")
    assert fault.strikes(2, "0F1")
    assert fault.strikes(2, "3F1")
    assert not fault.strikes(1, "0F1")
    assert not fault.strikes(2, "0F11")
    assert not fault.strikes(2, "0B1")
    assert not parse_injection("raise rank=0 action=1F1").strikes(0, "0F1")


def test_without_an_action_it_strikes_at_the_first_one_and_not_before() -> None:
    fault = parse_injection("raise rank=0 step=2")
    assert [place for place in ("data", "meet", "0RECV0[a>b]@1", "0F0") if fault.strikes(2, place)] == ["0F0"]


def test_no_number_is_asked_for_and_does_not_strike() -> None:
    fault = parse_injection("nan rank=0 step=0 action=STEP")
    assert fault.at(0, "0STEP")
    assert not fault.strikes(0, "0STEP")


def test_an_injected_error_says_that_it_is_one() -> None:
    with pytest.raises(InjectedError, match="injected by --inject"):
        strike(parse_injection("raise rank=0"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kill rank=9", "rank 9, and the run has ranks 0 to 1"),
        ("kill rank=1 step=7", "step 7, and the run has steps 0 to 1"),
        ("nan rank=1 action=F99", "F99, and the plan has microbatches 0 to 15"),
        ("raise rank=0 action=5B1", "stage 5, and the plan has stages 0 to 1"),
        ("raise rank=0 action=1B1", "1B1, and rank 0 has 0B and 0F of each microbatch"),
        ("raise rank=1 action=I1", "I1, and rank 1 has 1B and 1F of each microbatch"),
    ],
)
def test_a_fault_that_can_never_strike_is_refused(fault: str, message: str) -> None:
    plan = hand_plan(tiny_scenario(), TWO_STAGES)
    check_injections([parse_injection("kill rank=1 step=1 action=1B15")], plan, steps=2, ranks=2)
    with pytest.raises(InputError, match=message):
        check_injections([parse_injection(fault)], plan, steps=2, ranks=2)
