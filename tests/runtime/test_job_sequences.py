"""Which blocks of a user's own run on a tensor-parallel rank's rows: ranks are threads of one process."""

import copy
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mmplan.runtime.ghost.recording import Batch, Recorder
from mmplan.runtime.ghost.sequence_linears import RowsOf
from mmplan.runtime.ghost.sequence_trials import SequenceWays
from mmplan.runtime.ghost.splits import find_splits
from mmplan.runtime.ghost.units import find_units
from mmplan.runtime.ghost.weightless import build_weightless
from mmplan.runtime.tensor_sums import TensorRanks
from mmplan.runtime.thread_group import Threads

RANKS, ROWS = 2, 5  # of which the last rank has two and a row of zeros
CPU = torch.device("cpu")


class Block(nn.Module):
    """Two linear layers behind a norm, whose code reads the shape of what they are given, and something more."""

    def __init__(self, more: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.inner, self.more = nn.LayerNorm(8), Inner(), more

    def forward(self, x: Tensor) -> Tensor:
        return self.more(x) + self.inner(self.norm(x))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(*x.shape[:-1], 2, -1)
        return self.down(heads.cumsum(1).tanh().flatten(-2))


class Model(nn.Module):
    def __init__(self, more: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList([Block(more)])

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.blocks[0](self.first(x)).square().mean()
        return loss


def refused(recorder: Recorder, batch: Batch, threads: Threads, rank: int) -> dict[str, str]:
    """By block, why it does not run so."""
    group = threads.groups_of(rank)(np.arange(RANKS).reshape(1, -1))
    ranks, recorder = TensorRanks(degree=RANKS, index=rank, group=group), copy.copy(recorder)
    splits = find_splits(recorder, ["blocks.0"], ranks, CPU).splits
    recorder.cut, recorder.parts = frozenset(splits), False
    ways = SequenceWays(recorder, splits, RowsOf(ranks), CPU)
    assert [*splits] == ["blocks.0"]
    return ways.first_look(recorder.record(batch).calls)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (torch.tanh, {}),  # rows are summed between the layers, where each rank has all of them
        (lambda x: x - x.mean(1, keepdim=True), {"blocks.0": "output 0 differs when it is split"}),
    ],
)
def test_blocks_that_mix_rows_between_split_layers_alone_run_on_some(
    more: Callable[[Tensor], Tensor], told: dict[str, str]
) -> None:
    model, batch = build_weightless(lambda: Model(more)), {"x": torch.randn(2, ROWS, 8)}
    recorder, threads = Recorder(model, find_units(model)), Threads()
    recorder.record(batch)
    assert threads.run(range(RANKS), partial(refused, recorder, batch, threads)) == [told] * RANKS
