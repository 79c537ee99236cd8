"""Which modules ranks take images of in turn, and what they exchange of each call: seen in recordings.

A module around units that the plan deals out alone runs its own forward on a rank's images; what it returns is made
whole for whoever reads it. Of modules inside one another the outermost that is called counts. Recordings are those of a
rank: units inside have its images.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from mmplan.errors import InputError
from mmplan.runtime.ghost.flow import Flow, Whole
from mmplan.runtime.ghost.half_meta import META
from mmplan.runtime.ghost.image_trials import differs
from mmplan.runtime.ghost.image_ways import ImageWay, deal_of, possible_ways, whole_deal
from mmplan.runtime.ghost.recording import Joined, Output, Recorder, replaced_forwards
from mmplan.runtime.ghost.trials import DrawsNumbersError, fresh, is_float, settings
from mmplan.runtime.ghost.unit_rows import pattern_of
from mmplan.runtime.tensor_sums import Peers


def around(model: nn.Module, units: Set[str], dealt: Set[str]) -> dict[str, nn.Module]:
    """Name -> module that holds some of the units, and these are all dealt out; units themselves too."""
    found = {}
    for name, module in model.named_modules():
        inside = [unit for unit in units if unit == name or unit.startswith(f"{name}.")]
        if name and inside and dealt >= set(inside) and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            found[name] = module
    return found


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A call of a kind that no trial has seen."""

    name: str
    args: Any
    kwargs: Any
    ways: tuple[ImageWay, ...]


class ImageCalls:
    """Of the modules of one rank's recorder (see `Dealing`). Args: peers: that share the images."""

    def __init__(
        self, recorder: Recorder, modules: Mapping[str, nn.Module], peers: Peers, device: torch.device
    ) -> None:
        self.peers, self.names = peers, tuple(modules)
        self._recorder, self._modules, self._device = recorder, modules, device
        self._ways: dict[Any, ImageWay] = {}
        self._waiting: list[_Waiting] = []
        self.joined: dict[tuple[str, int], Joined] = {}

    @contextmanager
    def recorded(self, flow: Flow, plain: Callable[[Any], Any]) -> Iterator[None]:
        """Calls inside are dealt out. Args: plain: arguments as forwards take them."""
        self.joined, self._waiting, dealing = {}, [], False
        numbers = dict.fromkeys(self._modules, 0)

        def replacement(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                nonlocal dealing
                if flow.inside or dealing:
                    return forward(*args, **kwargs)
                number = numbers[name]
                numbers[name] += 1
                dealing = True
                try:
                    return self._called(name, number, forward, plain((args, kwargs)), flow)
                finally:
                    dealing = False

            return called

        with replaced_forwards(self._modules, replacement):
            yield

    def look(self) -> bool:
        """Try what the last recording met for the first time; whether there was any.

        Raises:
            InputError: images of a module depend on each other.
        """
        waiting = {self._key(call.name, call.args, call.kwargs): call for call in self._waiting}
        for key, call in waiting.items():
            self._ways[key] = self._tried(call)
        return bool(waiting)

    def _called(self, name: str, number: int, forward: Callable[..., Any], given: Any, flow: Flow) -> Any:
        leaves, spec = tree_flatten(given)
        way, index, ranks = self._ways.get(self._key(name, *given)), self.peers.index, self.peers.degree
        try:
            deal = None if way is None else deal_of(way, leaves, index, ranks)
        except ValueError as error:
            raise InputError(_told(name, str(error))) from None
        args, kwargs = given if deal is None else tree_unflatten(deal.own(leaves), spec)
        made, form = tree_flatten(forward(*args, **kwargs))
        if deal is None:
            self._look_at(name, given, leaves, made)
            deal = whole_deal(made, index, ranks)
        result, reads = list(made), {}
        for slot, rows in deal.counts.items():
            own = made[slot]
            if own.shape[0] != deal.rows(slot, self.peers.index):
                raise InputError(_told(name, f"its output {slot} has {own.shape[0]} rows for the images of a rank"))
            result[slot] = own.new_empty((sum(rows), *own.shape[1:]))
            reads[slot] = flow.join(result[slot], own, Whole(name, number, slot))
        likes = tuple(torch.empty_like(x, device=META) if isinstance(x, Tensor) else x for x in result)
        self.joined[name, number] = Joined(deal=deal, output=Output(leaves=likes, spec=form), reads=reads)
        return tree_unflatten(result, form)

    def _look_at(self, name: str, given: Any, leaves: Any, made: Any) -> None:
        """A call of a kind that is not known: one of several images is tried."""
        ways = tuple(possible_ways(leaves, made))
        if not ways and not any(is_float(leaf) and leaf.shape[:1] == (0,) for leaf in leaves):
            raise InputError(_told(name, "none of its arguments has rows of images"))
        if ways and len(ways[0].sizes(leaves)) > 1:
            args, kwargs = tree_map(fresh, given)
            self._waiting.append(_Waiting(name, args, kwargs, ways))

    def _key(self, name: str, args: Any, kwargs: Any) -> Any:
        return name, pattern_of((args, kwargs))

    def _tried(self, call: _Waiting) -> ImageWay:
        module, reasons = self._modules[call.name], list[str]()
        for way in call.ways:
            try:
                reason = differs(module, self._alike(call.name), call.args, call.kwargs, way, self._device)
            except DrawsNumbersError:
                reason = "it draws random numbers (dropout), which each rank would draw for itself"
            if reason is None:
                return way
            reasons.append(reason)
        raise InputError(_told(call.name, reasons[0]))

    def _alike(self, name: str) -> dict[str, str]:
        """Parameters of blocks inside -> the same ones of the first block of that form."""
        first: dict[Any, str] = {}
        found = {}
        for unit in self._recorder.units_in(name):
            module = self._recorder.unit(unit)
            like = first.setdefault((self._recorder.form(unit), settings(module)), unit)
            for own, _ in module.named_parameters():
                found[f"{unit}.{own}".removeprefix(f"{name}.")] = f"{like}.{own}".removeprefix(f"{name}.")
        return found


def _told(name: str, reason: str) -> str:
    return (
        f"the plan lets ranks take images in turn, and '{name}' cannot be run on some of them: {reason}: set "
        "`constraints.spread: []` in the scenario and optimize again"
    )
