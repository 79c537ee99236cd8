"""Where a tensor passes from one modality's part of a model into another's: its gradient changes loss scale there.

Inside a part every gradient is multiplied by the part's loss scale. A gradient that comes back from part b into part a
is multiplied by scale(a) / scale(b), a power of two, so that each parameter's gradient has one known scale whatever
ways it came on, and unscaling is exact. A boundary also tells who overflowed: a gradient that is no number already when
it comes back is the fault of the part it comes from, not of the one it goes into.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from mmplan.runtime.norms import wide
from mmplan.runtime.numerics.sharing import held


@dataclass(slots=True)
class Crossings:
    """What boundaries saw in the backwards of a step; tensors, so that the device is not waited for.

    Attributes:
        guilty: by part: a gradient left it that is no number, while none had come in.
        tainted: by part: a gradient came in that is no number.
        seen: by part: a gradient that is a number and not zero left it.
        passed: parts into which any gradient came.
    """

    guilty: dict[str, Tensor] = field(default_factory=dict)
    tainted: dict[str, Tensor] = field(default_factory=dict)
    seen: dict[str, Tensor] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)

    def note(self, gradient: Tensor, *, source: str, target: str) -> None:
        """A gradient goes back from `target` into `source`."""
        self.passed.add(source)
        values = held(gradient.detach())
        if values.numel() == 0:
            return
        largest = torch.linalg.vector_norm(values, torch.inf).to(torch.float32)
        bad, false = ~torch.isfinite(largest), torch.zeros_like(largest, dtype=torch.bool)
        self.guilty[target] = self.guilty.get(target, false) | (bad & ~self.tainted.get(target, false))
        self.tainted[source] = self.tainted.get(source, false) | bad
        self.seen[target] = self.seen.get(target, false) | (largest > 0)


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ratio: float, note: Callable[[Tensor], None]) -> Tensor:
        ctx.ratio, ctx.note = ratio, note
        # A view must not be written to behind this, as `nn.ReLU(inplace=True)` would; nobody writes to a parameter.
        return x.view_as(x) if x.is_leaf else x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.note(gradients[0])
        if ctx.ratio == 1:
            return gradients[0], None, None
        # In fp32: the ratio may be beyond fp16. If the product is, the scale of `source` is too large for it.
        return (wide(gradients[0]) * ctx.ratio).to(gradients[0].dtype), None, None


def cross(x: Tensor, ratio: float, note: Callable[[Tensor], None]) -> Tensor:
    """`x`; its gradient is shown to `note` and multiplied by `ratio`."""
    if not x.requires_grad or not torch.is_grad_enabled():
        return x
    result: Tensor = _Cross.apply(x, ratio, note)  # type: ignore[no-untyped-call]
    return result


def cross_at(
    module: nn.Module, inward: Callable[[Tensor], Tensor], outward: Callable[[Tensor], Tensor]
) -> list[RemovableHandle]:
    """Let all tensors that the module is given pass `inward`, and all that it returns `outward`.

    Raises:
        ValueError: the module has such hooks already: gradients would change scale twice.
    """

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _map(inward, args), _map(inward, kwargs)

    def leave(_: nn.Module, args: Any, result: Any) -> Any:
        return _map(outward, result)

    if any(getattr(hook, "__qualname__", "") == leave.__qualname__ for hook in module._forward_hooks.values()):
        raise ValueError(f"a {type(module).__name__} has the hooks of another scaler: call its `remove()` first")
    return [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]


def cross_parameters(
    owner: nn.Module, names: Iterable[str], inward: Callable[[Tensor], Tensor]
) -> list[RemovableHandle]:
    """Let the module compute with its parameters `names` as they are after `inward`."""
    names = tuple(names)

    def enter(module: nn.Module, args: Any) -> None:
        for name in names:  # an entry of __dict__ is found before one of `_parameters`
            module.__dict__[name] = inward(module._parameters[name])  # type: ignore[arg-type]

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        for name in names:
            module.__dict__.pop(name, None)

    return [owner.register_forward_pre_hook(enter), owner.register_forward_hook(leave, always_call=True)]


def _map(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, tree)
