"""Precision per module in a user's own model: pieces have the type of their module, and tensors are cast where they
pass into a module or out of it, as the plan's modules are told apart (`precision: {vision: fp32, default: bf16}`).

Of modules inside one another that hold pieces of one module alone the outermost that is called is its border. Glue
between modules of unlike types works in fp32, so that nothing is rounded on the way from one to the next.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmplan.cost_models.graph import ComputationGraph
from mmplan.errors import InputError
from mmplan.runtime.dtypes import TORCH_DTYPES
from mmplan.runtime.failure import described
from mmplan.runtime.ghost.image_calls import around
from mmplan.runtime.ghost.recording import Batch, Recorder, Recording
from mmplan.runtime.ghost.units import parameter_names
from mmplan.runtime.numerics.boundary import map_floats
from mmplan.scenario.precisions import unlike_precisions
from mmplan.scenario.scenario import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Types:
    """Of the plan's modules, by name, and of what lies between them."""

    of: Mapping[str, torch.dtype]
    between: torch.dtype

    @property
    def unlike(self) -> bool:
        return set(self.of.values()) != {self.between}


def types_of(scenario: Scenario) -> Types:
    of = {module.name: TORCH_DTYPES[scenario.precision_of(module)] for module in scenario.model.modules}
    alike = len(set(of.values())) == 1
    return Types(of=of, between=next(iter(of.values())) if alike else torch.float32)


def set_types(
    model: nn.Module, units: Set[str], graph: ComputationGraph, layer_of: Mapping[str, str], types: Types
) -> None:
    """Give pieces the types of their modules, and let tensors change theirs at the borders of these.

    Raises:
        InputError: modules of unlike types share a parameter.
    """
    module_of = {piece: graph.layer(layer).module for piece, layer in layer_of.items()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(types.between)
    known: dict[int, tuple[str, torch.dtype]] = {}
    for piece, module in module_of.items():
        for name in parameter_names(model, piece):
            parameter, dtype = model.get_parameter(name), types.of[module]
            first, other = known.setdefault(id(parameter), (name, dtype))
            if other != dtype:
                raise InputError(
                    f"precision: '{first}' is also '{name}' of '{module}', and the two would be {_word(other)} and "
                    f"{_word(dtype)}: give both modules one precision"
                )
            parameter.data = parameter.data.to(dtype)
    for module, dtype in types.of.items():
        if dtype == types.between:
            continue
        own, border = {piece for piece, of in module_of.items() if of == module}, _Border(dtype, types.between)
        for part in around(model, units & module_of.keys(), own & units).values():
            part.register_forward_pre_hook(border.enter, with_kwargs=True)
            part.register_forward_hook(border.leave, always_call=True)


def recorded_in(scenario: Scenario, recorder: Recorder, batches: Sequence[Batch]) -> tuple[Recording, ...]:
    """Raises InputError where the model's own code does not run with modules of unlike types."""
    try:
        return tuple(map(recorder.record, batches))
    except RuntimeError as error:
        raise InputError(
            f"precision: with {unlike_precisions(scenario)} the model's own code fails ({described(error)}): give "
            "these modules one precision"
        ) from error


class _Border:
    """Of one module of the plan. A copy, as trials make them of blocks and run in one type, casts nothing."""

    def __init__(self, dtype: torch.dtype | None, between: torch.dtype | None) -> None:
        self._dtype, self._between = dtype, between
        self._calls = 0  # under way

    def __deepcopy__(self, memo: Any) -> "_Border":
        return _Border(None, None)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._calls += 1
        if self._dtype is None or self._calls > 1:
            return None
        return map_floats(_to(self._dtype), args), map_floats(_to(self._dtype), kwargs)

    def leave(self, module: nn.Module, args: Any, result: Any) -> Any:
        self._calls -= 1
        return None if self._between is None or self._calls else map_floats(_to(self._between), result)


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Numbers beyond the type, such as those by which masks hide, become its largest."""
    most = torch.finfo(dtype).max

    def cast(x: Tensor) -> Tensor:
        wider = torch.finfo(x.dtype).max > most
        return (x.clamp(-most, most) if wider and not x.requires_grad else x).to(dtype)

    return cast


def _word(dtype: torch.dtype) -> str:
    return next(word for word, one in TORCH_DTYPES.items() if one == dtype)
