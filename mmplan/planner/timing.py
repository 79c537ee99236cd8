"""When every action of a program starts and ends, given how long each takes: the longest path in rank order.

A rank computes one action at a time in its order. Transfers are asynchronous: they hold up neither end, and occupy the
directed link between two ranks one after another, from the later of their producer's end and the link's last transfer.
A compute waits for the tensors its rank received for it. REDUCE starts when every replica of the stage has arrived.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from mmplan.planner.clockwork import Clockwork
from mmplan.planner.program import Program
from mmplan.planner.waves import IrregularError, price, rows_of, waves_of

Seconds = tuple[tuple[float, ...], ...]  # [rank of the program][action]

# Below this plain Python is as quick: 0.4 M actions/s to find the waves of 2,432 actions, 2.4 M/s of 650,000
# (numpy 2.4, one core).
ARRAY_ACTIONS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Start and end of every action, aligned with `program.ranks[i].actions`. RECV has the times of its SEND."""

    start_s: Seconds
    end_s: Seconds


def time_program(program: Program, durations: Sequence[Sequence[float]], array_actions: int = ARRAY_ACTIONS) -> Timing:
    """Earliest times of all actions.

    Args:
        durations: seconds of each action: computing, on the link (SEND), reducing, updating; those of RECV are unused.
        array_actions: programs of that many actions are timed by arrays.

    Raises:
        CheckError: some ranks wait for each other for ever; names what each waits at.
    """
    if sum(len(rank.actions) for rank in program.ranks) >= array_actions:
        try:
            waves = waves_of(program)
        except IrregularError:
            pass  # the clock below says what is wrong
        else:
            start_s, end_s = price(waves, np.fromiter(chain.from_iterable(durations), dtype=np.float64))
            return Timing(start_s=rows_of(program, start_s), end_s=rows_of(program, end_s))
    starts, ends = Clockwork(program, durations).run()
    return Timing(start_s=tuple(map(tuple, starts)), end_s=tuple(map(tuple, ends)))
