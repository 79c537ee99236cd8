"""Gradients of a stage as flat buffers in the plan's gradient dtype.

Every trainable parameter owns a slice, so that one all-reduce sums all of them and a parameter that got no gradient (an
encoder without images in the whole step) contributes zeros instead of making replicas diverge.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter


class FlatGradients:
    """Accumulates the gradients of `parameters` (those that require one) as soon as autograd has them."""

    def __init__(self, parameters: Iterable[Parameter], dtype: torch.dtype) -> None:
        self.parameters = tuple(p for p in parameters if p.requires_grad)
        count = sum(p.numel() for p in self.parameters)
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self._flat = torch.zeros(count, dtype=dtype, device=device)
        self.views: tuple[Tensor, ...] = tuple(
            part.view_as(parameter)
            for part, parameter in zip(
                self._flat.split([p.numel() for p in self.parameters]), self.parameters, strict=True
            )
        )
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.register_post_accumulate_grad_hook(_accumulate_into(view))

    def buffers(self) -> tuple[Tensor, ...]:
        """What is summed over replicas; empty when nothing is trained."""
        return (self._flat,) if self.parameters else ()

    def zero(self) -> None:
        self._flat.zero_()

    def memory_bytes(self) -> int:
        return self._flat.nbytes


def _accumulate_into(view: Tensor):  # type: ignore[no-untyped-def]
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        view.add_(parameter.grad)
        parameter.grad = None

    return hook
