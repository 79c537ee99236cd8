"""Squared norms of what each backward of a step adds to the gradient on this rank, before ranks average.

FSDP2 hands a module its whole parameters when its forward begins and shards their gradients behind its backward: hooks
on these see what this rank adds.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmplan.runtime.health import variance
from mmplan.runtime.health.groups import summed
from mmplan.runtime.health.judge import Value
from mmplan.runtime.health.overflow import is_finite
from mmplan.runtime.health.placed import Split, local, own_part, square_sum
from mmplan.runtime.health.settings import Settings


class Contributions:
    """Of a sampled step; `averaging`: the gradient is a mean over ranks that no group names."""

    def __init__(self, model: nn.Module, settings: Settings, *, averaging: bool = False) -> None:
        self._settings, self._model = settings, model
        self._silent = averaging or not settings.watches_variance
        self._whole = fsdp_modules(model)
        # As they are between steps; those of FSDP's modules are others while these run.
        self._sharded = [p for p in model.parameters() if self._whole and hasattr(p, "device_mesh")]
        self.handles: list[Any] = []
        self.passes, self._begun = 0, False
        self.clear()

    def begin(self) -> None:
        """A forward whose gradients are to be looked at."""
        self.passes += 1
        if self._silent or self._begun:
            return
        self._begun = True
        self._look(self._model)
        for module in self._whole:
            if module is not self._model:  # whose hooks run already
                self.handles.append(module.register_forward_pre_hook(lambda module, args: self._look(module)))

    def clear(self) -> None:
        """Hooks are for one step: a call for each parameter in every step would cost more than the rest."""
        for handle in self.handles:
            handle.remove()
        self.handles, self._seen = [], set[int]()
        self._squares: dict[Split, list[Tensor]] = {}
        self.passes, self._begun = 0, False

    def values(self) -> Iterator[Value]:
        """The variance over the passes of this step and the replicas, of all stages; collective."""
        if self._silent:
            return
        groups, own = self._settings.groups, 0.0
        for split, parts in self._squares.items():
            own += float(split.over_ranks(torch.stack(parts).sum()))
        squares, passes, ranks = summed([own, float(self.passes), 1.0], groups.replicas)
        count = round(passes)
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None and not p.grad.is_sparse]
        scale = ranks**2 if self._settings.averaged else 1.0
        squares, total_square = summed([squares, float(square_sum(gradients)) * scale], groups.stages)
        if count < 2:
            return
        value = variance.contribution_variance(squares, total_square, count)
        mean_square = total_square / count**2
        detail: dict[str, float | str | None] = {
            "contributions": float(count),
            "relative": value / mean_square if mean_square > 0 else None,
        }
        yield Value(variance.RULE.monitor, "gradient", value, detail)

    def _look(self, module: nn.Module) -> None:
        """Hooks on parameters that are there whole now; each is hooked once a step."""
        at_rest = {id(parameter) for parameter in self._sharded}
        for parameter in module.parameters():
            if parameter.requires_grad and id(parameter) not in at_rest | self._seen:
                self._seen.add(id(parameter))
                self.handles.append(parameter.register_hook(self._take))  # type: ignore[no-untyped-call]

    def _take(self, gradient: Tensor) -> None:
        if not gradient.is_sparse:
            split, part = own_part(gradient)
            self._squares.setdefault(split, []).append(part.float().square().sum())


def fsdp_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that FSDP2 shards."""
    if not any(hasattr(p, "device_mesh") for p in model.parameters()):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def unsound_gradients(model: nn.Module) -> list[str]:
    """Parameters whose gradient is no number."""
    return [name for name, p in model.named_parameters() if p.grad is not None and not is_finite(p.grad)]


def gradient_sound(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Whether all gradients of this rank are finite, as a tensor that nobody has waited for.

    By their norms: the maximum is 20 times slower on CPU. That of finite numbers beyond 1e19 is Inf too, and is then
    found to begin nowhere.
    """
    own = [p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse]
    parts = [local(gradient) for gradient in own]
    if not parts:
        return None
    return torch.stack([norm.float() for norm in torch._foreach_norm(parts)]).isfinite().all()
