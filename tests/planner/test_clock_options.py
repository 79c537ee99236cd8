"""Shared links, blocking transfers and jitter."""

import random

import numpy as np
import pytest
from random_programs import random_durations, random_program

from mmplan.errors import CheckError
from mmplan.planner.check_program import check_program
from mmplan.planner.clock_options import jittered, rendezvous_waves, shared_link_waves
from mmplan.planner.columns import SEND, columns_of, program_of
from mmplan.planner.program import Action, Program, RankProgram
from mmplan.planner.waves import price, waves_of


def two_senders() -> Program:
    """Ranks 0 and 1 each send one tensor to rank 2."""
    ranks = [
        RankProgram(rank=r, stage=r, replica=0, actions=(Action("F", r, 0), Action("SEND", r, 0, 2, f"x{r}>y", 8)))
        for r in (0, 1)
    ]
    reader = (
        Action("RECV", 2, 0, 0, "x0>y", 8),
        Action("RECV", 2, 0, 1, "x1>y", 8),
        Action("F", 2, 0),
    )
    return Program(ranks=(*ranks, RankProgram(rank=2, stage=2, replica=0, actions=reader)), microbatches=1, replicas=1)


DURATIONS_S = np.array([1.0, 4.0, 2.0, 4.0, 0.0, 0.0, 1.0])


def test_transfers_of_a_shared_link_queue_in_the_order_of_their_starts() -> None:
    program = two_senders()
    own = price(waves_of(program), DURATIONS_S)[1]
    shared = price(shared_link_waves(columns_of(program), {(0, 2): 0, (1, 2): 0}, DURATIONS_S), DURATIONS_S)[1]
    assert own.tolist() == [1.0, 5.0, 2.0, 6.0, 5.0, 6.0, 7.0]
    assert shared.tolist() == [1.0, 5.0, 2.0, 9.0, 5.0, 9.0, 10.0]


def test_a_blocking_transfer_waits_for_both_ranks_and_holds_both() -> None:
    """Rank 2 takes the first tensor from 1 to 5 s and only then the second one, whose sender waits from 2 s on."""
    start_s, end_s = price(rendezvous_waves(two_senders()), DURATIONS_S)
    assert start_s.tolist() == [0.0, 1.0, 0.0, 5.0, 1.0, 5.0, 9.0]
    assert end_s.tolist() == [1.0, 5.0, 2.0, 9.0, 5.0, 9.0, 10.0]


def test_lowered_programs_run_with_blocking_transfers_and_never_faster() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        lowered, _ = random_program(rng)
        program = program_of(lowered.columns)
        durations = np.array([s for row in random_durations(rng, program) for s in row])
        free, blocking = price(waves_of(program), durations)[1], price(rendezvous_waves(program), durations)[1]
        assert blocking.max() >= free.max() - 1e-12, seed


def test_sharing_a_link_never_shortens_the_step() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        lowered, _ = random_program(rng)
        columns = lowered.columns
        durations = np.array([s for row in random_durations(rng, program_of(columns)) for s in row])
        link_of = {(int(a), int(b)): int(a) % 2 for a in columns.ranks for b in columns.ranks}
        shared = price(shared_link_waves(columns, link_of, durations), durations)
        alone = price(waves_of(program_of(columns)), durations)
        assert shared[1].max() >= alone[1].max() - 1e-12, seed
        sends = columns.kind == SEND
        links = columns.ranks[columns.row[sends]] % 2
        for link in (0, 1):
            order = np.argsort(shared[0][sends][links == link], kind="stable")
            starts, ends = shared[0][sends][links == link][order], shared[1][sends][links == link][order]
            assert (np.sort(ends)[:-1] <= starts[1:] + 1e-12).all() or (starts[1:] >= starts[:-1]).all()


def test_a_program_that_needs_buffers_is_refused_when_transfers_block_with_its_circle() -> None:
    """Each of two ranks sends before it receives: fine with buffers, a circle without."""

    def rank(own: int, other: int) -> RankProgram:
        actions = (
            Action("F", own, own),
            Action("SEND", own, own, other, f"x{own}>y", 8),
            Action("RECV", own, other, other, f"x{other}>y", 8),
            Action("F", own, other),
        )
        return RankProgram(rank=own, stage=own, replica=0, actions=actions)

    program = Program(ranks=(rank(0, 1), rank(1, 0)), microbatches=2, replicas=1)
    assert price(waves_of(program), np.ones(8))[1].max() == 3.0
    assert check_program(program)
    with pytest.raises(CheckError, match="transfer 0 between ranks 0 and 1"):
        rendezvous_waves(program)


def test_jitter_has_mean_one_and_repeats_with_its_seed() -> None:
    durations_s = np.full(4, 2.0)
    draws = jittered(durations_s, sigma=0.1, draws=20_000, seed=3)
    assert (draws == jittered(durations_s, sigma=0.1, draws=20_000, seed=3)).all()
    assert draws.mean(axis=1) == pytest.approx(durations_s, rel=0.005)
    assert (jittered(durations_s, sigma=0.0, draws=2, seed=0) == 2.0).all()
