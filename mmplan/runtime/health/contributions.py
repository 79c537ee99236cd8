"""Squared norms of what each backward of a step adds to the gradient on this rank, before ranks average."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmplan.runtime.health import variance
from mmplan.runtime.health.groups import summed
from mmplan.runtime.health.judge import Value
from mmplan.runtime.health.overflow import is_finite
from mmplan.runtime.health.settings import Settings


class Contributions:
    """Of a sampled step. Under FSDP2 gradients are sharded before anybody sees them: there it stays silent."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._settings, self._model = settings, model
        self.handles: list[Any] = []
        self.clear()

    def begin(self) -> None:
        """A forward whose gradients are to be looked at."""
        self.passes += 1
        trained = [p for p in self._model.parameters() if p.requires_grad]
        if not self.handles and not any(hasattr(p, "device_mesh") for p in trained):
            for parameter in trained:
                self.handles.append(parameter.register_hook(self._take))  # type: ignore[no-untyped-call]

    def clear(self) -> None:
        """Hooks are for one step: a call for each parameter in every step would cost more than the rest."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self._squares: list[Tensor] = []
        self.passes = 0

    def values(self) -> Iterator[Value]:
        """The variance over the passes of this step and the replicas; collective."""
        if not self.handles:
            return
        group = self._settings.groups.replicas
        own = float(torch.stack(self._squares).sum()) if self._squares else 0.0
        squares, passes, ranks = summed([own, float(self.passes), 1.0], group)
        count = round(passes)
        if count < 2:
            return
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None and not p.grad.is_sparse]
        mean_square = sum(float(g.detach().double().square().sum()) for g in gradients)
        total_square = mean_square * (ranks**2 if self._settings.averaged else 1.0)
        value = variance.contribution_variance(squares, total_square, count)
        mean_square = total_square / count**2
        detail: dict[str, float | str | None] = {
            "contributions": float(count),
            "relative": value / mean_square if mean_square > 0 else None,
        }
        yield Value(variance.RULE.monitor, "gradient", value, detail)

    def _take(self, gradient: Tensor) -> None:
        self._squares.append(gradient.detach().float().square().sum())


def unsound_gradients(model: nn.Module) -> list[str]:
    """Parameters whose gradient is no number."""
    return [name for name, p in model.named_parameters() if p.grad is not None and not is_finite(p.grad)]


def gradient_sound(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Whether all gradients of this rank are finite, as a tensor that nobody has waited for.

    By their norms: the maximum is 20 times slower on CPU. That of finite numbers beyond 1e19 is Inf too, and is then
    found to begin nowhere.
    """
    own = [p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse]
    parts = [g.to_local() if hasattr(g, "to_local") else g for g in own]
    if not parts:
        return None
    return torch.stack([norm.float() for norm in torch._foreach_norm(parts)]).isfinite().all()
