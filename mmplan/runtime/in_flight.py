"""What a microbatch leaves in a stage between its forward and its backward, layer by layer.

Layers are cut from each other, and no tensor is held but by autograd inside a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from mmplan.cost_models.layer import Layer


@dataclass(frozen=True, slots=True)
class Computed:
    """A layer between its forward and its backward; `like` has the shape and type of its output and no memory.
    `edge` is None where the microbatch has nothing for the layer."""

    layer: Layer
    edge: GradientEdge | None
    like: Tensor


@dataclass(slots=True)
class InFlight:
    """What a microbatch leaves between its forward and its backward."""

    received: dict[str, Tensor] = field(default_factory=dict)  # producer -> its like, where it carries a gradient
    carrying: set[str] = field(default_factory=set)  # producers whose gradients are needed
    computed: list[Computed] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # producer -> sum so far
    kept: dict[int, int] = field(default_factory=dict)  # storage address -> bytes

    def add(self, producer: str, gradient: Tensor) -> None:
        known = self.gradients.get(producer)
        self.gradients[producer] = gradient if known is None else known + gradient


def cut_off(
    producer: str,
    value: Tensor,
    state: InFlight,
    key: str | None = None,
    rescale: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The same rows; their gradient, after `rescale`, goes to the microbatch's state (under `key`, else the producer's
    name) and not into the layer that made them."""
    if producer not in state.carrying:
        return value

    def take(gradient: Tensor) -> None:
        state.add(key or producer, gradient if rescale is None else rescale(gradient))

    rows: Tensor = _Cut.apply(value, torch.empty(0, requires_grad=True), take)  # type: ignore[no-untyped-call]
    return rows


class _Cut(torch.autograd.Function):
    """Hands the gradient of `rows` to `take`. A leaf instead would keep the rows as long as the layer's graph lives."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, needs_gradient: Tensor, take: Callable[[Tensor], None]) -> Tensor:
        ctx.take = take
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.take(gradient)
        return None, None, None
