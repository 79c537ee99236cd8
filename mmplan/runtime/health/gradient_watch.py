"""Squared gradients of a stage's weights in `mmplan execute`, by microbatch and of the sum, for their variance."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mmplan.runtime.held import Place
from mmplan.runtime.state import StageState
from mmplan.runtime.weighted_stage import WeightedStage


class GradientWatch:
    """Of one stage; `squares` and `total_square` are of the step that is sampled, of what this rank answers for.

    Args:
        width: ranks that share the layers: of parameters that each has whole, a rank tells its share.
        summed_on: replicas that hold the same summed gradient; 1 where each holds a part.
        split: backwards are in two parts, the second of which ends a microbatch.
    """

    def __init__(self, stage: WeightedStage, *, width: int, summed_on: int, split: bool) -> None:
        self._stage, self._width, self._summed_on, self._split = stage, width, summed_on, split
        self._handles: list[Any] = []
        self._pending: dict[int, dict[Tensor, Tensor]] = {}  # microbatch -> gradients that may come in several parts
        self._microbatch = 0
        self.squares: list[Tensor] = []
        self.total_square: float | None = None
        stage.watch = self
        stage.backward = self._around(stage.backward, ends=not split)  # type: ignore[method-assign]
        stage.backward_weight = self._around(stage.backward_weight, ends=True)  # type: ignore[method-assign]

    def begin(self, *, sampling: bool) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._pending, self.squares, self.total_square = [], {}, [], None
        self._sampling = sampling
        for parameter in self._stage.places if sampling else ():
            if parameter.requires_grad:
                hook = self._taken(parameter)
                self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def take(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Of several parts of a microbatch's gradient the sum counts, as of a matrix that two layers share; None where
        it is postponed."""
        if self._sampling and gradient is not None:
            own = self._pending.setdefault(self._microbatch, {})
            own[parameter] = own[parameter] + gradient if parameter in own else gradient.detach()

    def before_update(self, state: StageState) -> None:
        if not self._sampling:
            return
        self.total_square = 0.0
        copies = {(one.optimizer, one.elements[0]): self._stage.places[one.parameter].copies for one in state.trained()}
        for optimizer in state.optimizers:
            for index, (weight, square) in enumerate(optimizer.gradient_squares()):
                held_by = self._summed_on * copies.get((optimizer, index), 1)
                self.total_square += square * self._share(weight) / held_by

    def _taken(self, parameter: Parameter) -> Callable[[Tensor], None]:
        return lambda gradient: self.take(parameter, gradient)

    def _around(self, work: Callable[..., Any], *, ends: bool) -> Callable[..., Any]:
        def run(microbatch: int, *received: Mapping[str, Tensor]) -> Any:
            self._microbatch = microbatch
            result = work(microbatch, *received)
            for parameter, gradient in self._pending.pop(microbatch, {}).items() if ends else ():
                self.squares.append(gradient.float().square().sum() * self._share(parameter))
            return result

        return run

    def _share(self, weight: Tensor) -> float:
        place: Place | None = self._stage.places.get(weight)  # type: ignore[call-overload]
        if place is None:
            return 1.0
        is_whole = place.sharers == 1 and place.shape == tuple(weight.shape)
        return 1 / (self._width if is_whole else place.sharers)

    def square(self) -> float:
        return float(torch.stack(self.squares).sum()) if self.squares else 0.0
