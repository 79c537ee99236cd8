"""A stage that sleeps instead of computing and hands over tensors of the real sizes.

So the bubbles of many ranks can be checked on a few cores: sleeping ranks need none. Durations are the predicted ones,
stretched by one factor for the whole run, because sleeps are exact to about 0.1 ms only.
"""

import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mmplan.planner.program import Program, RankProgram, named_by_layers
from mmplan.runtime.finite import Unsound
from mmplan.runtime.network import all_reduce, gather
from mmplan.runtime.places import collapsed
from mmplan.scenario.technique import Sharding


def collapse_shards(program: Program) -> Program:
    """The program with one process for the ranks of a replica's stage: only those that it lists are counted."""
    places = {rank.rank: place for place, rank in enumerate(program.ranks)}
    ranks = tuple(collapsed(rank, places) for rank in program.ranks)
    return Program(ranks=ranks, microbatches=program.microbatches, replicas=program.replicas)


class SleepStage:
    """Plays one stage of a rank for one step at a time (see `load`)."""

    def __init__(
        self,
        stage: int,
        sharding: Sharding,
        replicas: dist.ProcessGroup | None,
        ties: Mapping[int, dist.ProcessGroup | None],
    ) -> None:
        """`ties`: by number, the ranks that sum what several stages hold."""
        self._stage, self._sharding, self._replicas, self._ties = stage, sharding, replicas, ties
        self._moved_bytes = 0
        self._sleeps_s: dict[tuple[str, int], float] = {}
        self._sends: dict[tuple[str, int], dict[str, int]] = {}
        self._moves: dict[tuple[str, int], int] = {}
        self._buffer = torch.zeros(0, dtype=torch.uint8)

    def load(self, program: RankProgram, durations_s: Sequence[float]) -> None:
        """Take the step's actions with the seconds each compute and update shall last; other stages of the rank take
        theirs."""
        self._sleeps_s = {}
        self._sends = {}
        self._moves = {}
        for action, seconds in zip(program.actions, durations_s, strict=True):
            if action.stage != self._stage:
                continue
            if action.kind == "SEND":
                sizes = self._sends.setdefault(("B" if "<" in action.tensor else "F", action.microbatch), {})
                sizes[named_by_layers(action.tensor)] = action.whole_bytes or action.bytes
            elif action.kind != "RECV":
                self._sleeps_s[action.kind, action.microbatch] = seconds
                self._moves[action.kind, action.microbatch] = action.bytes
        largest_bytes = max(self._moves.values(), default=0)
        if self._buffer.nbytes != largest_bytes:
            self._buffer = torch.zeros(largest_bytes, dtype=torch.uint8)

    def forward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._compute("F", microbatch)

    def backward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._compute("B", microbatch)

    def backward_input(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._compute("I", microbatch)

    def backward_weight(self, microbatch: int) -> None:
        self._compute("W", microbatch)

    def reads(self, *, gradients: bool) -> tuple[str, ...]:
        return ()

    def foreseen_bytes(self) -> int | None:
        return None

    def reduce(self) -> None:
        self._move("REDUCE", -1)

    def tie(self, number: int) -> None:
        size, group = self._moves["TIE", number], self._ties[number]
        self._moved_bytes += size
        if group is not None:
            all_reduce(self._buffer[:size], group)

    def step(self) -> None:
        until_s = time.perf_counter() + self._sleeps_s.get(("STEP", -1), 0.0)  # the first of a rank stands for all
        self._move("STEP", -1)
        time.sleep(max(0.0, until_s - time.perf_counter()))

    def moved_bytes(self) -> int:
        return self._moved_bytes

    def losses(self) -> dict[str, float]:
        return {}

    def unsound(self) -> Unsound | None:
        """Nothing is computed that could be no number."""
        return None

    def forgo(self) -> None:
        pass

    def poison(self) -> None:
        pass

    def memory_bytes(self) -> int:
        """Nothing is computed, so there is no memory to compare."""
        return 0

    def _compute(self, kind: str, microbatch: int) -> dict[str, Tensor]:
        until_s = time.perf_counter() + self._sleeps_s[kind, microbatch]
        half = "B" if kind == "I" else kind
        sizes = self._sends.get((half, microbatch), {})
        results = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
        self._move(kind, microbatch)
        time.sleep(max(0.0, until_s - time.perf_counter()))
        return results

    def _move(self, kind: str, microbatch: int) -> None:
        """What an action moves among the replicas: an all-reduce, where state is sharded as many bytes gathered, which
        takes as long as to scatter them."""
        size = self._moves.get((kind, microbatch), 0)
        self._moved_bytes += size
        if self._replicas is None or size == 0:
            return
        if self._sharding == "none":
            all_reduce(self._buffer[:size], self._replicas)
        else:
            share = self._buffer[: size // self._replicas.size()]
            gather(self._buffer[: share.nbytes * self._replicas.size()], share, self._replicas)
