"""The optimizer of one stage: AdamW or SGD on fp32 weights, with a master copy when the model computes in 16 bits."""

import torch
from torch import Tensor

from mmplan.runtime.gradients import FlatGradients
from mmplan.scenario.scenario import Optimizer


class StageOptimizer:
    """Updates the parameters behind `gradients`; without any, a step does nothing."""

    def __init__(self, gradients: FlatGradients, settings: Optimizer) -> None:
        self._gradients = gradients
        self._masters = tuple(
            p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in gradients.parameters
        )
        self._optimizer: torch.optim.Optimizer | None = None
        if self._masters and settings.name == "adamw":
            self._optimizer = torch.optim.AdamW(self._masters, lr=settings.learning_rate)
        elif self._masters:
            self._optimizer = torch.optim.SGD(self._masters, lr=settings.learning_rate)

    def step(self) -> None:
        if self._optimizer is None:
            return
        for master, view in zip(self._masters, self._gradients.views, strict=True):
            master.grad = view.to(master.dtype)
        self._optimizer.step()
        for master, parameter in zip(self._masters, self._gradients.parameters, strict=True):
            master.grad = None
            if master is not parameter:
                parameter.data.copy_(master.data)

    def memory_bytes(self) -> int:
        """Master copies and moments that exist now (moments appear in the first step)."""
        masters = sum(m.nbytes for m, p in zip(self._masters, self._gradients.parameters, strict=True) if m is not p)
        if self._optimizer is None:
            return 0
        # `step` counters are one element per parameter; memory models count moments only, so do we.
        moments = sum(
            value.nbytes
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() > 0
        )
        return masters + moments
