"""Orders of all ranks with heads and tails: earliest start of every action, least time from its start to the end.

Only arcs between ranks are kept: what must be in order on one rank is in order in every order that the searches make.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mmplan.planner.schedules.search.nodes import Arc, Nodes

_NONE, _SEVERAL = -1, -2


@dataclass(slots=True)
class Orders:
    """`rows[r]`: action numbers in the order of rank r; `start_s` and `tail_s` (from the start on) by action number.

    `position`: place of each action in its row; `held`: memory of a rank behind each place.
    """

    nodes: Nodes
    rows: list[list[int]]
    before: list[tuple[Arc, ...]] = field(default_factory=list)
    after: list[tuple[Arc, ...]] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    tail_s: list[float] = field(default_factory=list)
    makespan_s: float = 0.0
    _single_before: list[Arc] = field(default_factory=list)
    _single_after: list[Arc] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    held: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rank = self.nodes.rank
        self.before = [
            tuple(arc for arc in arcs if rank[arc[0]] != rank[number]) for number, arcs in enumerate(self.nodes.before)
        ]
        self.after = [
            tuple(arc for arc in arcs if rank[arc[0]] != rank[number]) for number, arcs in enumerate(self.nodes.after)
        ]
        self._single_before, self._single_after = _single(self.before), _single(self.after)
        self.position = [0] * len(rank)
        self.held = [[] for _ in self.rows]
        for row in range(len(self.rows)):
            self.index(row)

    def index(self, rank: int) -> None:
        """Bring positions and memory of a rank up to date with its row."""
        memory, held, total = self.nodes.memory, [], 0.0
        for place, number in enumerate(self.rows[rank]):
            self.position[number] = place
            total += memory[number]
            held.append(total)
        self.held[rank] = held

    def evaluate(self) -> bool:
        """Times of all actions; False, and no change, when ranks wait for each other in a circle."""
        seconds, before, single, rows = self.nodes.seconds, self.before, self._single_before, self.rows
        count = len(seconds)
        start_s, end_s = [0.0] * count, [-1.0] * count
        places, clocks = [0] * len(rows), [0.0] * len(rows)
        done: list[int] = []
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                place, clock = first, _ = places[rank], clocks[rank]
                size = len(row)
                while place < size:
                    number = row[place]
                    begin = clock
                    other, lag = single[number]
                    if other >= 0:
                        end = end_s[other]
                        if end < 0.0:
                            break
                        if end + lag > begin:
                            begin = end + lag
                    elif other == _SEVERAL:
                        ends = [end_s[source] for source, _ in before[number]]
                        if min(ends) < 0.0:
                            break
                        begin = max(begin, *(end + arc[1] for end, arc in zip(ends, before[number], strict=True)))
                    start_s[number] = begin
                    clock = end_s[number] = begin + seconds[number]
                    done.append(number)
                    place += 1
                if place != first:
                    places[rank], clocks[rank] = place, clock
                    moved = True
        if len(done) < count:
            return False
        self.start_s, self.end_s = start_s, end_s
        self.makespan_s = max(map(sum, zip(clocks, self.nodes.delivery_s, strict=True)))
        self._set_tails(done)
        return True

    def _set_tails(self, done: Sequence[int]) -> None:
        seconds, after, single = self.nodes.seconds, self.after, self._single_after
        tail_s = [0.0] * len(done)
        behind = list(self.nodes.delivery_s)  # tail of the action that follows on the rank
        rank = self.nodes.rank
        for number in reversed(done):
            own = rank[number]
            tail = behind[own]
            other, lag = single[number]
            if other >= 0:
                if tail_s[other] + lag > tail:
                    tail = tail_s[other] + lag
            elif other == _SEVERAL:
                tail = max(tail, *(tail_s[target] + arc_lag for target, arc_lag in after[number]))
            tail_s[number] = behind[own] = tail + seconds[number]
        self.tail_s = tail_s

    def copied(self) -> list[list[int]]:
        return [list(row) for row in self.rows]

    def replace(self, rows: list[list[int]]) -> bool:
        """Take other rows; on a circle keep the old ones and return False."""
        old, self.rows = self.rows, rows
        if not self.evaluate():
            self.rows = old
            return False
        for rank in range(len(rows)):
            self.index(rank)
        return True


def _single(arcs: list[tuple[Arc, ...]]) -> list[Arc]:
    """The arc of each action that has one; most have one or none, and looking at it alone saves a loop."""
    return [row[0] if len(row) == 1 else (_SEVERAL if row else _NONE, 0.0) for row in arcs]
