"""Blocks of a model as each of several tensor-parallel ranks has them, without storage, so that a recording can count
what a rank does: of the same linear layers that ranks of a run would share, found by the same trials (`splits.py`).
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mmplan.runtime.ghost.half_meta import META
from mmplan.runtime.ghost.linear_flow import Pair
from mmplan.runtime.ghost.recording import Recorder
from mmplan.runtime.ghost.split_linears import Split, cuts_of, set_up
from mmplan.runtime.ghost.splits import Found, find_splits
from mmplan.runtime.ghost.weightless import set_parameter
from mmplan.runtime.tensor_sums import TensorRanks
from mmplan.runtime.thread_group import Threads
from mmplan.scenario.recorded import BackwardSum, Reads

CPU = torch.device("cpu")
LARGEST_TRIED = 20_000_000  # parameters: 80 MB in fp32, twice for each of eight threads


class _Alone(TensorRanks):
    """The first of several ranks, whose sums only their shapes matter of."""

    def reduce(self, tensor: Tensor, *, backward: bool = False, largest: bool = False) -> None:
        """Nobody else is there."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SharedBlock:
    """A rank's part of a block."""

    block: nn.Module
    splits: tuple[Split, ...]

    @property
    def trained(self) -> frozenset[str]:
        return frozenset(name for name, parameter in self.block.named_parameters() if parameter.requires_grad)

    def forward_sums(self, linears: Mapping[str, tuple[int, int]]) -> tuple[int, ...]:
        """Numbers of each sum in a forward. Args: linears: what linear layers of the whole block took and gave."""
        return tuple(linears[split.pair.row][1] for split in self.splits)

    def backward_sums(self, linears: Mapping[str, tuple[int, int]], made: set[int]) -> tuple[BackwardSum, ...]:
        """Those of a backward. Args: made: positions of arguments that may have a gradient."""
        return tuple(one for split in self.splits for one in self._of_pair(split.pair, linears, made))

    def _of_pair(self, pair: Pair, linears: Mapping[str, tuple[int, int]], made: set[int]) -> Iterable[BackwardSum]:
        for entry in pair.entries:
            of_inputs, of_weights = bool(entry.made_of & made), bool(entry.made_of & self.trained)
            reads: Reads = "none" if not of_inputs and not of_weights else "both"
            reads = reads if of_inputs == of_weights else "inputs" if of_inputs else "weights"
            yield BackwardSum(numbers=linears[entry.readers[0]][0], reads=reads)
        for name in pair.between:
            if name in self.trained:
                yield BackwardSum(numbers=self.block.get_parameter(name).numel(), reads="weights")


def ask_splits(recorder: Recorder, units: Sequence[str], degree: int) -> Found:
    """What so many ranks would split of these units, asked of threads; of blocks too large for that, what the shapes of
    a rank's part allow. InputError as `find_splits`."""
    threads = Threads()
    large = [unit for unit in units if is_large(recorder.unit(unit))]
    units = [unit for unit in units if unit not in large]

    def ask(rank: int) -> Found:
        group = threads.groups_of(rank)(np.arange(degree).reshape(1, -1))
        return find_splits(recorder, units, TensorRanks(degree=degree, index=rank, group=group), CPU)

    by_shapes = find_splits(recorder, large, _Alone(degree=degree, index=0, group=None), META)
    tried = threads.run(range(degree), ask)[0]
    return Found(splits=tried.splits | by_shapes.splits, whole=(*tried.whole, *by_shapes.whole))


def is_large(block: nn.Module) -> bool:
    """Whether a trial on numbers, in fp32 on as many threads as ranks, would take minutes and gigabytes."""
    return sum(parameter.numel() for parameter in block.parameters()) > LARGEST_TRIED


def shared_blocks(model: nn.Module, splits: Mapping[str, tuple[Split, ...]], degree: int) -> dict[str, SharedBlock]:
    """Unit -> a rank's part of it; units of one form that are split alike have one. Args: splits: by unit."""
    ranks, known = _Alone(degree=degree, index=0, group=None), dict[Any, SharedBlock]()
    found = {}
    for unit, own in splits.items():
        if id(own) not in known:
            known[id(own)] = SharedBlock(block=_part(model.get_submodule(unit), own, ranks), splits=own)
        found[unit] = known[id(own)]
    return found


def _part(whole: nn.Module, splits: tuple[Split, ...], ranks: TensorRanks) -> nn.Module:
    block, cuts = copy.deepcopy(whole), cuts_of(whole, splits, ranks.degree)
    for name, parameter in list(block.named_parameters()):
        own = cuts[name].own(parameter.data, 0) if name in cuts else torch.empty_like(parameter.data)
        set_parameter(block, name, Parameter(own, parameter.requires_grad))
    set_up(block, splits, ranks)
    return block
