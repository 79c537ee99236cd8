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
        bad, none = ~torch.isfinite(largest), torch.zeros_like(largest, dtype=torch.bool)
        # A part may lie on several devices.
        tainted, guilty = (noted.get(target, none).to(bad.device) for noted in (self.tainted, self.guilty))
        self.guilty[target] = guilty | (bad & ~tainted)
        self.tainted[source] = self.tainted.get(source, none).to(bad.device) | bad
        self.seen[target] = self.seen.get(target, none).to(bad.device) | (largest > 0)


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ratio: float, note: Callable[[Tensor], None]) -> Tensor:
        ctx.ratio, ctx.note = ratio, note
        # A view must not be written to behind this, as `nn.ReLU(inplace=True)` would; nobody writes to a parameter.
        return x.view_as(x) if x.is_leaf else x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.note(gradients[0])
        return in_other_scale(gradients[0], ctx.ratio), None, None


def in_other_scale(gradient: Tensor, ratio: float) -> Tensor:
    """The gradient times a ratio of scales."""
    if ratio == 1:
        return gradient
    # In fp32: the ratio may be beyond fp16. If the product is, the new scale is too large for the gradient.
    return (wide(gradient) * ratio).to(gradient.dtype)


def cross(x: Tensor, ratio: float, note: Callable[[Tensor], None]) -> Tensor:
    """`x`; its gradient is shown to `note` and multiplied by `ratio`."""
    if not x.requires_grad or not torch.is_grad_enabled():
        return x
    result: Tensor = _Cross.apply(x, ratio, note)  # type: ignore[no-untyped-call]
    return result


class Border:
    """The calls by which tensors get into a part of the model and out of it.

    A part's modules are called by its root, or from outside of it, as a language model's embedding is by the whole
    model's forward. Whichever call comes first is the border: what it is given passes `inward`, what it returns
    `outward`. A module that is recomputed in a backward is called alone too, without being one.
    """

    def __init__(
        self, root: nn.Module, inward: Callable[[Tensor], Tensor], outward: Callable[[Tensor], Tensor]
    ) -> None:
        self._root, self._inward, self._outward = root, inward, outward
        self._calls: list[tuple[nn.Module, bool]] = []  # under way, and whether each is the border

    def watch(self) -> list[RemovableHandle]:
        """Hooks on the root and on all modules in it that have parameters of their own.

        Raises:
            ValueError: the root has such hooks already: gradients would change scale twice.
        """
        if any(hook.__qualname__ == Border._leave.__qualname__ for hook in self._root._forward_hooks.values()):
            raise ValueError(
                f"a {type(self._root).__name__} has the hooks of another scaler: call its `remove()` first"
            )
        watched = [module for module in self._root.modules() if module is self._root or module._parameters]
        return [
            handle
            for module in watched
            for handle in (
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        is_border = not self._calls and (module is self._root or torch._C._current_graph_task_id() == -1)
        self._calls.append((module, is_border))
        return (map_floats(self._inward, args), map_floats(self._inward, kwargs)) if is_border else None

    def _leave(self, module: nn.Module, args: Any, result: Any) -> Any:
        if not self._calls or self._calls[-1][0] is not module:  # it failed before it was entered
            return None
        _, is_border = self._calls.pop()
        return map_floats(self._outward, result) if is_border else None


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


def map_floats(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """A tree of what torch's pytree knows, with its floating-point tensors changed."""
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, tree)
