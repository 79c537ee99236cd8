"""Array clock, Python clock, checker and an event-by-event reference on random programs (`--fuzz N` for more)."""

import random

import numpy as np
import pytest
from random_programs import random_durations, random_program
from reference_clock import reference_times

from mmplan.errors import CheckError
from mmplan.planner.check_program import check_program
from mmplan.planner.columns import columns_of, program_of
from mmplan.planner.program import Program
from mmplan.planner.timing import Timing, time_program
from mmplan.planner.waves import lowered_waves, price, rows_of


def timed(program: Program, durations: list[list[float]], array_actions: int) -> Timing | None:
    try:
        return time_program(program, durations, array_actions)
    except CheckError:
        return None


def test_clocks_checker_and_reference_agree_on_random_programs(request: pytest.FixtureRequest) -> None:
    outcomes = {"timed": 0, "refused": 0, "unsound but timed": 0}
    for seed in range(request.config.getoption("--fuzz")):
        rng = random.Random(seed)
        lowered, program = random_program(rng)
        durations = random_durations(rng, program)
        expected = reference_times(program, durations)
        by_python, by_arrays = timed(program, durations, 10**9), timed(program, durations, 0)
        assert by_python == by_arrays, seed
        assert (expected is None) == (by_python is None), seed
        sound = not check_program(program)
        outcomes["timed" if sound else "refused" if by_python is None else "unsound but timed"] += 1
        if by_python is None or expected is None:
            assert not sound, seed
            continue
        for index, rank in enumerate(program.ranks):
            times = list(zip(by_python.start_s[index], by_python.end_s[index], strict=True))
            assert times == [expected[rank.rank, position] for position in range(len(rank.actions))], seed
        if program == program_of(lowered.columns):
            assert sound, (seed, check_program(program))
            flat = np.array([seconds for row in durations for seconds in row])
            start_s, end_s = price(lowered_waves(lowered), flat)
            assert Timing(start_s=rows_of(program, start_s), end_s=rows_of(program, end_s)) == by_python, seed
    assert min(outcomes.values()) > 0


def test_many_vectors_of_durations_give_what_each_gives_alone() -> None:
    rng = random.Random(7)
    lowered, _ = random_program(rng)
    program = program_of(lowered.columns)
    waves = lowered_waves(lowered)
    draws = np.array([[s for row in random_durations(rng, program) for s in row] for _ in range(5)]).T
    start_s, end_s = price(waves, draws)
    for draw in range(5):
        alone = price(waves, np.ascontiguousarray(draws[:, draw]))
        assert (alone[0] == start_s[:, draw]).all()
        assert (alone[1] == end_s[:, draw]).all()


def test_columns_and_program_are_inverse() -> None:
    for seed in range(20):
        _, program = random_program(random.Random(seed))
        assert program_of(columns_of(program)) == program
