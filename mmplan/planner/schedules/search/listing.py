"""Many schedules at once by list scheduling: every rank takes what can start first, with rules that differ by row.

All rows of a batch advance together. In each turn a rank picks among the next actions of its lanes, (kind, stage) in
microbatch order: those that could start before the earliest one plus `patience` of its duration, and of them the one
with the least `offset` + microbatch. Every pick that starts before any pick of its row ends is made at once, because
nothing that is not known yet could come before it.
"""

from dataclasses import dataclass

import numpy as np

from mmplan.planner.schedules.search.nodes import Nodes

_FAR = 1e30
_FEW = 2  # inputs that are looked up for every lane


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of `rows` schedules.

    Attributes:
        offset: [rows, lanes] priority of a lane, in microbatches; smaller goes first.
        in_flight: [rows, stages] most microbatches between F and I.
        patience: [rows, ranks] part of a duration that a rank may wait for something more urgent.
    """

    offset: np.ndarray
    in_flight: np.ndarray
    patience: np.ndarray

    def rows(self, index: np.ndarray) -> "Rules":
        return Rules(self.offset[index], self.in_flight[index], self.patience[index])


@dataclass(frozen=True, slots=True)
class Listed:
    """`makespan_s` of every row, infinite where memory blocked it or it was given up; `picks` [turn, row, rank]."""

    makespan_s: np.ndarray
    picks: np.ndarray

    def orders(self, row: int) -> list[list[int]]:
        """Action numbers of each rank."""
        return [column[column >= 0].tolist() for column in self.picks[:, row, :].T]


class Lister:
    """The arrays of a problem that all batches share; lanes are laid out [rank, slot] with empty slots."""

    def __init__(self, nodes: Nodes) -> None:
        problem = nodes.problem
        self.count, self.ranks = len(nodes.actions), problem.ranks
        on_rank: list[list[int]] = [[] for _ in range(problem.ranks)]
        for lane, numbers in enumerate(nodes.lanes):
            on_rank[nodes.rank[numbers[0]]].append(lane)
        self.slots = max(len(row) for row in on_rank)
        width = self.ranks * self.slots
        longest = max(len(numbers) for numbers in nodes.lanes)
        self.lane_of = np.full(width, -1)
        self.node = np.full((width, longest + 1), self.count)  # the sentinel has no end
        self.microbatch = np.zeros((width, longest + 1))
        self.is_forward = np.zeros(width, dtype=bool)
        self.stage = np.zeros(width, dtype=int)
        for rank, row in enumerate(on_rank):
            for slot, lane in enumerate(row):
                place = rank * self.slots + slot
                numbers = nodes.lanes[lane]
                first = nodes.actions[numbers[0]]
                self.microbatch[place, : len(numbers)] = [nodes.actions[number].microbatch for number in numbers]
                self.lane_of[place] = lane
                self.node[place, : len(numbers)] = numbers
                self.stage[place] = first.stage
                self.is_forward[place] = first.kind == "F" and problem.stages[first.stage].has_backward
        self.seconds = np.array([*nodes.seconds, 0.0])
        self.memory = np.array([*nodes.memory, 0.0])
        self.rank = np.array([*nodes.rank, 0])
        self.place = np.zeros(self.count + 1, dtype=int)
        for place in range(width):
            self.place[self.node[place][self.node[place] < self.count]] = place
        self.in_flight_change = np.zeros(self.count + 1, dtype=int)
        for number, action in enumerate(nodes.actions):
            backward = problem.stages[action.stage].has_backward
            self.in_flight_change[number] = {"F": int(backward), "I": -1, "W": 0}[action.kind]
        self.stage_of_node = np.array([*(action.stage for action in nodes.actions), 0])
        data = [
            [(other, lag) for other, lag in arcs if nodes.lane[other] != nodes.lane[number]]
            for number, arcs in enumerate(nodes.before)
        ]
        most = max(1, *(len(arcs) for arcs in data))
        # index count: never ends (sentinel of exhausted lanes); index count + 1: ended at 0 (no input)
        self.input = np.full((self.count + 1, most), self.count + 1)
        self.lag = np.zeros((self.count + 1, most))
        for number, arcs in enumerate(data):
            for column, (other, lag) in enumerate(arcs):
                self.input[number, column], self.lag[number, column] = other, lag
        self.input[self.count, :] = self.count
        wide = {int(self.place[number]) for number, arcs in enumerate(data) if len(arcs) > _FEW}
        self.wide = tuple(sorted(wide))
        self.delivery_s = np.array(nodes.delivery_s)
        self.capacity = np.array(problem.capacity) * (1 + 1e-9)

    def _ready_s(self, end_s: np.ndarray, node: np.ndarray) -> np.ndarray:
        """When the inputs of `node` [row, place] are there. The few lanes with more than `_FEW` come after."""
        ready_s: np.ndarray = np.take_along_axis(end_s, self.input[node, 0], 1) + self.lag[node, 0]
        for column in range(1, min(_FEW, self.input.shape[1])):
            np.maximum(
                ready_s, np.take_along_axis(end_s, self.input[node, column], 1) + self.lag[node, column], out=ready_s
            )
        for place in self.wide:
            inputs, lag = self.input[node[:, place], _FEW:], self.lag[node[:, place], _FEW:]
            more_s = (np.take_along_axis(end_s, inputs, 1) + lag).max(1)
            np.maximum(ready_s[:, place], more_s, out=ready_s[:, place])
        return ready_s

    def run(self, rules: Rules, limit_s: float = _FAR) -> Listed:
        """Schedules of all rows; rows whose clocks pass `limit_s` are given up."""
        rows = len(rules.offset)
        width, slots, ranks = self.ranks * self.slots, self.slots, self.ranks
        offset = rules.offset[:, self.lane_of]
        allowed = rules.in_flight[:, self.stage]
        position = np.zeros((rows, width), dtype=int)
        end_s = np.full((rows, self.count + 2), _FAR)
        end_s[:, self.count + 1] = 0.0
        clock_s = np.zeros((rows, ranks))
        held = np.zeros((rows, ranks))
        flying = np.zeros((rows, self.stage.max() + 1), dtype=int)
        lanes = np.arange(width)
        rank_of_place = lanes // slots
        base = np.arange(ranks)[None, :] * slots
        picks = []
        alive = np.ones(rows, dtype=bool)
        while True:
            node = self.node[lanes, position]
            ready_s = self._ready_s(end_s, node)
            start_s = np.maximum(ready_s, clock_s[:, rank_of_place])
            full = (held[:, rank_of_place] + self.memory[node] > self.capacity[rank_of_place]) | (
                flying[:, self.stage] >= allowed
            )
            start_s[full & self.is_forward] = _FAR
            by_rank = start_s.reshape(rows, ranks, slots)
            first = by_rank.argmin(2) + base
            first_s = np.take_along_axis(start_s, first, 1)
            within_s = first_s + rules.patience * self.seconds[np.take_along_axis(node, first, 1)]
            urgency = np.where(
                by_rank <= within_s[:, :, None],
                (offset + self.microbatch[lanes, position]).reshape(rows, ranks, slots),
                _FAR,
            )
            pick = urgency.argmin(2) + base
            pick_s = np.take_along_axis(start_s, pick, 1)
            number = np.take_along_axis(node, pick, 1)
            finish_s = pick_s + self.seconds[number]
            least_s = finish_s.min(1)
            alive &= least_s < limit_s
            made = (pick_s <= least_s[:, None]) & (pick_s < _FAR) & alive[:, None]
            # a pick that starts exactly when another ends may need it: its own start is known all the same
            if not made.any():
                break
            where, column = np.nonzero(made)
            chosen = number[where, column]
            position[where, pick[where, column]] += 1
            end_s[where, chosen] = finish_s[where, column]
            clock_s[where, column] = finish_s[where, column]
            held[where, column] += self.memory[chosen]
            np.add.at(flying, (where, self.stage_of_node[chosen]), self.in_flight_change[chosen])
            picks.append(np.where(made, number, -1))
        done = position.sum(1) == self.count
        makespan_s = np.where(done, (clock_s + self.delivery_s).max(1), np.inf)
        return Listed(makespan_s, np.stack(picks) if picks else np.zeros((0, rows, ranks), dtype=int))
