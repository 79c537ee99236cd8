"""Gradients of a stage in one flat buffer of the plan's gradient dtype.

Every trainable parameter owns a slice, so that one all-reduce sums all of them and a parameter that got no gradient (an
encoder without images in the whole step) contributes zeros instead of making replicas diverge.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter


class FlatGradients:
    """Takes over the gradients of those `parameters` that require one as soon as autograd has them."""

    def __init__(self, parameters: Iterable[Parameter], dtype: torch.dtype) -> None:
        self.parameters = tuple(p for p in parameters if p.requires_grad)
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self._flat = torch.zeros(sum(p.numel() for p in self.parameters), dtype=dtype, device=device)
        views, first = [], 0
        for parameter in self.parameters:
            views.append(self._flat[first : first + parameter.numel()].view_as(parameter))
            first += parameter.numel()
            parameter.register_post_accumulate_grad_hook(_accumulate_into(views[-1]))  # type: ignore[no-untyped-call]
        self.views: tuple[Tensor, ...] = tuple(views)
        self._view_of: dict[Tensor, Tensor] = dict(zip(self.parameters, self.views, strict=True))

    def accumulate(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a gradient that autograd has not made."""
        self._view_of[parameter].add_(gradient)

    def buffers(self) -> tuple[Tensor, ...]:
        """What is summed over replicas; empty when nothing is trained."""
        return (self._flat,) if self.parameters else ()

    def zero(self) -> None:
        self._flat.zero_()

    def memory_bytes(self) -> int:
        return self._flat.nbytes


def _accumulate_into(view: Tensor) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is None:  # postponed (`weight_store.py`)
            return
        view.add_(parameter.grad)
        parameter.grad = None

    return hook
