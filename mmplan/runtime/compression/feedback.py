"""Sums of gradients over ranks by messages, each rank's losses kept for the next step (arXiv 1809.07599, 1901.09847).

Tensors have names, so that state does not depend on how gradients are bucketed, and a resumed run goes on to the bit.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmplan.cost_models.compressed_bytes import GradientFormat
from mmplan.runtime.compression.codec import add_decoded, encode
from mmplan.runtime.compression.wire import Wire


class ErrorFeedback:
    """Averages or sums over the ranks of a group. State: what this rank has not said of a tensor yet, fp32, by name."""

    def __init__(self, form: GradientFormat, group: dist.ProcessGroup | None = None, *, sums: bool = False) -> None:
        self.form, self.group = form, group
        self._sums = sums
        self.wire = Wire()
        self._residuals: dict[str, Tensor] = {}

    def average(self, tensors: Mapping[str, Tensor]) -> None:
        """Each tensor becomes its mean over the ranks, in place and alike on all. One all-gather.

        If a mean is not finite anywhere, its tensor keeps what it had not said, as if the step had not been: a loss
        scaler skips it.
        """
        encoded = {name: self._encode(name, tensor) for name, tensor in tensors.items()}
        if not encoded:
            return
        everything = self.wire.gather(torch.cat([message for message, _ in encoded.values()]), self.group)
        place = 0
        for name, (message, lost) in encoded.items():
            said = everything[:, place : place + message.numel()]
            place += message.numel()
            self._finish(name, tensors[name], said, lost)

    def scatter_average(self, name: str, whole: Tensor, own: Tensor) -> None:
        """`own` [n] becomes this rank's row of the mean of all ranks' `whole` [ranks * n]. One all-to-all."""
        rows = whole.view(dist.get_world_size(self.group), -1)
        names = [f"{name}/{rank}" for rank in range(rows.shape[0])]
        encoded = [self._encode(part, row) for part, row in zip(names, rows, strict=True)]
        said = self.wire.swap(torch.stack([message for message, _ in encoded]), self.group)
        mean = self._mean(said, own.numel())
        own.copy_(mean)
        for part, (_, lost) in zip(names, encoded, strict=True):
            self._residuals[part] = torch.where(lost.isfinite().all(), lost, self._unsaid(part, lost))

    def rescale(self, factor: float) -> None:
        """When the loss scale is multiplied by `factor`: what is kept was in the old one."""
        for residual in self._residuals.values():
            residual *= factor

    @property
    def unsaid(self) -> Mapping[str, Tensor]:
        """What this rank has not said of each tensor yet, flat."""
        return self._residuals

    @property
    def held_bytes(self) -> int:
        """Of what is kept."""
        return sum(residual.nbytes for residual in self._residuals.values())

    def state_dict(self) -> dict[str, Any]:
        """Of this rank; every rank saves its own."""
        return {
            "form": asdict(self.form),
            "ranks": dist.get_world_size(self.group),
            "residuals": {name: residual.clone() for name, residual in self._residuals.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError where the state is of another format or number of ranks."""
        own = {"form": asdict(self.form), "ranks": dist.get_world_size(self.group)}
        for key, value in own.items():
            if state[key] != value:
                raise ValueError(f"the state was saved with {key} = {state[key]}, and here it is {value}")
        self.go_on_from(state["residuals"])

    def go_on_from(self, unsaid: Mapping[str, Tensor]) -> None:
        """What was `unsaid` becomes so again."""
        self._residuals = {name: residual.clone() for name, residual in unsaid.items()}

    def _encode(self, name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
        flat = tensor.detach().flatten().float()
        kept = self._residuals.get(name)
        if kept is not None and kept.numel() != flat.numel():
            raise ValueError(f"{name} had {kept.numel()} elements in the last step and has {flat.numel()} now")
        return encode(flat if kept is None else flat + kept.to(flat.device), self.form)

    def _finish(self, name: str, tensor: Tensor, said: Tensor, lost: Tensor) -> None:
        mean = self._mean(said, tensor.numel())
        tensor.copy_(mean.view(tensor.shape))
        if not self.form.dense(tensor.numel()):
            self._residuals[name] = torch.where(mean.isfinite().all(), lost, self._unsaid(name, lost))

    def _unsaid(self, name: str, like: Tensor) -> Tensor:
        kept = self._residuals.get(name)
        return torch.zeros_like(like) if kept is None else kept.to(like.device)

    def _mean(self, messages: Tensor, elements: int) -> Tensor:
        """Added in rank order, so that all ranks have the same bits."""
        total = torch.zeros(elements, device=messages.device)
        for message in messages:
            add_decoded(message, total, self.form)
        return total if self._sums else total / messages.shape[0]
