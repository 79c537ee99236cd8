"""Orders of all ranks with heads and tails: earliest start of every action, least time from its start to the end.

Only arcs between ranks are kept: what must be in order on one rank is in order in every order that the searches make.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from mmplan.planner.schedules.search.nodes import Arc, Nodes

_NONE, _SEVERAL = -1, -2
_Times = tuple[list[float], list[float], list[float], list[int], float]


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
    _done: list[int] = field(default_factory=list)  # an order in which each action has its inputs before it
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
        places, clocks = [0] * len(self.rows), [0.0] * len(self.rows)
        count = len(self.nodes.seconds)
        done = self._timed(places, clocks, [0.0] * count, [-1.0] * count)
        if len(done) < count:
            return False
        self._done, self.tail_s = done, [0.0] * count
        self._set_tails(reversed(done), list(self.nodes.delivery_s))
        return True

    def evaluate_moved(self, rank: int, low: int, high: int) -> bool:
        """`evaluate` after a change of order between two places of a rank, of one that was evaluated before it.

        What started before those actions keeps its start; what started after their end keeps its tail.
        """
        old_s, rows, row = self.start_s, self.rows, self.rows[rank]
        first_s = min(old_s[x] for x in row[low : high + 1])
        last_s = max(self.end_s[x] for x in row[low : high + 1])
        start_of = old_s.__getitem__
        places = [low if r == rank else bisect_left(rows[r], first_s, key=start_of) for r in range(len(rows))]
        while places[rank] and old_s[row[places[rank] - 1]] >= first_s:
            places[rank] -= 1
        behind = list(self.nodes.delivery_s)
        for other, order in enumerate(rows):
            place = bisect_right(order, last_s, lo=high + 1 if other == rank else 0, key=start_of)
            if place < len(order):
                behind[other] = self.tail_s[order[place]]
        end_s = self.end_s.copy()
        clocks = [end_s[order[place - 1]] if place else 0.0 for order, place in zip(rows, places, strict=True)]
        for order, place in zip(rows, places, strict=True):
            for number in order[place:]:
                end_s[number] = -1.0
        kept = [number for number in self._done if old_s[number] < first_s]
        fresh = self._timed(places, clocks, old_s.copy(), end_s)
        if len(kept) + len(fresh) < len(self._done):
            return False
        self._done, self.tail_s = kept + fresh, self.tail_s.copy()
        self._set_tails((x for x in reversed(self._done) if old_s[x] <= last_s), behind)
        return True

    def times(self) -> _Times:
        """What `restore` needs to undo an evaluation."""
        return self.start_s, self.end_s, self.tail_s, self._done, self.makespan_s

    def restore(self, times: _Times) -> None:
        self.start_s, self.end_s, self.tail_s, self._done, self.makespan_s = times

    def _timed(self, places: list[int], clocks: list[float], start_s: list[float], end_s: list[float]) -> list[int]:
        """Actions from `places` on in an order in which each has its inputs before it; takes their times over when all
        could be reached. `end_s` is negative where unknown."""
        seconds, before, single, rows = self.nodes.seconds, self.before, self._single_before, self.rows
        missing = sum(len(row) - place for row, place in zip(rows, places, strict=True))
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
        if len(done) == missing:
            self.start_s, self.end_s = start_s, end_s
            self.makespan_s = max(map(sum, zip(clocks, self.nodes.delivery_s, strict=True)))
        return done

    def _set_tails(self, backwards: Iterable[int], behind: list[float]) -> None:
        """Args: backwards: actions, each behind all that need it; behind: tail of what follows on each rank."""
        seconds, after, single = self.nodes.seconds, self.after, self._single_after
        tail_s, rank = self.tail_s, self.nodes.rank
        for number in backwards:
            own = rank[number]
            tail = behind[own]
            other, lag = single[number]
            if other >= 0:
                if tail_s[other] + lag > tail:
                    tail = tail_s[other] + lag
            elif other == _SEVERAL:
                tail = max(tail, *(tail_s[target] + arc_lag for target, arc_lag in after[number]))
            tail_s[number] = behind[own] = tail + seconds[number]

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
