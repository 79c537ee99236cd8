"""A stage some of whose layers run once for several microbatches (`Plan.together`).

They run in the forward of the first of these microbatches, on the packed rows of all, and back in the backward of the
last one. In between each microbatch takes its rows of what they made, and leaves its gradient of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmplan.planner.batch_factors import runs_with
from mmplan.planner.plan import module_of
from mmplan.planner.stage_graph import CutTensor
from mmplan.runtime.batch import Microbatch, joined
from mmplan.runtime.dealt import whole_key
from mmplan.runtime.in_flight import InFlight
from mmplan.runtime.stage import LayerStage


@dataclass(slots=True)
class _Group:
    """Microbatches between their forward at once and their backward at once.

    outputs: producer -> all rows, of what others read one by one. gradients: of these, by microbatch as they come.
    """

    state: InFlight
    outputs: dict[str, Tensor]
    gradients: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def kept_bytes(self) -> int:
        held = [*self.outputs.values(), *(g for of in self.gradients.values() for g in of.values())]
        return sum(self.state.kept.values()) + sum(tensor.nbytes for tensor in held)

    def add(self, producer: str, microbatch: int, gradient: Tensor) -> None:
        known = self.gradients.setdefault(producer, {})
        known[microbatch] = known[microbatch] + gradient if microbatch in known else gradient


class BatchedStage(LayerStage):
    """See `LayerStage`; its layout names the modules that run several microbatches at once, and how many."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        layout = given["layout"]
        self._factor, self._together = layout.batch_factor, frozenset(layout.together)
        self._at_once = tuple(layer for layer in self._layers if layer.module in self._together)
        self._alone = tuple(layer for layer in self._layers if layer.module not in self._together)
        self._joined_in, self._single_in = self._parted(self._incoming)
        self._joined_out, self._single_out = self._parted(self._outgoing)
        received = {cut.edge.producer for cut in self._joined_in}
        made = {layer.id for layer in self._at_once} | received
        # what is read one by one here, and what is sent so
        self._read = sorted({name for layer in self._alone for name in self._reads[layer.id]} & made)
        self._sent = [cut for cut in self._single_out if cut.edge.producer in made]
        self._groups: dict[int, _Group] = {}
        self._merged: Sequence[tuple[Microbatch, Microbatch]] = ()

    def _parted(self, cuts: Iterable[CutTensor]) -> tuple[list[CutTensor], list[CutTensor]]:
        """Tensors that go once for all microbatches, and the others."""
        parts: tuple[list[CutTensor], list[CutTensor]] = [], []
        for cut in cuts:
            ends = {module_of(cut.edge.producer), module_of(cut.edge.consumer)}
            parts[not ends <= self._together].append(cut)
        return parts

    def load(self, microbatches: Sequence[Microbatch]) -> None:
        super().load(microbatches)
        firsts = range(0, len(microbatches), self._factor)
        merged = [joined(microbatches[first : first + self._factor], self._together) for first in firsts]
        self._merged = [(batch, self._dealt.own_batch(batch)) for batch in merged]

    def forward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        number, batch, made = microbatch // self._factor, self._microbatches[microbatch], dict[str, Tensor]()
        if runs_with("F", microbatch, self._factor):
            made = self._run_at_once(number, microbatch, received)
        group, state = self._groups[number], InFlight()
        values = self._received_values(self._single_in, received, state, batch)
        for name in self._read:
            values[name] = self._rows(group, name, microbatch)
            if name in group.state.carrying:
                state.carrying.add(name)
        whole = dict(values)
        self._run(self._alone, microbatch, values, whole, (batch, self._own_microbatches[microbatch]), state)
        for cut in self._single_out:
            if cut in self._sent:
                made[cut.activation] = self._rows(group, cut.edge.producer, microbatch)
            else:
                made[cut.activation] = self._handed(cut, values, whole, batch)
        if self._has_backward:
            self._in_flight[microbatch] = state
        elif runs_with("B", microbatch, self._factor):
            del self._groups[number]
        return made

    def _run_at_once(self, number: int, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The forward of a group; what goes to other stages once for all its microbatches."""
        batches, state = self._merged[number], InFlight()
        values = self._received_values(self._joined_in, received, state, batches[0])
        whole = dict(values)
        self._run(self._at_once, microbatch, values, whole, batches, state)
        names = {*self._read, *(cut.edge.producer for cut in self._sent)}
        self._groups[number] = _Group(state=state, outputs={name: whole[name].detach() for name in sorted(names)})
        return {cut.activation: self._handed(cut, values, whole, batches[0]) for cut in self._joined_out}

    def _rows(self, group: _Group, producer: str, microbatch: int) -> Tensor:
        """A microbatch's rows of what a group made."""
        first = microbatch // self._factor * self._factor
        before = sum(self._dealt.rows(producer, batch) for batch in self._microbatches[first:microbatch])
        return group.outputs[producer].narrow(0, before, self._dealt.rows(producer, self._microbatches[microbatch]))

    def backward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        number, batch = microbatch // self._factor, self._microbatches[microbatch]
        group, state = self._groups[number], self._in_flight.pop(microbatch)
        own = [cut for cut in self._single_out if cut not in self._sent]
        self._add_received(own, state, received, batch)
        self._run_back(state, batch)
        for name in self._read:
            for key in (name, whole_key(name)):
                if key in state.gradients:
                    group.add(name, microbatch, state.gradients.pop(key))
        for cut in self._sent:
            if cut.gradient in received:
                rows = received[cut.gradient].view(group.outputs[cut.edge.producer].dtype)
                group.add(cut.edge.producer, microbatch, rows.view(-1, cut.edge.width))
        back = {cut.gradient: self._returned(cut, state, batch) for cut in self._single_in if cut.carries_grad}
        return back | (self._back_at_once(number, received) if runs_with("B", microbatch, self._factor) else {})

    def _back_at_once(self, number: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The backward of a group; what goes back to other stages once for all its microbatches."""
        group, (batch, _) = self._groups.pop(number), self._merged[number]
        state, first = group.state, number * self._factor
        self._add_received(self._joined_out, state, received, batch)
        for name, gradients in group.gradients.items():
            every = []
            for microbatch in range(first, first + self._factor):
                none = torch.zeros_like(self._rows(group, name, microbatch))  # it had no rows, or nobody read them
                every.append(gradients.get(microbatch, none))
            state.add(whole_key(name) if name in self._dealt.parts else name, torch.cat(every))
        self._run_back(state, batch)
        return {cut.gradient: self._returned(cut, state, batch) for cut in self._joined_in if cut.carries_grad}

    def kept_bytes(self) -> Iterable[int]:
        return (*super().kept_bytes(), *(group.kept_bytes() for group in self._groups.values()))
