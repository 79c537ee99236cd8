"""Tabu search on rank orders: move one critical action a few places, judged by the paths through the moved stretch.

A schedule gets shorter only if every longest path does. Of moves of critical actions the new length is estimated from
old heads and tails outside the moved stretch (Balas & Vazacopoulos, Management Science 1998), the best estimates are
computed exactly, and a pair of actions that has just been swapped stays so for a while. Memory of a rank depends on its
own order alone; orders that exceed it are visited at a price per unit, which rises while they are and falls while they
are not (strategic oscillation), because often only two moves together are within memory.
"""

from dataclasses import dataclass, field
from random import Random

from mmplan.planner.schedules.search.effort import REACHED, Effort
from mmplan.planner.schedules.search.nodes import Nodes
from mmplan.planner.schedules.search.orders import Orders

_DISTANCE = 10  # places that an action moves at most
_SAMPLES = 30  # critical actions looked at in an iteration
_EXACT = 8  # moves computed exactly in an iteration
# Each run draws its own: iterations for which swapped pairs are kept, and up to half as many more; how much longer than
# the present order the next one may be, in mean durations. No one value is best on all problems tried.
_TENURES, _SLACKS = (10, 20, 40), (0.5, 2.0)
_STALE = 400  # iterations without a new best after which the best is taken up again

_PATIENCE, _REPRICE = 8, 1.4  # iterations beyond (within) memory after which the price rises (falls), and by how much

_Move = tuple[float, float, int, int, int, float]  # estimated length and fee, tie-breaker, rank, from, to, fee


@dataclass(slots=True)
class TabuSearch:
    """State of a search on one problem; `run` may be called again with other orders."""

    nodes: Nodes
    random: Random
    slack_s: float = 0.0
    tenure: int = 0
    price_s: float = 0.0  # of a unit of memory beyond capacity
    outside: int = 0  # iterations in a row beyond memory; negative: within
    follow: list[frozenset[int]] = field(default_factory=list)
    lead: list[frozenset[int]] = field(default_factory=list)
    capacity: list[float] = field(default_factory=list)
    over: list[float] = field(default_factory=list)  # of each rank, in the present order

    def __post_init__(self) -> None:
        rank = self.nodes.rank
        both = ((self.nodes.after, self.follow), (self.nodes.before, self.lead))
        for arcs, sets in both:
            sets += [frozenset(o for o, _ in row if rank[o] == rank[x]) for x, row in enumerate(arcs)]
        self.capacity = [capacity * (1 + 1e-9) for capacity in self.nodes.problem.capacity]
        taken = [change for change in self.nodes.memory if change > 0]
        self.price_s = sum(self.nodes.seconds) / len(self.nodes.seconds) / (sum(taken) / len(taken)) if taken else 0.0

    def run(self, rows: list[list[int]], *, iterations: int, floor_s: float, effort: Effort) -> list[list[int]]:
        """The best rows found; ends early when `floor_s` is reached or the effort is spent."""
        orders = Orders(self.nodes, rows)
        assert orders.evaluate(), "the first orders wait in a circle"
        mean_s = sum(self.nodes.seconds) / len(self.nodes.seconds)
        self.tenure, self.slack_s = self.random.choice(_TENURES), mean_s * self.random.choice(_SLACKS)
        best_s, best = orders.makespan_s, orders.copied()
        self.over = [self._over(orders, rank) for rank in range(len(rows))]
        kept_until: dict[tuple[int, int], int] = {}
        stale = 0
        for iteration in range(iterations):
            if best_s <= floor_s * (1 + REACHED) or effort.ended():
                break
            effort.spend_move(len(orders.start_s))
            self._step(orders, best_s, iteration, kept_until)
            stale += 1
            if orders.makespan_s < best_s * (1 - 1e-12) and sum(self.over) == 0.0:
                best_s, best, stale = orders.makespan_s, orders.copied(), 0
            elif stale == _STALE:
                orders.replace([list(row) for row in best])
                self.over = [self._over(orders, rank) for rank in range(len(rows))]
                stale = 0
        return best

    def _step(self, orders: Orders, best_s: float, iteration: int, kept_until: dict[tuple[int, int], int]) -> None:
        """Make the first move that is allowed and not too bad, best estimates first."""
        excess = sum(self.over)
        self._reprice(excess > 0)
        random = self.random
        limit_s = orders.makespan_s + self.price_s * excess + self.slack_s
        moves = self._moves(orders, limit_s, self.price_s * excess)
        for estimate_s, _, rank, source, target, fee_s in sorted(moves)[:_EXACT]:
            row = orders.rows[rank]
            number = row[source]
            if kept_until.get((number, row[target]), -1) > iteration and (estimate_s >= best_s * (1 - 1e-12) or fee_s):
                continue
            low, high = min(source, target), max(source, target)
            row.insert(target, row.pop(source))
            times = orders.times()
            if orders.evaluate_moved(rank, low, high):
                if orders.makespan_s + fee_s <= limit_s:
                    orders.index(rank)
                    self.over[rank] = self._over(orders, rank)
                    until = iteration + self.tenure + random.randrange(self.tenure // 2)
                    for other in row[low : high + 1]:
                        kept_until[number, other] = kept_until[other, number] = until
                    return
                orders.restore(times)
            row.insert(source, row.pop(target))

    def _over(self, orders: Orders, rank: int) -> float:
        """Memory beyond a rank's capacity, summed over its actions."""
        capacity = self.capacity[rank]
        return sum(held - capacity for held in orders.held[rank] if held > capacity)

    def _reprice(self, beyond: bool) -> None:
        self.outside = max(1, self.outside + 1) if beyond else min(-1, self.outside - 1)
        if abs(self.outside) >= _PATIENCE:
            self.price_s *= _REPRICE if beyond else 1 / _REPRICE
            self.outside = 0

    def _moves(self, orders: Orders, limit_s: float, paid_s: float) -> list[_Move]:
        present_s = orders.makespan_s * (1 - 1e-12)
        start_s, tail_s = orders.start_s, orders.tail_s
        critical = [x for x, (start, tail) in enumerate(zip(start_s, tail_s, strict=True)) if start + tail >= present_s]
        moves: list[_Move] = []
        for _ in range(_SAMPLES):
            number = self.random.choice(critical)
            if self.random.random() < 0.5:
                self._later(orders, number, limit_s, paid_s, moves)
            else:
                self._earlier(orders, number, limit_s, paid_s, moves)
        return moves

    def _later(self, orders: Orders, number: int, limit_s: float, paid_s: float, moves: list[_Move]) -> None:
        """Estimates of moving an action behind each of the next ones on its rank."""
        seconds, end_s, tail_s = self.nodes.seconds, orders.end_s, orders.tail_s
        before, after, follow = orders.before, orders.after, self.follow[number]
        rank = self.nodes.rank[number]
        row, held, first = orders.rows[rank], orders.held[rank], orders.position[number]
        capacity, change, price_s = self.capacity[rank], self.nodes.memory[number], self.price_s
        over = held[first] - capacity
        more = -over if over > 0 else 0.0  # memory beyond capacity, of the places passed so far
        delivery_s = self.nodes.delivery_s[rank]
        ready_s = max([end_s[other] + lag for other, lag in before[number]], default=0.0)
        own_tail = max([tail_s[other] + lag for other, lag in after[number]], default=0.0)
        clock = end_s[row[first - 1]] if first else 0.0
        passed: list[tuple[int, float]] = []  # actions that come before now, with their new starts
        for place in range(first + 1, min(len(row), first + 1 + _DISTANCE)):
            other = row[place]
            if other in follow:
                return
            over = here = held[place] - capacity
            if over > 0:
                more -= over
            over -= change
            if over > 0:
                more += over
            for source, lag in before[other]:
                if end_s[source] + lag > clock:
                    clock = end_s[source] + lag
            passed.append((other, clock))
            clock += seconds[other]
            tail = tail_s[row[place + 1]] if place + 1 < len(row) else delivery_s
            tail = (own_tail if own_tail > tail else tail) + seconds[number]
            longest = (ready_s if ready_s > clock else clock) + tail
            for moved, begin in reversed(passed):
                for target, lag in after[moved]:
                    if tail_s[target] + lag > tail:
                        tail = tail_s[target] + lag
                tail += seconds[moved]
                if begin + tail > longest:
                    longest = begin + tail
            fee_s = paid_s + price_s * (more + here if here > 0 else more)
            if longest + fee_s <= limit_s:
                moves.append((longest + fee_s, self.random.random(), rank, first, place, fee_s))

    def _earlier(self, orders: Orders, number: int, limit_s: float, paid_s: float, moves: list[_Move]) -> None:
        """Estimates of moving an action before each of the previous ones on its rank."""
        seconds, end_s, tail_s = self.nodes.seconds, orders.end_s, orders.tail_s
        before, after, lead = orders.before, orders.after, self.lead[number]
        rank = self.nodes.rank[number]
        row, held, first = orders.rows[rank], orders.held[rank], orders.position[number]
        capacity, change, price_s = self.capacity[rank], self.nodes.memory[number], self.price_s
        over = held[first] - capacity
        more = -over if over > 0 else 0.0  # memory beyond capacity, of the places passed so far
        delivery_s = self.nodes.delivery_s[rank]
        ready_s = max([end_s[other] + lag for other, lag in before[number]], default=0.0)
        own_tail = max([tail_s[other] + lag for other, lag in after[number]], default=0.0)
        tail = tail_s[row[first + 1]] if first + 1 < len(row) else delivery_s
        passed: list[tuple[int, float]] = []  # actions that come after now, with their new tails
        for place in range(first - 1, max(-1, first - 1 - _DISTANCE), -1):
            other = row[place]
            if other in lead:
                return
            over = held[place] - capacity
            if over > 0:
                more -= over
            over += change
            if over > 0:
                more += over
            here = (held[place - 1] if place else 0.0) + change - capacity
            for target, lag in after[other]:
                if tail_s[target] + lag > tail:
                    tail = tail_s[target] + lag
            tail += seconds[other]
            passed.append((other, tail))
            clock = end_s[row[place - 1]] if place else 0.0
            clock = ready_s if ready_s > clock else clock
            clock += seconds[number]
            longest = clock + (own_tail if own_tail > tail else tail)
            for moved, later in reversed(passed):
                for source, lag in before[moved]:
                    if end_s[source] + lag > clock:
                        clock = end_s[source] + lag
                if clock + later > longest:
                    longest = clock + later
                clock += seconds[moved]
            fee_s = paid_s + price_s * (more + here if here > 0 else more)
            if longest + fee_s <= limit_s:
                moves.append((longest + fee_s, self.random.random(), rank, first, place, fee_s))
