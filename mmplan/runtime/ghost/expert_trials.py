"""How ranks share the experts of a real model's blocks: found by structure, kept where a trial is right.

Before training one block of each form runs whole, and with experts on their ranks, on drawn tokens that are others on
every replica: outputs and every gradient have to agree, those of experts with the sum over the replicas. Unlike a pair
of linear layers, which then stays whole, experts that are not understood end the run: the plan has no memory for all.
"""

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmplan.cost_models.expert_ops import Dispatch
from mmplan.cost_models.layer import Layer
from mmplan.errors import InputError
from mmplan.runtime.ghost.expert_flow import Experts, find_experts, place_of_code
from mmplan.runtime.ghost.recording import Recorder, Recording
from mmplan.runtime.ghost.split_experts import (
    ExpertSplit,
    expert_cuts,
    parameters_away,
    rows_given,
    set_up_experts,
)
from mmplan.runtime.ghost.split_linears import Split, cuts_of, set_up
from mmplan.runtime.ghost.trials import DrawsNumbersError, Results, drawn_block, first_difference, run_drawn, settings
from mmplan.runtime.network import all_reduce
from mmplan.runtime.tensor_sums import TensorRanks


def experts_of(recorder: Recorder, layers: Mapping[str, Layer], degree: int) -> dict[str, Experts]:
    """The experts of those units that have some by the plan's `layers`, where `degree` ranks share them: of the units
    of a layer the largest, beside which a norm may stand.

    Raises:
        InputError: those of a unit are not understood.
    """
    if degree == 1:
        return {}
    largest: dict[str, str] = {}
    for unit, layer in sorted(layers.items(), key=lambda one: _size(recorder.unit(one[0]))):
        largest[layer.id] = unit
    known: dict[Any, Experts] = {}
    found_in: dict[str, Experts] = {}
    for unit in (unit for unit, layer in layers.items() if largest[layer.id] == unit and _planned(layer)):
        block, form = recorder.unit(unit), _form(recorder, unit)
        if form not in known:
            args, kwargs = recorder.arguments[recorder.form(unit)]
            found = find_experts(block, args, kwargs, _planned(layers[unit]))
            if isinstance(found, str):
                raise _refused(unit, block, degree, found)
            known[form] = found
        found_in[unit] = known[form]
    return found_in


def _size(unit: nn.Module) -> int:
    return sum(parameter.numel() for parameter in unit.parameters())


def _planned(layer: Layer) -> int:
    """How many experts a layer of the plan has; 0 where it has none."""
    return next((op.experts for op in layer.ops if isinstance(op, Dispatch)), 0)


def require_equal_calls(
    recordings: Sequence[Recording], units: Collection[str], ranks: TensorRanks | None, device: torch.device
) -> None:
    """Ranks that share experts come to them together: in each microbatch of a step all call the same units that have
    some. Collective over these ranks.

    Raises:
        InputError: they do not.
    """
    if ranks is None or ranks.experts is None or not units:
        return
    calls = [[call.unit for call in recording.calls if call.unit in units] for recording in recordings]
    own = zlib.crc32(repr(calls).encode())
    extremes = torch.tensor([own, -own], dtype=torch.int64, device=device)
    all_reduce(extremes, ranks.experts.group, dist.ReduceOp.MAX)
    most, least = extremes.tolist()
    if most != -least:
        raise InputError(
            "replicas share experts, and their microbatches of one step do not use the same blocks: order the batches "
            "so that they do, or set `constraints.ep: [1]` in the scenario and optimize again"
        )


def find_expert_splits(
    recorder: Recorder,
    experts: Mapping[str, Experts],
    splits: Mapping[str, Sequence[Split]],
    ranks: TensorRanks,
    replica: int,
    device: torch.device,
) -> dict[str, ExpertSplit]:
    """How units share their experts. Collective over all ranks that have them.

    Args:
        splits: of their linear layers, which tensor-parallel ranks share.
        replica: whose tokens this rank has.

    Raises:
        InputError: a block computes something else when its experts lie on several ranks.
    """
    known: dict[Any, ExpertSplit] = {}
    for unit, found in experts.items():
        form = _form(recorder, unit)
        if form not in known:
            given = recorder.arguments[recorder.form(unit)]
            own = splits.get(unit, ())
            known[form] = _Trial(unit, recorder.unit(unit), given, found, own, ranks, replica, device).kept
    return {unit: known[_form(recorder, unit)] for unit in experts}


def _form(recorder: Recorder, unit: str) -> Any:
    return recorder.form(unit), settings(recorder.unit(unit))


def _refused(unit: str, module: nn.Module, degree: int, reason: str) -> InputError:
    return InputError(
        f"{place_of_code(module)}: the plan has ep={degree}, and the experts of '{unit}' ({type(module).__name__}) "
        f"cannot be shared: {reason}: set `constraints.ep: [1]` in the scenario and optimize again"
    )


class _Trial:
    """Of one block. Attribute: kept: how its experts are shared."""

    def __init__(
        self,
        name: str,
        block: nn.Module,
        given: Any,
        experts: Experts,
        splits: Sequence[Split],
        ranks: TensorRanks,
        replica: int,
        device: torch.device,
    ) -> None:
        assert ranks.experts is not None
        self._name, self._block, self._experts, self._splits = name, block, experts, splits
        self._ranks, self._of_experts, self._device = ranks, ranks.experts, device
        self._replica = replica
        self._args, self._kwargs = given
        self.kept = self._found(block.get_submodule(experts.module), experts, ranks.experts.degree)

    def _found(self, module: nn.Module, experts: Experts, degree: int) -> ExpertSplit:
        whole, rows = self._whole()
        topk = experts.topk or rows // experts.tokens
        uneven = f"{experts.tokens} tokens have {rows:,} rows at experts, no whole number each"
        if reason := self._agreed(None if experts.topk or rows == topk * experts.tokens else uneven):
            raise _refused(self._name, module, degree, reason)
        reasons = list[str]()
        for numbers in self._ways(module):
            split = ExpertSplit(experts=experts, topk=topk, numbers=numbers)
            why = self._differs(whole, split)
            if why is None:
                return split
            reasons.append(why)
        raise _refused(self._name, module, degree, reasons[0])

    def _ways(self, module: nn.Module) -> list[tuple[str, ...]]:
        """With the numbers of experts divided that the module has, and as it is."""
        if self._experts.form == "listed":
            return [()]
        numbers = tuple(
            key
            for key, value in vars(module).items()
            if type(value) is int and value == self._experts.count and "expert" in key
        )
        return [numbers, ()] if numbers else [()]

    def _whole(self) -> tuple[Results, int]:
        """What the block gives alone, and how many rows its experts get."""
        block = drawn_block(self._block, self._device, lambda _, value: value)
        counts = rows_given(block, self._experts)
        found = self._run(block)
        if isinstance(found, str):
            reason = f"alone, on drawn numbers, it fails ({found})"
            raise _refused(self._name, self._block, self._of_experts.degree, reason)
        # Ranks that share layers have the same tokens.
        return self._summed(found, self._holders, self._ranks.degree), sum(counts)

    def _differs(self, whole: Results, split: ExpertSplit) -> str | None:
        """Why a block so split is another one; the same on all ranks."""
        experts, ranks = self._of_experts, self._ranks
        cuts, away = expert_cuts(split, experts.degree), parameters_away(split, experts.degree, experts.index)
        of_pairs = cuts_of(self._block, self._splits, ranks.degree)

        def own(name: str, value: Tensor) -> Tensor:
            if name in away:
                return value.new_full((), torch.nan).expand(value.shape)
            if name in cuts:
                return cuts[name].own(value, experts.index)
            return of_pairs[name].own(value, ranks.index) if name in of_pairs else value

        block = drawn_block(self._block, self._device, own)
        set_up(block, self._splits, ranks)
        set_up_experts(block, split, ranks)
        found = self._run(block)
        reason = self._agreed(found if isinstance(found, str) else None)
        if reason is not None or isinstance(found, str):
            return reason
        kept = [(name, value) for name, value in found if name not in away]
        kept = self._summed(kept, [] if experts.replicas is None else [experts.replicas], 1)
        return self._agreed(first_difference([(n, own(n, v)) for n, v in whole if n not in away], kept))

    def _run(self, block: nn.Module) -> Results | str:
        counted = self._ranks.forward_bytes, self._ranks.backward_bytes
        try:
            return run_drawn(block, block, self._args, self._kwargs, self._device, seed=f"/{self._replica}")
        except DrawsNumbersError:
            raise InputError(
                f"'{self._name}' draws random numbers (dropout), which ranks that share its experts would draw each "
                "for itself: set its probability to 0 in the model, or `constraints.ep: [1]` in the scenario"
            ) from None
        finally:
            self._ranks.forward_bytes, self._ranks.backward_bytes = counted

    def _summed(self, results: Results, groups: Sequence[dist.ProcessGroup], times: int) -> Results:
        """Gradients of experts over these ranks, each so many times among them."""
        made: Results = []
        for name, value in results:
            total = value.clone(memory_format=torch.contiguous_format) if name in self._experts.parameters else value
            for group in groups if name in self._experts.parameters else ():
                all_reduce(total, group)
            made.append((name, total / times if name in self._experts.parameters else total))
        return made

    @property
    def _holders(self) -> list[dist.ProcessGroup]:
        """Groups that together join all ranks which have experts of the block."""
        return [group for group in (self._of_experts.group, self._of_experts.replicas) if group is not None]

    def _agreed(self, reason: str | None) -> str | None:
        """The reason, also where only another rank has one."""
        failed = torch.tensor([reason is not None], dtype=torch.int32, device=self._device)
        for group in self._holders:
            all_reduce(failed, group, dist.ReduceOp.MAX)
        return reason or ("another rank's part differs" if failed.item() else None)
