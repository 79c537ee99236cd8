"""Broken programs, each with its own message; whatever lists are shuffled, check and clock agree on sound ones."""

from dataclasses import replace

from mmplan.planner.check_program import check_program
from mmplan.planner.program import Action, Program, RankProgram


def two_stages() -> Program:
    """Stage 0 on rank 0 feeds stage 1 on rank 1; two microbatches, GPipe."""
    first = (
        Action("F", 0, 0),
        Action("SEND", 0, 0, 1, "a>b", 8),
        Action("F", 0, 1),
        Action("SEND", 0, 1, 1, "a>b", 8),
        Action("RECV", 0, 0, 1, "a<b", 8),
        Action("B", 0, 0),
        Action("RECV", 0, 1, 1, "a<b", 8),
        Action("B", 0, 1),
        Action("STEP", 0),
    )
    second = (
        Action("RECV", 1, 0, 0, "a>b", 8),
        Action("F", 1, 0),
        Action("RECV", 1, 1, 0, "a>b", 8),
        Action("F", 1, 1),
        Action("B", 1, 0),
        Action("SEND", 1, 0, 0, "a<b", 8),
        Action("B", 1, 1),
        Action("SEND", 1, 1, 0, "a<b", 8),
        Action("STEP", 1),
    )
    return Program(
        ranks=(
            RankProgram(rank=0, stage=0, replica=0, actions=first),
            RankProgram(rank=1, stage=1, replica=0, actions=second),
        ),
        microbatches=2,
        replicas=1,
    )


def changed(program: Program, rank: int, actions: list[Action]) -> Program:
    ranks = list(program.ranks)
    ranks[rank] = replace(ranks[rank], actions=tuple(actions))
    return replace(program, ranks=tuple(ranks))


def messages(program: Program) -> str:
    return "\n".join(map(str, check_program(program)))


def swapped(program: Program, rank: int, a: int, b: int) -> Program:
    actions = list(program.ranks[rank].actions)
    actions[a], actions[b] = actions[b], actions[a]
    return changed(program, rank, actions)


def test_a_sound_program_has_no_findings() -> None:
    assert check_program(two_stages()) == ()


def test_a_missing_forward_is_named() -> None:
    actions = list(two_stages().ranks[1].actions)
    actions.remove(Action("F", 1, 1))
    assert "completeness: rank 1 runs 1F1 0 times instead of once" in messages(changed(two_stages(), 1, actions))


def test_a_backward_that_runs_twice_is_named() -> None:
    actions = [*two_stages().ranks[0].actions, Action("B", 0, 1)]
    assert "completeness: rank 0 runs 0B1 2 times instead of once" in messages(changed(two_stages(), 0, actions))


def test_a_microbatch_beyond_the_step_is_named() -> None:
    actions = [*two_stages().ranks[0].actions, Action("F", 0, 7)]
    assert "rank 0 runs 0F7, the step has 2 microbatches" in messages(changed(two_stages(), 0, actions))


def test_backward_before_forward_is_named() -> None:
    assert "order: rank 1 runs 1B0 before 1F0" in messages(swapped(two_stages(), 1, 1, 4))


def test_swapped_receives_are_found_by_name_and_not_by_count() -> None:
    broken = swapped(two_stages(), 1, 0, 2)
    assert "transfer order: transfer 0 between ranks 0 and 1 is a>b of microbatch 0" in messages(broken)


def test_a_send_before_its_compute_is_named() -> None:
    assert "before 0F0 has made the tensor" in messages(swapped(two_stages(), 0, 0, 1))


def test_a_receive_after_its_reader_is_named() -> None:
    assert "after 1F0 has needed the tensor" in messages(swapped(two_stages(), 1, 0, 1))


def test_different_byte_counts_at_the_two_ends_are_named() -> None:
    actions = list(two_stages().ranks[1].actions)
    actions[0] = replace(actions[0], bytes=16)
    assert "(8 bytes) 0 -> 1 on rank 0 and a>b of microbatch 0 (16 bytes)" in messages(
        changed(two_stages(), 1, actions)
    )


def test_an_unknown_peer_is_named() -> None:
    actions = list(two_stages().ranks[1].actions)
    actions[0] = replace(actions[0], peer=9)
    assert "peer: rank 1 lists 1RECV0[a>b]@9: no such peer" in messages(changed(two_stages(), 1, actions))


def test_two_ranks_that_both_send_first_are_found() -> None:
    """Fine with buffers and a stream per direction; NCCL would match one send with the other."""
    first = [Action("F", 0, 0), Action("SEND", 0, 0, 1, "a>b", 8), Action("RECV", 0, 1, 1, "x>y", 8), Action("F", 0, 1)]
    second = [
        Action("F", 1, 1),
        Action("SEND", 1, 1, 0, "x>y", 8),
        Action("RECV", 1, 0, 0, "a>b", 8),
        Action("F", 1, 0),
    ]
    program = changed(changed(two_stages(), 0, first), 1, second)
    assert messages(program).startswith("transfer order: transfer 0 between ranks 0 and 1 is a>b of microbatch 0")


def circle(send_first: bool) -> Program:
    """Rank i computes microbatch i, sends it to rank i + 1 and receives microbatch i - 1 from rank i - 1."""
    ranks = []
    for i in range(3):
        to, source = (i + 1) % 3, (i - 1) % 3
        send = Action("SEND", i, i, to, "a>b", 8)
        receive = Action("RECV", i, source, source, "a>b", 8)
        middle = (send, receive) if send_first or i > 0 else (receive, send)
        actions = (Action("F", i, i), *middle, Action("F", i, source), Action("F", i, to))
        ranks.append(RankProgram(rank=i, stage=i, replica=0, actions=actions))
    return Program(ranks=tuple(ranks), microbatches=3, replicas=1)


def test_a_circle_that_only_zero_buffers_show_is_printed_action_by_action() -> None:
    """Every pair of ranks has a single transfer, so both ends agree; still each send waits for another rank's send."""
    (finding,) = check_program(circle(send_first=True))
    assert finding.rule == "deadlock"
    for rank, step in enumerate(
        ["0SEND0[a>b]@1 before 0RECV2", "1SEND1[a>b]@2 before 1RECV0", "2SEND2[a>b]@0 before 2RECV1"]
    ):
        assert f"rank {rank}: {step}" in finding.message


def test_one_rank_that_receives_first_breaks_the_circle() -> None:
    assert check_program(circle(send_first=False)) == ()


def replicas(first: tuple[Action, ...], second: tuple[Action, ...]) -> Program:
    """Two replicas of one stage that end with these actions."""
    computes = tuple(Action(kind, 0, k) for k in range(2) for kind in ("F", "B"))  # type: ignore[arg-type]
    ranks = [
        RankProgram(rank=index, stage=0, replica=index, actions=(*computes, *end, Action("STEP", 0)))
        for index, end in enumerate((first, second))
    ]
    return Program(ranks=tuple(ranks), microbatches=2, replicas=2)


def test_replicas_that_reduce_different_sizes_are_named() -> None:
    """A replica that saw no image and reduces fewer gradients: ZeRO-2's mismatch."""
    found = messages(replicas((Action("REDUCE", 0, bytes=16),), (Action("REDUCE", 0, bytes=4),)))
    assert "gradients of stage 0 are reduced by rank 0 1 times (16 bytes), by rank 1 1 times (4 bytes)" in found


def test_a_replica_that_does_not_reduce_is_named() -> None:
    found = messages(replicas((Action("REDUCE", 0, bytes=16),), ()))
    assert "by rank 0 1 times (16 bytes), by rank 1 0 times (0 bytes)" in found
    assert messages(replicas((Action("REDUCE", 0, bytes=16),), (Action("REDUCE", 0, bytes=16),))) == ""


def test_a_rank_with_two_stages_is_complete_when_both_are() -> None:
    """Stages 0 and 1 on one rank, with a split backward."""
    order = [(0, "F"), (1, "F"), (1, "I"), (0, "I"), (0, "W"), (1, "W")]
    actions = tuple(Action(kind, stage, 0) for stage, kind in order)  # type: ignore[arg-type]
    program = Program(ranks=(RankProgram(rank=0, stage=0, replica=0, actions=actions),), microbatches=1, replicas=1)
    assert check_program(program) == ()
    assert "rank 0 runs 1W0 0 times" not in messages(program)
    late = (actions[0], actions[1], actions[5], *actions[2:5])
    assert "order: rank 0 runs 1W0 before 1I0" in messages(changed(program, 0, list(late)))
