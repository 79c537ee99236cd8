"""Gradients of parameters in one flat buffer of the plan's gradient dtype.

Every trainable parameter owns a slice, so that one collective sums all of them and a parameter that got no gradient (an
encoder without images in the whole step) contributes zeros instead of making replicas diverge.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from mmplan.runtime.flat import FlatBuffer


class FlatGradients:
    """Takes over the gradients of those `parameters` that require one as soon as autograd has them.

    Args:
        shares: the buffer is padded with zeros to this many equal shares.
    """

    def __init__(self, parameters: Iterable[Parameter], dtype: torch.dtype, shares: int = 1) -> None:
        self.parameters = tuple(p for p in parameters if p.requires_grad)
        self.buffer = FlatBuffer(self.parameters, dtype, shares)
        self.views = self.buffer.views
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.register_post_accumulate_grad_hook(_accumulate_into(view))  # type: ignore[no-untyped-call]
        self._view_of: dict[Tensor, Tensor] = dict(zip(self.parameters, self.views, strict=True))

    def accumulate(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a gradient that autograd has not made."""
        self._view_of[parameter].add_(gradient)

    def view_of(self, parameter: Tensor) -> Tensor:
        """The gradient of a parameter, live."""
        return self._view_of[parameter]

    def zero(self) -> None:
        self.buffer.whole.zero_()


def _accumulate_into(view: Tensor) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is None:  # postponed (`weight_store.py`)
            return
        view.add_(parameter.grad)
        parameter.grad = None

    return hook
