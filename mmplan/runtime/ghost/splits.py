"""Which linear layers of a real model's blocks its tensor-parallel ranks share: found by structure, kept if a trial is
right.

Before training, one block of each form is run whole and split, with random weights, on the shapes of a recorded
microbatch: outputs and every gradient have to agree. What does not, stays whole on each rank, and is told.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmplan.errors import InputError
from mmplan.runtime.ghost.half_meta import META
from mmplan.runtime.ghost.linear_flow import Pair, find_pairs
from mmplan.runtime.ghost.recording import Recorder
from mmplan.runtime.ghost.split_linears import Split, cuts_of, set_up
from mmplan.runtime.ghost.trials import DrawsNumbersError, Results, drawn_block, first_difference, run_drawn, settings
from mmplan.runtime.network import all_reduce
from mmplan.runtime.tensor_sums import TensorRanks


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """splits: by unit; whole: what stays whole of forms of blocks, each with the reason."""

    splits: dict[str, tuple[Split, ...]]
    whole: tuple[str, ...]


def find_splits(
    recorder: Recorder,
    units: Iterable[str],
    ranks: TensorRanks,
    device: torch.device,
    apart: Mapping[str, Sequence[str]] | None = None,
) -> Found:
    """Collective over the ranks that share layers.

    Args:
        recorder: has recorded batches that use the units; of a model without weights.
        device: where blocks are tried; on meta by the shapes of what they give alone, without other ranks.
        apart: of units, modules inside whose layers are not looked at.

    Raises:
        InputError: a block draws random numbers.
    """
    known: dict[Any, tuple[Split, ...]] = {}
    splits, told = {}, list[str]()
    for unit in units:
        block = recorder.unit(unit)
        given, form = recorder.arguments.get(recorder.form(unit)), (recorder.form(unit), settings(block))
        if form not in known:
            left_out = () if apart is None else apart.get(unit, ())
            found = _Trial(unit, block, given, ranks, device, left_out) if given is not None else None
            known[form] = () if found is None else found.kept
            told += [] if found is None else found.failed
            count = sum(type(part) is nn.Linear for part in block.modules())
            if count > 1 and not known[form] and (found is None or not found.failed):
                told.append(f"{unit}: none of its {count} linear layers reads nothing but others")
        if known[form]:
            splits[unit] = known[form]
    return Found(splits=splits, whole=tuple(told))


class _Trial:
    """Of one block. Attributes: kept: what may be split; failed: what may not, with the reason."""

    def __init__(
        self, name: str, block: nn.Module, given: Any, ranks: TensorRanks, device: torch.device, apart: Sequence[str]
    ) -> None:
        self._name, self._block, self._ranks, self._device = name, block, ranks, device
        self._args, self._kwargs = given
        self.kept: tuple[Split, ...] = ()
        self.failed: list[str] = []
        pairs = find_pairs(block, self._args, self._kwargs, ranks.degree, apart)
        if not pairs:
            return
        whole = self._run(())
        assert not isinstance(whole, str), f"{name} fails alone: {whole}"
        for pair in pairs:
            reasons = []
            for split in self._ways(pair):
                reason = self._differs(whole, (*self.kept, split))
                if reason is None:
                    self.kept = (*self.kept, split)
                    break
                reasons.append(reason)
            else:
                self.failed.append(f"{name}: {', '.join(pair.columns)} and {pair.row} ({reasons[0]})")

    def _ways(self, pair: Pair) -> list[Split]:
        """As it is; with the numbers of heads divided that the module around the first layers has; and with the shapes
        narrowed that its code takes from its input."""
        around = Split(pair=pair).around
        numbers = {
            key: value
            for key, value in vars(self._block.get_submodule(around)).items()
            if type(value) is int and "heads" in key and value > 1 and value % self._ranks.degree == 0
        }
        heads = tuple((around, key) for key in numbers)
        divided = [Split(pair=pair, heads=heads), Split(pair=pair, heads=heads, narrowed=around)] if heads else []
        return [Split(pair=pair), *divided]

    def _differs(self, whole: Results, splits: Sequence[Split]) -> str | None:
        """Why a block so split is another one; the same on all ranks."""
        found = self._run(splits)
        cuts, index = cuts_of(self._block, splits, self._ranks.degree), self._ranks.index
        expected = [(name, cuts[name].own(value, index) if name in cuts else value) for name, value in whole]
        reason = found if isinstance(found, str) else first_difference(expected, found)
        if self._device == META:  # one rank is asked for all
            return reason
        failed = torch.tensor([reason is not None], dtype=torch.int32, device=self._device)
        all_reduce(failed, self._ranks.group, dist.ReduceOp.MAX)
        return reason or ("another rank's part differs" if failed.item() else None)

    def _run(self, splits: Sequence[Split]) -> Results | str:
        ranks, cuts = self._ranks, cuts_of(self._block, splits, self._ranks.degree)

        def own(name: str, value: Tensor) -> Tensor:
            return cuts[name].own(value, ranks.index) if name in cuts else value

        block = drawn_block(self._block, self._device, own)
        set_up(block, splits, ranks)
        counted = ranks.forward_bytes, ranks.backward_bytes
        try:
            return run_drawn(block, block, self._args, self._kwargs, self._device)
        except DrawsNumbersError:
            raise InputError(
                f"'{self._name}' draws random numbers (dropout), which ranks that share it would draw each for itself: "
                "set its probability to 0 in the model, or `constraints.tp: [1]` in the scenario"
            ) from None
        finally:
            ranks.forward_bytes, ranks.backward_bytes = counted
