"""The optimizer of one stage: AdamW or SGD on fp32 weights, with a master copy when the model computes in 16 bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mmplan.scenario.scenario import Optimizer


class StageOptimizer:
    """Updates `weights` by `gradients`, tensors of the same shapes; without any, a step does nothing."""

    def __init__(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], settings: Optimizer) -> None:
        self._weights, self._gradients = tuple(weights), tuple(gradients)
        self._masters = tuple(w if w.dtype == torch.float32 else w.detach().float() for w in self._weights)
        for master in self._masters:
            master.requires_grad_()
        pairs = zip(self._masters, self._weights, strict=True)
        self._master_bytes = sum(master.nbytes for master, weight in pairs if master is not weight)
        self._moment_bytes = 0
        self._optimizer: torch.optim.Optimizer | None = None
        if self._masters and settings.name == "adamw":
            # On CUDA torch's own choice would hold one more fp32 copy of all weights during the step.
            fused = all(master.is_cuda for master in self._masters)
            self._optimizer = torch.optim.AdamW(self._masters, lr=settings.learning_rate, fused=fused)
        elif self._masters:
            self._optimizer = torch.optim.SGD(self._masters, lr=settings.learning_rate)

    def step(self) -> None:
        if self._optimizer is None:
            return
        for master, gradient in zip(self._masters, self._gradients, strict=True):
            master.grad = gradient.to(master.dtype)
        self._optimizer.step()
        for master, weight in zip(self._masters, self._weights, strict=True):
            master.grad = None
            if master is not weight:
                weight.data.copy_(master.data)
        if self._moment_bytes == 0:
            self._moment_bytes = self._count_moments()

    def memory_bytes(self) -> int:
        """Master copies and moments that exist now (moments appear in the first step)."""
        return self._master_bytes + self._moment_bytes

    def _count_moments(self) -> int:
        """Without the `step` counters, one element for each parameter."""
        assert self._optimizer is not None
        tensors = [v for state in self._optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return sum(tensor.nbytes for tensor in tensors if tensor.dim() > 0)
