"""A backward in two parts: linear layers postpone their weight gradients until they are asked for.

While a store is open, the backward of its linear layers computes the gradient of the input only and leaves input and
output gradient in the store; `compute` makes the weight gradients of one microbatch from them. Every other parameter
(norms, embeddings, convolutions, experts) gets its gradient in the first part: these take little time.
"""

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Accumulate = Callable[[Tensor, Tensor], None]  # parameter, gradient
Whole = Callable[[Tensor], Tensor]


class WeightStore:
    """What weight gradients still have to be made of, by microbatch."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[tuple[nn.Linear, Tensor, Tensor, Whole | None, bool]]] = {}
        self.summed: dict[nn.Linear, Callable[[Tensor], None]] = {}  # of which ranks have parts of the weight gradients
        self._microbatch: int | None = None

    @contextmanager
    def postponing(self, microbatch: int) -> Iterator[None]:
        """Weight gradients of backwards inside are postponed."""
        self._waiting[microbatch] = []
        self._microbatch = microbatch
        try:
            yield
        finally:
            self._microbatch = None

    def takes(self, linear: nn.Linear, x: Tensor, gradient: Tensor, *, bias: bool, whole: Whole | None = None) -> bool:
        """Keep what the layer's weight gradient needs; False outside of `postponing`. `bias`: its bias has a gradient,
        too; `whole`: makes all rows of x."""
        if self._microbatch is None:
            return False
        self._waiting[self._microbatch].append((linear, x, gradient, whole, bias))
        return True

    def compute(self, microbatch: int, accumulate: Accumulate) -> None:
        """The weight gradients of a microbatch whose first part is done."""
        for linear, x, gradient, whole, bias in self._waiting.pop(microbatch):
            add = self._with_sum(linear, accumulate)
            if linear.weight.requires_grad:
                rows = _flat(x if whole is None else whole(x))
                add(linear.weight, _flat(gradient).t() @ rows)
            if bias:
                add(linear.bias, _flat(gradient).sum(0))

    def _with_sum(self, linear: nn.Linear, accumulate: Accumulate) -> Accumulate:
        if linear not in self.summed:
            return accumulate

        def add(parameter: Tensor, gradient: Tensor) -> None:
            self.summed[linear](gradient)
            accumulate(parameter, gradient)

        return add

    def storages(self) -> dict[int, int]:
        """Address and bytes of what is kept, each storage once."""
        tensors = [t for waiting in self._waiting.values() for _, x, gradient, *_ in waiting for t in (x, gradient)]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def postpone_linears(module: nn.Module, store: WeightStore, apart: Set[str] = frozenset()) -> None:
    """Let the trained linear layers inside `module` ask `store` in their backward, but for those inside of `apart`."""
    left_out = tuple(f"{name}." for name in apart)
    inside = [part for name, part in module.named_modules() if not f"{name}.".startswith(left_out)]
    for linear in [part for part in inside if isinstance(part, nn.Linear)]:
        if linear.weight.requires_grad or (linear.bias is not None and linear.bias.requires_grad):
            linear.forward = Postponed(linear, store)  # type: ignore[assignment,method-assign]


class Postponed:
    """The forward of a linear layer with the two-part backward."""

    def __init__(self, linear: nn.Linear, store: WeightStore) -> None:
        self.linear, self.store = linear, store

    def __call__(self, x: Tensor) -> Tensor:
        return self._times(x, self.linear.bias)

    def product(self, x: Tensor) -> Tensor:
        """Without the bias, whose gradient others make."""
        return self._times(x, None)

    def _times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = _TwoPartLinear.apply(x, self.linear.weight, bias, self.linear, self.store)  # type: ignore[no-untyped-call]
        return result


class _TwoPartLinear(torch.autograd.Function):
    """x W^T + b. The input gradient skips the weight product when the store takes it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, linear: nn.Linear, store: WeightStore
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.linear, ctx.store = linear, store
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_x = gradient @ weight if needs_x else None
        if ctx.store.takes(ctx.linear, x, gradient, bias=needs_bias):
            return of_x, None, None, None, None
        of_weight = _flat(gradient).t() @ _flat(x) if needs_weight else None
        of_bias = _flat(gradient).sum(0) if needs_bias else None
        return of_x, of_weight, of_bias, None, None


def _flat(tensor: Tensor) -> Tensor:
    """`[rows, width]`."""
    return tensor.reshape(-1, tensor.shape[-1])
