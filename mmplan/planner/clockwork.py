"""The clock in plain Python: quick on small programs, and the one that names what a broken program waits for."""

from collections import Counter
from collections.abc import Sequence

from mmplan.errors import CheckError
from mmplan.planner.program import Action, Meeting, Program, is_ahead, meeting

_TensorKey = tuple[int, int, str, int]  # source rank, target rank, tensor, microbatch


Rows = list[list[float]]  # [rank of the program][action]


class Clockwork:
    """State of one pass: each rank advances until it needs something that has no time yet."""

    def __init__(self, program: Program, durations: Sequence[Sequence[float]]) -> None:
        self.program, self.durations = program, durations
        self.start_s = [[0.0] * len(rank.actions) for rank in program.ranks]
        self.end_s = [[0.0] * len(rank.actions) for rank in program.ranks]
        self.position = [0] * len(program.ranks)
        self.clock_s = [0.0] * len(program.ranks)
        self.arrival_s: dict[_TensorKey, tuple[float, float]] = {}
        self.link_free_s: dict[tuple[int, int], float] = {}
        self.posted: list[dict[tuple[str, int, int], list[_TensorKey]]] = [{} for _ in program.ranks]
        self.waiting_for: dict[_TensorKey, int] = {}
        self.at_meeting: dict[Meeting, list[int]] = {}
        self.members: Counter[Meeting] = Counter()
        for rank in program.ranks:
            met = (meeting(rank, action) for action in rank.actions if action.kind in ("REDUCE", "TIE"))
            self.members.update({("REDUCE", rank.stage, 0), *met})
        self.ready: list[int] = []

    def run(self) -> tuple[Rows, Rows]:
        """Start and end of every action; CheckError when ranks wait for each other for ever."""
        self.ready = list(range(len(self.program.ranks)))
        while self.ready:
            self._advance(self.ready.pop())
        self._refuse_unfinished()
        self._fill_receives()
        return self.start_s, self.end_s

    def _advance(self, index: int) -> None:
        """Go on with one rank until it ends or blocks."""
        rank = self.program.ranks[index]
        while self.position[index] < len(rank.actions):
            position = self.position[index]
            action = rank.actions[position]
            if action.kind == "SEND":
                self._send(index, position, action)
            elif action.kind == "RECV" and is_ahead(action.tensor):
                pass  # no compute of this step waits for it
            elif action.kind == "RECV":
                users = "B" if "<" in action.tensor else "F"
                key = (action.peer, rank.rank, action.tensor, action.microbatch)
                self.posted[index].setdefault((users, action.stage, action.microbatch), []).append(key)
            elif action.kind in ("REDUCE", "TIE"):
                self._meet(index, meeting(rank, action))
                return
            elif not self._compute(index, position, action):
                return
            self.position[index] += 1

    def _send(self, index: int, position: int, action: Action) -> None:
        source = self.program.ranks[index].rank
        link = (source, action.peer)
        start_s = max(self.clock_s[index], self.link_free_s.get(link, 0.0))
        end_s = start_s + self.durations[index][position]
        self.link_free_s[link] = end_s
        self.start_s[index][position], self.end_s[index][position] = start_s, end_s
        key = (source, action.peer, action.tensor, action.microbatch)
        if key in self.arrival_s:
            raise CheckError(f"rank {source} lists {action} twice")
        self.arrival_s[key] = (start_s, end_s)
        if key in self.waiting_for:
            self.ready.append(self.waiting_for.pop(key))

    def _compute(self, index: int, position: int, action: Action) -> bool:
        """False when a tensor that the action needs has no arrival time yet. `I` waits like `B`; `W`, STEP never."""
        users = "F" if action.kind == "F" else "B"
        keys = self.posted[index].get((users, action.stage, action.microbatch), ()) if action.kind in "FBI" else ()
        start_s = self.clock_s[index]
        for key in keys:
            if key not in self.arrival_s:
                self.waiting_for[key] = index
                return False
            start_s = max(start_s, self.arrival_s[key][1])
        end_s = start_s + self.durations[index][position]
        self.start_s[index][position], self.end_s[index][position] = start_s, end_s
        self.clock_s[index] = end_s
        return True

    def _meet(self, index: int, key: Meeting) -> None:
        """Block until all who sum are here; the last one lets all of them go on."""
        arrived = self.at_meeting.setdefault(key, [])
        arrived.append(index)
        if len(arrived) < self.members[key]:
            return
        start_s = max(self.clock_s[member] for member in arrived)
        for member in arrived:
            position = self.position[member]
            end_s = start_s + self.durations[member][position]
            self.start_s[member][position], self.end_s[member][position] = start_s, end_s
            self.clock_s[member] = end_s
            self.position[member] += 1
        self.ready.extend(arrived)
        arrived.clear()

    def _refuse_unfinished(self) -> None:
        stuck = [
            f"rank {rank.rank} at {rank.actions[position]}"
            for rank, position in zip(self.program.ranks, self.position, strict=True)
            if position < len(rank.actions)
        ]
        if stuck:
            more = f" and {len(stuck) - 4} more" if len(stuck) > 4 else ""
            raise CheckError(
                f"deadlock: {', '.join(stuck[:4])}{more} wait for each other or for a send that never comes"
            )

    def _fill_receives(self) -> None:
        for index, rank in enumerate(self.program.ranks):
            for position, action in enumerate(rank.actions):
                if action.kind == "RECV":
                    key = (action.peer, rank.rank, action.tensor, action.microbatch)
                    times_s = self.arrival_s.get(key)
                    if times_s is None:
                        raise CheckError(f"rank {rank.rank} receives {action} and rank {action.peer} never sends it")
                    self.start_s[index][position], self.end_s[index][position] = times_s
