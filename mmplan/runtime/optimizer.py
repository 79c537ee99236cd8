"""The optimizer of one stage: AdamW or SGD on fp32 weights, with a master copy when the model computes in 16 bits."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mmplan.runtime.finite import are_finite
from mmplan.scenario.scenario import Optimizer

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
Elements = tuple[int, slice]  # index of a weight, and elements of it laid flat


class StageOptimizer:
    """Updates `weights` by `gradients`, tensors of the same shapes; without any, a step does nothing.

    Moments are there from the start, so that the first step needs the memory of all others.
    """

    def __init__(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], settings: Optimizer) -> None:
        self._weights, self._gradients = tuple(weights), tuple(gradients)
        self._masters = tuple(w if w.dtype == torch.float32 else w.detach().float() for w in self._weights)
        for master in self._masters:
            master.requires_grad_()
        pairs = zip(self._masters, self._weights, strict=True)
        self._master_bytes = sum(master.nbytes for master, weight in pairs if master is not weight)
        self._forgone = False
        self._unscaling: list[tuple[Callable[[], float], list[Elements]]] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._adaptive: torch.optim.AdamW | None = None  # the same, where it has moments
        if self._masters and settings.name == "adamw":
            # On CUDA torch's own choice would hold one more fp32 copy of all weights during the step.
            fused = all(master.is_cuda for master in self._masters)
            self._optimizer = self._adaptive = torch.optim.AdamW(self._masters, lr=settings.learning_rate, fused=fused)
        elif self._masters:
            self._optimizer = torch.optim.SGD(self._masters, lr=settings.learning_rate)
        self._moment_bytes = self._make_moments()

    def finite(self) -> bool:
        """Whether all gradients are numbers."""
        return are_finite(self._gradients)

    def gradient(self, elements: Elements) -> Tensor:
        """Live."""
        index, place = elements
        return self._gradients[index].view(-1)[place]

    def unscale_by(self, scales: Mapping[Callable[[], float], Sequence[Elements]]) -> None:
        """From now on a step divides gradients by the scale that they have then."""
        self._unscaling = [(scale, list(elements)) for scale, elements in scales.items()]

    def gradient_squares(self) -> Iterator[tuple[Tensor, float]]:
        """Each weight and the squared norm of its gradient."""
        if self._gradients:
            norms = torch.stack([norm.double() for norm in torch._foreach_norm(self._gradients)])
            yield from zip(self._weights, norms.square().tolist(), strict=True)

    def forgo(self) -> None:
        """The next step changes nothing: neither weights nor moments nor counters."""
        self._forgone = True

    def poison(self) -> None:
        """Make a gradient no number, to rehearse that."""
        for gradient in self._gradients[:1]:
            gradient.view(-1)[:1] = torch.nan

    def step(self) -> None:
        forgone, self._forgone = self._forgone, False
        if self._optimizer is None or forgone:
            return
        for master, gradient in zip(self._masters, self._gradients, strict=True):
            master.grad = gradient.to(master.dtype)
        self._unscale()
        self._optimizer.step()
        for master in self._masters:
            master.grad = None
        self.publish()

    def _unscale(self) -> None:
        """In the type of the master copies, which holds what is left."""
        for scale, elements in self._unscaling:
            flat = [
                gradient.view(-1)[place]
                for index, place in elements
                if (gradient := self._masters[index].grad) is not None
            ]
            torch._foreach_mul_(flat, 1 / scale())

    def publish(self) -> None:
        """Give the weights the values of their master copies."""
        for master, weight in zip(self._masters, self._weights, strict=True):
            if master is not weight:
                weight.data.copy_(master.data)

    def state(self) -> list[dict[str, Tensor]]:
        """What a step reads and changes, live, by weight: the weight in fp32, and its moments."""
        moments: list[dict[str, Tensor]] = [{} for _ in self._masters]
        if self._adaptive is not None:
            moments = [{name: self._adaptive.state[m][name] for name in MOMENTS} for m in self._masters]
        pairs = zip(self._masters, moments, strict=True)
        return [{WEIGHT: master.detach(), **own} for master, own in pairs]

    @property
    def updates(self) -> int | None:
        """Steps that the moments have seen; None where there are no moments."""
        if self._adaptive is None:
            return None
        return max((int(state["step"]) for state in self._adaptive.state.values()), default=0)

    @updates.setter
    def updates(self, count: int) -> None:
        for state in self._adaptive.state.values() if self._adaptive is not None else ():
            state["step"].fill_(count)

    def _make_moments(self) -> int:
        """Zeros, as AdamW's first step makes them (torch/optim/adam.py, `_init_group`). Returns their bytes."""
        if self._adaptive is None:
            return 0
        for master in self._masters:
            step = torch.zeros((), device=master.device if master.is_cuda else None)
            self._adaptive.state[master] = {"step": step, **{name: torch.zeros_like(master) for name in MOMENTS}}
        return len(MOMENTS) * sum(master.nbytes for master in self._masters)

    def memory_bytes(self) -> int:
        """Master copies and moments, without the `step` counters, one element for each parameter."""
        return self._master_bytes + self._moment_bytes
