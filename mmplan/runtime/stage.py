"""A pipeline stage as the executor sees it, and the stage that is a subset of a model's layers.

The executor moves bytes whose sizes the program states; only a stage knows shapes and dtypes. So whatever cuts a model
(a layer subset here) can change without touching the executor.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout
from mmplan.planner.stage_graph import CutTensor
from mmplan.runtime.batch import Microbatch
from mmplan.runtime.gradients import FlatGradients
from mmplan.runtime.model import TORCH_DTYPES, MultimodalModel
from mmplan.runtime.optimizer import StageOptimizer
from mmplan.runtime.recompute import recomputed
from mmplan.runtime.weight_store import WeightStore, postpone_linears
from mmplan.scenario.scenario import Optimizer


class Stage(Protocol):
    """One stage of one replica. Received tensors are flat `uint8` buffers, keyed by tensor name.

    A tensor without bytes is neither sent nor received; the stage fills it in.
    """

    def forward(self, microbatch: int, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Compute one microbatch; returns what other stages read, by tensor name (`producer>consumer`)."""

    def backward(self, microbatch: int, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Backward of a microbatch; takes gradients of what was sent, returns gradients of what was received
        (`producer<consumer`)."""

    def backward_input(self, microbatch: int, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The same without weight gradients, which `backward_weight` makes later."""

    def backward_weight(self, microbatch: int) -> None:
        """The weight gradients that `backward_input` left out."""

    def reads(self, *, gradients: bool) -> Sequence[str]:
        """Names of the activations that a forward reads, or of the gradients that a backward reads."""

    def gradients(self) -> Sequence[Tensor]:
        """The buffers that are summed over replicas, equal in number and size on all of them."""

    def step(self) -> None:
        """Update the weights and forget the gradients."""

    def losses(self) -> dict[str, float]:
        """Loss of the step so far by loss module: this stage's and replica's part of the global mean."""

    def memory_bytes(self) -> int:
        """Bytes in use now: weights, gradients, optimizer state and kept activations."""


@dataclass(slots=True)
class _InFlight:
    """What a microbatch leaves between its forward and its backward."""

    received: dict[str, Tensor] = field(default_factory=dict)  # gradient name -> leaf
    sent: dict[str, Tensor] = field(default_factory=dict)  # gradient name -> output that its gradient belongs to
    losses: list[Tensor] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)  # storage address -> bytes


class LayerStage:
    """The layers of one stage, cut out of the model by detaching what is received.

    Args:
        layers: the stage's layers in topological order.
        cuts: all tensors between stages; those that touch `stage` are used.
        model: holds the modules of these layers.
        layout: says which layers are recomputed.
        count_kept: count the bytes autograd keeps, by hooks on saved tensors (for devices without an allocator that
            counts). Parameters and the raw batch are left out, a storage that several operators keep counts once.
        split_backward: the program has I and W instead of whole backwards.
    """

    def __init__(
        self,
        *,
        stage: int,
        layers: Sequence[Layer],
        cuts: Sequence[CutTensor],
        graph: ComputationGraph,
        model: MultimodalModel,
        optimizer: Optimizer,
        layout: Layout,
        count_kept: bool,
        split_backward: bool = False,
    ) -> None:
        self.model = model
        self._layers = tuple(layers)
        self._reads = {layer.id: tuple(graph.predecessors(layer.id)) for layer in layers}
        self._incoming = tuple(cut for cut in cuts if cut.target == stage)
        self._outgoing = tuple(cut for cut in cuts if cut.source == stage)
        self._has_backward = any(layer.has_backward for layer in layers)
        # Where nothing is kept for a backward, nothing is to be made anew.
        self._recomputed = {la.id for la in layers if la.has_backward and layout.recomputed(la) == "full"}
        self._dtype = TORCH_DTYPES[model.precision]
        self._gradients = FlatGradients(model.parameters(), TORCH_DTYPES[optimizer.gradient_dtype])
        self._store = WeightStore()
        if split_backward:
            postpone_linears(model, self._store)
        self._optimizer = StageOptimizer(self._gradients, optimizer)
        self._count_kept = count_kept
        self._weight_addresses = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._weight_bytes = sum(p.nbytes for p in model.parameters())
        self._microbatches: Sequence[Microbatch] = ()
        self._in_flight: dict[int, _InFlight] = {}
        self._losses: dict[str, Tensor] = {}

    @property
    def raw_modules(self) -> frozenset[str]:
        """Modules whose raw inputs some layer here reads."""
        return frozenset(layer.module for layer in self._layers if not layer.sources or layer.kind == "token_embed")

    def load(self, microbatches: Sequence[Microbatch]) -> None:
        """Take the data of the next step; its losses start from nothing."""
        self._microbatches = microbatches
        self._losses = {}

    def losses(self) -> dict[str, float]:
        return {module: float(loss) for module, loss in self._losses.items()}

    def forward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        batch = self._microbatches[microbatch]
        state = _InFlight()
        values = self._received_leaves(received, state)
        if self._count_kept:
            skipped = self._weight_addresses | batch.addresses()
            with saved_tensors_hooks(lambda tensor: _count(tensor, state.kept, skipped), lambda tensor: tensor):
                self._compute(values, batch, state)
        else:
            self._compute(values, batch, state)
        for cut in self._outgoing:
            if cut.carries_grad:
                state.sent[cut.gradient] = values[cut.edge.producer]
        if self._has_backward:
            self._in_flight[microbatch] = state
        return {cut.activation: values[cut.edge.producer].detach() for cut in self._outgoing}

    def backward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        state = self._in_flight.pop(microbatch)
        roots = [*state.losses]
        gradients = [torch.ones_like(loss) for loss in state.losses]
        # An output that several stages read stands here once for each, and autograd adds their gradients.
        for name, output in state.sent.items():
            if name in received:
                roots.append(output)
                gradients.append(received[name].view(output.dtype).view_as(output))
            elif output.numel() > 0:
                raise ValueError(f"no gradient {name} came for {output.numel()} elements that were sent")
        if roots:
            torch.autograd.backward(roots, gradients)
        return {
            name: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            for name, leaf in state.received.items()
        }

    def backward_input(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with self._store.postponing(microbatch):
            return self.backward(microbatch, received)

    def backward_weight(self, microbatch: int) -> None:
        with torch.no_grad():
            self._store.compute(microbatch, self._gradients.accumulate)

    def reads(self, *, gradients: bool) -> tuple[str, ...]:
        if gradients:
            return tuple(cut.gradient for cut in self._outgoing if cut.carries_grad)
        return tuple(cut.activation for cut in self._incoming)

    def gradients(self) -> Sequence[Tensor]:
        return self._gradients.buffers()

    def step(self) -> None:
        self._optimizer.step()
        self._gradients.zero()

    def memory_bytes(self) -> int:
        kept = sum(sum(state.kept.values()) for state in self._in_flight.values())
        kept += sum(size for address, size in self._store.storages().items() if address not in self._weight_addresses)
        return self._weight_bytes + self._gradients.memory_bytes() + self._optimizer.memory_bytes() + kept

    def _received_leaves(self, received: Mapping[str, Tensor], state: _InFlight) -> dict[str, Tensor]:
        """Producer layer -> `[tokens, width]` leaf; no tokens where nothing was sent."""
        values = {}
        for cut in self._incoming:
            flat = received.get(cut.activation)
            device = self.model.device
            flat = torch.empty(0, dtype=self._dtype, device=device) if flat is None else flat.view(self._dtype)
            leaf = flat.view(-1, cut.edge.width)
            if cut.carries_grad:
                state.received[cut.gradient] = leaf.requires_grad_()
            values[cut.edge.producer] = leaf
        return values

    def _compute(self, values: dict[str, Tensor], batch: Microbatch, state: _InFlight) -> None:
        for layer in self._layers:
            inputs = {producer: values[producer] for producer in self._reads[layer.id]}
            module = self.model.layer(layer.id)
            again = layer.id in self._recomputed
            output = values[layer.id] = recomputed(module, inputs, batch) if again else module(inputs, batch)
            if layer.kind == "loss":
                part = output.detach().float()
                known = self._losses.get(layer.module)
                self._losses[layer.module] = part if known is None else known + part
                if output.requires_grad:
                    state.losses.append(output)


def _count(tensor: Tensor, kept: dict[int, int], skipped: Set[int]) -> Tensor:
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in skipped:
        kept[storage.data_ptr()] = storage.nbytes()
    return tensor
