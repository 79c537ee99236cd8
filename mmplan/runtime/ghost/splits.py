"""Which linear layers of a real model's blocks its tensor-parallel ranks share: found by structure, kept if a trial is
right.

Before training, one block of each form is run whole and split, with random weights, on the shapes of a recorded
microbatch: outputs and every gradient have to agree. What does not, stays whole on each rank, and is told.
"""

import copy
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mmplan.errors import InputError
from mmplan.runtime.failure import described
from mmplan.runtime.ghost.half_meta import META
from mmplan.runtime.ghost.linear_flow import Pair, find_pairs
from mmplan.runtime.ghost.recording import Recorder
from mmplan.runtime.ghost.split_linears import Split, cuts_of, set_up
from mmplan.runtime.ghost.weightless import set_parameter
from mmplan.runtime.network import all_reduce
from mmplan.runtime.tensor_sums import TensorRanks

DEVIATION = 0.1  # of drawn weights
TOLERANCE = 1e-4  # of the largest element; fp32 sums in another order differ by some 1e-6, wrong splits by 0.1 and more


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """splits: by unit; whole: what stays whole of forms of blocks, each with the reason."""

    splits: dict[str, tuple[Split, ...]]
    whole: tuple[str, ...]


def find_splits(recorder: Recorder, units: Iterable[str], ranks: TensorRanks, device: torch.device) -> Found:
    """Collective over the ranks that share layers.

    Args:
        recorder: has recorded batches that use the units; of a model without weights.

    Raises:
        InputError: a block draws random numbers.
    """
    known: dict[Any, tuple[Split, ...]] = {}
    splits, told = {}, list[str]()
    for unit in units:
        block = recorder.unit(unit)
        given, form = recorder.arguments.get(recorder.form(unit)), (recorder.form(unit), _settings(block))
        if form not in known:
            found = _Trial(unit, block, given, ranks, device) if given is not None else None
            known[form] = () if found is None else found.kept
            told += [] if found is None else found.failed
            count = sum(type(part) is nn.Linear for part in block.modules())
            if count > 1 and not known[form] and (found is None or not found.failed):
                told.append(f"{unit}: none of its {count} linear layers reads nothing but others")
        if known[form]:
            splits[unit] = known[form]
    return Found(splits=splits, whole=tuple(told))


def _settings(block: nn.Module) -> Any:
    """What modules of one form may differ in: the kinds of modules inside, and their numbers but for their place."""
    return repr(block), tuple(
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str) and not key.endswith("idx")
    )


class _Trial:
    """Of one block. Attributes: kept: what may be split; failed: what may not, with the reason."""

    def __init__(self, name: str, block: nn.Module, given: Any, ranks: TensorRanks, device: torch.device) -> None:
        self._name, self._block, self._ranks, self._device = name, block, ranks, device
        self._args, self._kwargs = given
        self.kept: tuple[Split, ...] = ()
        self.failed: list[str] = []
        pairs = find_pairs(block, self._args, self._kwargs, ranks.degree)
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
        around = pair.columns[0].rpartition(".")[0]
        numbers = {
            key: value
            for key, value in vars(self._block.get_submodule(around)).items()
            if type(value) is int and "heads" in key and value > 1 and value % self._ranks.degree == 0
        }
        heads = tuple((around, key) for key in numbers)
        divided = [Split(pair=pair, heads=heads), Split(pair=pair, heads=heads, narrowed=around)] if heads else []
        return [Split(pair=pair), *divided]

    def _differs(self, whole: "_Results", splits: Sequence[Split]) -> str | None:
        """Why a block so split is another one; the same on all ranks."""
        found = self._run(splits)
        cuts, index = cuts_of(self._block, splits, self._ranks.degree), self._ranks.index
        expected = [(name, cuts[name].own(value, index) if name in cuts else value) for name, value in whole]
        reason = found if isinstance(found, str) else _first_difference(expected, found)
        failed = torch.tensor([reason is not None], dtype=torch.int32, device=self._device)
        all_reduce(failed, self._ranks.group, dist.ReduceOp.MAX)
        return reason or ("another rank's part differs" if failed.item() else None)

    def _run(self, splits: Sequence[Split]) -> "_Results | str":
        """Outputs, gradients of inputs and of parameters, each with a name; or why there are none."""
        block, ranks = self._split(splits), self._ranks
        leaves, spec = tree_flatten((self._args, self._kwargs))
        given = [_drawn_like(f"argument {i}", leaf, self._device) for i, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten([leaf.clone() if _is_float(leaf) else leaf for leaf in given], spec)
        counted, state = (ranks.forward_bytes, ranks.backward_bytes), torch.random.get_rng_state()
        wanted = {f"argument {i}": leaf for i, leaf in enumerate(given) if _is_float(leaf) and leaf.requires_grad}
        wanted |= dict(block.named_parameters())
        try:
            results = [leaf for leaf in tree_leaves(block(*args, **kwargs)) if _is_float(leaf) and leaf.requires_grad]
            outputs = {f"output {i}": leaf for i, leaf in enumerate(results)}
            weighted = [(leaf * _drawn(name, leaf.shape, self._device)).sum() for name, leaf in outputs.items()]
            gradients = torch.autograd.grad(
                torch.stack(weighted).sum(), [*wanted.values()], allow_unused=True, materialize_grads=True
            )
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            return described(error)
        finally:
            ranks.forward_bytes, ranks.backward_bytes = counted
        if not torch.equal(state, torch.random.get_rng_state()):
            raise InputError(
                f"'{self._name}' draws random numbers (dropout), which ranks that share it would draw each for itself: "
                "set its probability to 0 in the model, or `constraints.tp: [1]` in the scenario"
            )
        return [(name, leaf.detach()) for name, leaf in outputs.items()] + [*zip(wanted, gradients, strict=True)]

    def _split(self, splits: Sequence[Split]) -> nn.Module:
        """A copy of the block with drawn weights."""
        block, cuts = copy.deepcopy(self._block), cuts_of(self._block, splits, self._ranks.degree)
        for name, parameter in list(block.named_parameters()):
            value = _drawn(name, parameter.shape, self._device) * DEVIATION
            value = value + 1.0 if parameter.dim() < 2 else value
            value = cuts[name].own(value, self._ranks.index) if name in cuts else value
            set_parameter(block, name, nn.Parameter(value))
        block.to(self._device)
        set_up(block, splits, self._ranks)
        return block


_Results = list[tuple[str, Tensor]]


def _first_difference(expected: _Results, found: _Results) -> str | None:
    """What a block gives else. Gradients that are zero but for rounding count by a thousandth of the largest."""
    least = max(float(value.abs().max()) for _, value in expected if value.numel()) / 1000
    for (name, value), (_, other) in zip(expected, found, strict=True):
        if value.shape != other.shape:
            return f"{name} has the shape {tuple(other.shape)} instead of {tuple(value.shape)}"
        if value.numel() and not float((other - value).abs().max()) <= TOLERANCE * max(least, float(value.abs().max())):
            return f"{name} differs when it is split"
    return None


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _drawn(name: str, shape: Sequence[int], device: torch.device) -> Tensor:
    """Normal numbers, the same on all ranks."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=draw).to(device)


def _drawn_like(name: str, value: Any, device: torch.device) -> Any:
    """An argument of a recording with values: those it has, or drawn ones that require a gradient."""
    if not isinstance(value, Tensor):
        return value
    if value.device == META and value.is_floating_point():
        return _drawn(name, value.shape, device).requires_grad_()
    if value.device == META:
        return torch.zeros(value.shape, dtype=value.dtype, device=device)
    return value.to(device, torch.float32) if value.is_floating_point() else value.to(device)
