"""Who waits for whom when a run stands still, from what each rank was seen doing. Imports no torch.

From a rank that waits to the one it waits for, and on, until one is reached that waits for nobody, or that was reached
before. The first is to blame, and ranks of a circle are all.
"""

from collections.abc import Mapping, Sequence

from mmplan.planner.plan import Plan
from mmplan.runtime.places import idle_ranks, one_process_each, place_of
from mmplan.runtime.position import NO_STEP, Seen, where
from mmplan.units import format_seconds

EVERYBODY = "all"


def wait_chain(plan: Plan, world: int, seen: Mapping[int, Seen], first: int) -> str:
    """One sentence: `rank 0 waits ...; rank 1 has been in F(4) of stage 1 for 30 s`.

    Args:
        world: ranks that there are.
        seen: by rank; ranks that nobody has seen are missing.
        first: the rank that gave up, or found that the step takes too long.
    """
    parts: list[str] = []
    chain = [first]
    while True:
        rank = chain[-1]
        own = seen.get(rank)
        blockers = _blockers(plan, world, own, seen) if own is not None else []
        if own is None or not blockers:
            parts.append(_stands(rank, own, waits=len(chain) > 1))
            break
        # Of several the one that waits for nobody, because there the chain ends.
        blocker = min(blockers, key=lambda other: (_waiting(seen.get(other)), other))
        parts.append(f"{named(rank, own)} waits {_what_for(plan, own, blocker, blockers)}")
        if blocker in chain:
            parts.append("so they wait for each other")
            break
        chain.append(blocker)
    return "; ".join(parts)


def named(rank: int, seen: Seen | None) -> str:
    return f"rank {rank} ({seen.host})" if seen is not None and seen.host else f"rank {rank}"


def lasted(seconds: float) -> str:
    return format_seconds(max(seconds, 0.0))


def _stands(rank: int, own: Seen | None, *, waits: bool) -> str:
    """What a rank does that waits for nobody."""
    if own is None:
        return f"rank {rank} has given no sign of life since it was to start"
    if own.done:
        return f"{named(rank, own)} has left the run"
    line = f" ({own.line})" if own.line else ""
    if own.alive is False:
        return f"the process of {named(rank, own)} is gone: it ended without a word in {where(own)}"
    if own.alive is None:
        return (
            f"{named(rank, own)} does not answer: its process is halted, or its host or network gone; "
            f"{lasted(own.age_s)} ago it was in {where(own)}"
        )
    return f"{named(rank, own)} has been in {where(own)} for {lasted(own.age_s)}{line}"


def _what_for(plan: Plan, own: Seen, blocker: int, blockers: Sequence[int]) -> str:
    """` in step 3 at F(3) of stage 0 for B(3) of stage 1 from rank 1`."""
    at = f"in {where(own)}"
    words = own.waits.split(" ")
    if len(words) == 3:
        way, _, tensor = words[1].partition(":")
        if way == "SEND":
            return f"{at} for rank {blocker} to take {tensor} of microbatch {words[2]}, for {lasted(own.age_s)}"
        made = f"{'B' if '<' in tensor else 'F'}({words[2]}) of stage {_producer(plan, tensor)}"
        return f"{at} for {made} from rank {blocker}, for {lasted(own.age_s)}"
    others = f" and {len(blockers) - 1} more" if len(blockers) > 1 else ""
    return f"{at} for rank {blocker}{others}, for {lasted(own.age_s)}"


def _producer(plan: Plan, tensor: str) -> int:
    """The stage that makes a tensor: of an activation its producer's, of a gradient its consumer's."""
    producer, _, consumer = tensor.partition("<" if "<" in tensor else ">")
    return plan.stage_of_layer()[consumer if "<" in tensor else producer]


def _waiting(other: Seen | None) -> bool:
    """A rank says that it waits for all before it does, so that has to be seen."""
    return other is not None and other.alive is True and (other.collective or other.waits not in ("", EVERYBODY))


def _blockers(plan: Plan, world: int, own: Seen, seen: Mapping[int, Seen]) -> list[int]:
    """The ranks that one waits for: the peer of a transfer, of a collective those that are not at the same place."""
    if not _waiting(own):
        return []
    words = own.waits.split(" ")
    if len(words) == 3 and words[0].isdigit():
        return [int(words[0])]
    everybody = own.waits == EVERYBODY or own.step == NO_STEP  # before the first step groups of all are made
    group: Sequence[int] = range(world) if everybody else _partners(plan, own.rank, world)
    if "TIE" in own.place and not everybody:
        group = _beside(plan, own.rank, world)
    return [rank for rank in group if rank != own.rank and not _together(seen.get(rank), own)]


def _together(one: Seen | None, other: Seen) -> bool:
    """Whether one has come to where the other waits, and waits too."""
    return one is not None and (one.step, _met(one)) == (other.step, _met(other)) and _waiting(one)


def _met(one: Seen) -> str:
    """The place; of a sum over stages its number."""
    stage, tie, number = one.place.partition("TIE")
    return tie + number if tie else stage


def _beside(plan: Plan, rank: int, world: int) -> list[int]:
    """Ranks of other stages in the same place, some of which hold the same; which, a user's own model says."""
    started = plan if world == plan.rank_count else one_process_each(plan)
    places = {other: place_of(started, other) for other in range(world) if other not in idle_ranks(started)}
    return [o for o, at in places.items() if (at.replica, at.shard) == (places[rank].replica, places[rank].shard)]


def _partners(plan: Plan, rank: int, world: int) -> range:
    """Ranks that share layers or weights with one."""
    started = plan if world == plan.world else one_process_each(plan)
    ranks = started.stage_ranks(started.stages_of(place_of(started, rank).row)[0])
    return range(ranks[0], ranks[-1] + 1)
