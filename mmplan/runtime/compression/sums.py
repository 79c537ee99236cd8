"""Sums of a stage's gradients over its replicas: a message for each layer that may be compressed, the rest whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from mmplan.cost_models.compressed_bytes import FORMATS, GradientFormat
from mmplan.cost_models.layer import Layer
from mmplan.runtime.compression.feedback import ErrorFeedback
from mmplan.runtime.gradients import FlatGradients
from mmplan.runtime.shards import owners_of
from mmplan.scenario.technique import Technique


@dataclass(frozen=True, kw_only=True, slots=True)
class Messages:
    """Layers, by id, of whose gradients messages are sent, and in which format."""

    form: GradientFormat
    layers: frozenset[str]

    def sum_bytes(self, elements: Mapping[str, int], element_bytes: int) -> int:
        """That a rank hands to collectives for trained elements by layer."""
        coded = sum(self.form.wire_bytes(count) for layer, count in elements.items() if layer in self.layers)
        return coded + element_bytes * sum(count for layer, count in elements.items() if layer not in self.layers)


def messages_of(layers: Sequence[Layer], technique: Technique) -> Messages | None:
    """What the technique and the zones say."""
    form = FORMATS.get(technique.compression)
    coded = frozenset(layer.id for layer in layers if not layer.whole_gradient)
    return None if form is None else Messages(form=form, layers=coded)


class CompressedSums:
    """What is not said of a layer's gradients in one step is added to those of the next."""

    def __init__(
        self,
        gradients: FlatGradients,
        layers: Mapping[str, Sequence[Parameter]],
        messages: Messages,
        replicas: dist.ProcessGroup,
    ) -> None:
        """`layers`: the parameters in the order of the gradients; one that two layers share is the first one's."""
        self._feedback = ErrorFeedback(messages.form, replicas, sums=True)
        owner = owners_of(layers)
        self._own: dict[str, list[Parameter]] = {}  # of each layer, in the order of its gradients
        for parameter in gradients.parameters:
            self._own.setdefault(owner[parameter], []).append(parameter)
        counts = [sum(parameter.numel() for parameter in own) for own in self._own.values()]
        pieces = torch.split(gradients.buffer.whole, counts) if counts else ()
        spans = dict(zip(self._own, pieces, strict=True))
        self._coded = {layer: span for layer, span in spans.items() if layer in messages.layers}
        self._whole = [span for layer, span in spans.items() if layer not in messages.layers]

    @property
    def held_bytes(self) -> int:
        return self._feedback.held_bytes

    @property
    def unsaid(self) -> Mapping[str, Tensor]:
        """By layer, flat: what this rank has not said yet."""
        return self._feedback.unsaid

    def go_on_from(self, unsaid: Mapping[str, Tensor]) -> None:
        """What a checkpoint has of the layers here.

        Raises:
            ValueError: a layer has another number of elements.
        """
        own = {layer: tensor for layer, tensor in unsaid.items() if layer in self._coded}
        for layer, tensor in own.items():
            if tensor.numel() != self._coded[layer].numel():
                raise ValueError(f"{layer} has {self._coded[layer].numel()} elements here, and had {tensor.numel()}")
        self._feedback.go_on_from(own)

    def rescale(self, factors: Mapping[Parameter, float]) -> None:
        """What is not said yet of gradients: times the factor of each parameter. (In a model of the user's own a layer
        may hold some that belong to no modality.)"""
        for layer, unsaid in self._feedback.unsaid.items():
            own = self._own[layer]
            for part, parameter in zip(torch.split(unsaid, [p.numel() for p in own]), own, strict=True):
                part *= factors[parameter]

    def sum(self) -> int:
        """In place; returns the bytes handed to collectives. Collective."""
        before = self._feedback.wire.payload_bytes
        for layer, span in self._coded.items():  # one at a time: copies of one layer's gradients at once
            self._feedback.average({layer: span})
        for span in self._whole:
            self._feedback.wire.sum(span, self._feedback.group)
        return self._feedback.wire.payload_bytes - before
