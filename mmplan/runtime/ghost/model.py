"""A rank's copy of a real model: the pieces of its own layers have weights, everything else is a ghost.

A rank runs the model's own forward, hooks and all. Units of its stage compute; what was received stands in for units of
other stages; all other units return tensors of the right shape filled with NaN and without memory, so that an edge that
the recording missed turns the loss into NaN at once instead of being plausibly wrong. What glue makes of them is never
used. The forward ends behind the stage's last unit.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from mmplan.runtime.ghost.cut_columns import cut_columns
from mmplan.runtime.ghost.cut_rows import cut_rows
from mmplan.runtime.ghost.flow import Source
from mmplan.runtime.ghost.joined_images import ImageRanks, own_parts
from mmplan.runtime.ghost.own_buffers import computed_again
from mmplan.runtime.ghost.recording import Batch, Recording, loss_of
from mmplan.runtime.ghost.rows_of_units import RowsOfUnits
from mmplan.runtime.ghost.turns import Turns
from mmplan.runtime.ghost.units import parameter_names
from mmplan.runtime.ghost.vocabulary import Vocabulary
from mmplan.runtime.ghost.weightless import set_parameter
from mmplan.runtime.numerics.boundary import map_floats

Crossing = Callable[[Tensor, str, bool], Tensor]  # a tensor, the unit, and whether it goes into it


class _BehindTheLastUnit(Exception):
    """Ends the model's forward on a stage without the loss."""


@dataclass(slots=True, eq=False)
class Pass:
    """One forward of one stage.

    Args:
        own: units that compute.
        recomputed: those of them that keep their arguments alone.
        received: what stands in for outputs of other stages' units.
        sent: outputs of the stage's units that are wanted.
        computes_loss: the forward goes to its end.
        turns: of the stage's units.
        exchanging: units whose forward exchanges something with ranks that share them.
        rows: how units run on a rank's rows.
        images: ranks that take images of modules in turn.
        vocabulary: units of which the rank has some ids.
        joins: which of their outputs are made whole: module and call -> positions.

    Attributes:
        outputs: those.
        loss: of the microbatch, where the stage has it.
    """

    recording: Recording
    own: frozenset[str]
    recomputed: frozenset[str]
    received: Mapping[Source, Tensor]
    sent: frozenset[Source]
    computes_loss: bool
    turns: Turns | None = None
    exchanging: Set[str] = frozenset()
    rows: RowsOfUnits | None = None
    images: ImageRanks | None = None
    vocabulary: Vocabulary | None = None
    joins: Mapping[tuple[str, int], Sequence[int]] = field(default_factory=dict)
    outputs: dict[Source, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None


class GhostModel:
    """The model of one rank, given weights for `pieces`.

    Args:
        model: without weights (`weightless.py`), its parameters of the types that they are to have.
        units: as `units.py` finds them.
        weights: the value of a parameter by its name, on the host.
        away: names of parameters of these that other ranks have.
        dealt: modules around units whose images ranks take in turn.
        trained: names of parameters to train.
        scaled: lets a tensor pass into a unit, or out of it; None: losses are not scaled.
        changed: names of buffers that forwards change.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[str, nn.Module],
        *,
        pieces: Iterable[str],
        trained: frozenset[str],
        weights: Callable[[str, Tensor], Tensor],
        device: torch.device,
        scaled: Crossing | None = None,
        away: Set[str] = frozenset(),
        dealt: Iterable[str] = (),
        changed: Set[str] = frozenset(),
    ) -> None:
        self.model, self.device, self._scaled, self._changed = model, device, scaled, changed
        names = {name for piece in pieces for name in parameter_names(model, piece)} - away
        own = {id(model.get_parameter(name)) for name in names}
        to_train = {id(model.get_parameter(name)) for name in trained}
        made: dict[int, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if id(parameter) in own:
                value = weights(name, parameter).to(device, parameter.dtype)
                made[id(parameter)] = nn.Parameter(value, requires_grad=id(parameter) in to_train)
            else:
                made[id(parameter)] = nn.Parameter(nothing_like(parameter, device), requires_grad=False)
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):  # tied ones stay one
            set_parameter(model, name, made[id(parameter)])
        _move_buffers(model, device)
        self._current: Pass | None = None
        self._on_output: Callable[[str, Tensor], None] | None = None
        self._inside = False
        self._left = 0
        self._numbers: dict[str, int] = {}
        self._units = dict(units)
        self._forwards = {name: unit.forward for name, unit in units.items()}  # the model's own
        for name, unit in units.items():
            unit.forward = self._ghostly(name)
        self._dealing = False
        for name in dealt:
            module = model.get_submodule(name)
            module.forward = self._dealt(name, module.forward)

    def change(self, name: str, change: Callable[[nn.Module], None]) -> None:
        """Let forwards inside a unit, or its own, be replaced."""
        unit = self._units[name]
        ghostly, unit.forward = unit.forward, self._forwards[name]
        change(unit)
        self._forwards[name], unit.forward = unit.forward, ghostly

    def run(self, work: Pass, batch: Batch, on_output: Callable[[str, Tensor], None] | None = None) -> None:
        """The forward of one stage on one microbatch; fills `work` in. `on_output` sees what its units compute."""
        self._current, self._numbers, self._on_output, self._modules = work, {}, on_output, Counter[str]()
        last = max((i for i, call in enumerate(work.recording.calls) if call.unit in work.own), default=-1)
        self._left = last + 1
        try:
            if self._left or work.computes_loss:
                result = self.model(**{key: _moved(value, self.device) for key, value in batch.items()})
                work.loss = loss_of(result) if work.computes_loss else None
        except _BehindTheLastUnit:
            pass
        finally:
            self._current = None

    def _ghostly(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            work = self._current
            if work is None or self._inside:
                return self._forwards[name](*args, **kwargs)
            number = self._numbers.get(name, 0)
            self._numbers[name] = number + 1
            if name not in work.own:
                result = self._ghost(work, name, number)
            else:
                self._inside = True
                try:
                    result = self._own(work, name, number, args, kwargs)
                finally:
                    self._inside = False
            self._left -= 1  # calls until the stage has nothing more to do
            if self._left == 0 and not work.computes_loss:
                raise _BehindTheLastUnit
            return result

        return call

    def _dealt(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A module around units that runs on this rank's images; what nobody reads of them all is NaN."""

        def call(*args: Any, **kwargs: Any) -> Any:
            work = self._current
            if work is None or work.images is None or self._inside or self._dealing:
                return forward(*args, **kwargs)
            key = name, self._modules[name]
            self._modules[name] += 1
            joined, slots = work.recording.joined[key], work.joins.get(key, ())
            leaves, spec = tree_flatten((args, kwargs))
            own_args, own_kwargs = tree_unflatten(joined.deal.own(leaves), spec)
            self._dealing = True
            try:
                result = forward(*own_args, **own_kwargs)
            finally:
                self._dealing = False
            parts = work.images.whole(joined, own_parts(result, slots), slots) if slots else ()
            whole = dict(zip(slots, parts, strict=True))
            return joined.output.rebuilt(
                lambda slot, like: whole[slot] if slot in whole else nothing_like(like, self.device)
            )

        return call

    def _own(self, work: Pass, name: str, number: int, args: Any, kwargs: Any) -> Any:
        """One of the stage's units, and what the glue behind it gets."""
        call, forward, rows = work.recording.of.get((name, number)), self._forwards[name], work.rows
        length = None if call is None or call.rows is None else call.rows[1]
        if rows is not None and call is not None and length is not None:
            forward, args, kwargs = rows.on_own(call, forward, args, kwargs)
        args, kwargs = self._passed(name, args, True), self._passed(name, kwargs, True)
        leaves, spec = tree_flatten(self._passed(name, self._work(work, name, forward, args, kwargs), False))
        for slot, leaf in enumerate(leaves):
            source = Source(name, number, slot)
            if self._on_output is not None and isinstance(leaf, Tensor):
                self._on_output(name, leaf)
            if rows is not None and length is not None and source in work.recording.whole:
                leaves[slot] = rows.whole(leaf, length)
            if source in work.sent:
                work.outputs[source] = leaves[slot]
            leaves[slot] = self._apart(work, source, leaves[slot])
        return tree_unflatten(leaves, spec)

    def _apart(self, work: Pass, source: Source, tensor: Any) -> Any:
        """An output as glue holds it: with the shape of all rows, or columns, where this rank has some."""
        if work.vocabulary is not None and source.unit in work.vocabulary.heads:
            return cut_columns(tensor, work.vocabulary.follow(source.unit))
        call = work.recording.of.get((source.unit, source.call))
        if work.rows is None or call is None or call.rows is None or source not in work.recording.apart:
            return tensor
        return cut_rows(tensor, None, work.rows.follow(call.rows[1]))

    def _work(self, work: Pass, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The forward of one of the stage's units."""
        with nullcontext() if work.turns is None else work.turns.at_work(name):
            if name in work.recomputed:
                # To the end, so that ranks that share the unit exchange as much as is foreseen (`split_bytes.py`).
                own = {key.removeprefix(f"{name}.") for key in self._changed if key.startswith(f"{name}.")}
                around = partial(computed_again, self._units[name], own)
                with set_checkpoint_early_stop(name not in work.exchanging):
                    result = checkpoint(forward, *args, use_reentrant=False, context_fn=around, **kwargs)
            else:
                result = forward(*args, **kwargs)
        return result if work.turns is None else work.turns.marked(name, result, (args, kwargs))

    def _passed(self, name: str, tree: Any, inward: bool) -> Any:
        """What a unit is given or returns; its gradients change scale on the way back."""
        scaled = self._scaled
        return tree if scaled is None else map_floats(lambda x: scaled(x, name, inward), tree)

    def _ghost(self, work: Pass, name: str, number: int) -> Any:
        """What stands in for another stage's unit."""

        def tensor_of(slot: int, like: Tensor) -> Tensor:
            source = Source(name, number, slot)
            received = work.received.get(source)
            return nothing_like(like, self.device) if received is None else self._apart(work, source, received)

        return work.recording.outputs[name, number].rebuilt(tensor_of)


def nothing_like(like: Tensor, device: torch.device) -> Tensor:
    """NaN, or the least integer, in that shape and type and without memory."""
    floats = like.is_floating_point() or like.is_complex()
    value = torch.nan if floats else 0 if like.dtype == torch.bool else torch.iinfo(like.dtype).min
    return torch.full((), value, dtype=like.dtype, device=device).expand(like.shape)


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those that the model saves with its parameters, live, by name."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.device.type == "meta":
                raise ValueError(f"the buffer {name} of {type(module).__name__} was made without values")
            setattr(module, name, buffer.to(device))


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
