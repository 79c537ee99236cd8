"""A pipeline stage as the executor sees it, and the stage that is a subset of a model's layers.

The executor moves bytes whose sizes the program states; only a stage knows shapes and dtypes. So whatever cuts a model
(a layer subset here) can change without touching the executor.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.memory_activations import BLOCKS
from mmplan.planner.stage_graph import CutTensor
from mmplan.runtime.batch import Microbatch
from mmplan.runtime.compression.sums import messages_of
from mmplan.runtime.crossing import Crossing
from mmplan.runtime.dealt import Dealt, part_key, whole_key
from mmplan.runtime.dtypes import TORCH_DTYPES
from mmplan.runtime.finite import Unsound
from mmplan.runtime.holders import Holders
from mmplan.runtime.in_flight import Computed, InFlight, cut_off
from mmplan.runtime.layers import LayerModule
from mmplan.runtime.model import MultimodalModel
from mmplan.runtime.numerics.part_scales import PartScales
from mmplan.runtime.placed_rows import text_ranks
from mmplan.runtime.recompute import recomputed
from mmplan.runtime.tensor_parallel import SplitLayer
from mmplan.runtime.tensor_sums import TensorRanks
from mmplan.runtime.ties import Tie
from mmplan.runtime.weight_store import WeightStore, postpone_linears
from mmplan.runtime.weighted_stage import WeightedStage
from mmplan.scenario.scenario import Scenario


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

    def reduce(self) -> None:
        """Sum the gradients over the replicas, the ranks with the same weights."""

    def tie(self, number: int) -> None:
        """Sum with other stages of the replica the gradient of what they hold too: the sum of that number."""

    def step(self) -> None:
        """Update the weights and forget the gradients."""

    def moved_bytes(self) -> int:
        """Bytes of the buffers handed to collectives among the replicas, and to sums over stages, so far."""

    def foreseen_bytes(self) -> int | None:
        """Bytes that ranks which share the layers were to exchange so far; None where the plan says it."""

    def losses(self) -> dict[str, float]:
        """Loss of the step so far by loss module: this stage's and replica's part of the global mean."""

    def memory_bytes(self) -> int:
        """Bytes in use now: weights, gradients, optimizer state and kept activations."""

    def unsound(self) -> Unsound | None:
        """Where a loss or a gradient of the step became no number; asked before the update."""

    def forgo(self) -> None:
        """The next update changes nothing but that gradients are forgotten."""

    def poison(self) -> None:
        """Make the losses and a gradient no numbers, to rehearse that."""


class LayerStage(WeightedStage):
    """The layers of one stage, cut out of the model by detaching what is received.

    Layers are detached from each other too: a backward goes through them one by one, in one order on all replicas, so
    that weights may be there only while their layer is at work (`shards.py`).

    Args:
        layers: the stage's layers in topological order.
        cuts: all tensors between stages; those that touch `stage` are used.
        model: holds the modules of these layers.
        layout: says which layers are recomputed and what the replicas share.
        replicas: the ranks with the same weights; None where there is one.
        count_kept: see `WeightedStage`.
        split_backward: the program has I and W instead of whole backwards.
        ranks: who shares the layers with this rank; None: they are whole.
        scales: of losses, by modality; None: losses are not scaled.
        crossings: what happens to tensors from or to stages of unlike meshes, by the activation's name.
        ties: matrices that several stages hold.
    """

    def __init__(
        self,
        *,
        stage: int,
        layers: Sequence[Layer],
        cuts: Sequence[CutTensor],
        graph: ComputationGraph,
        model: MultimodalModel,
        scenario: Scenario,
        layout: Layout,
        replicas: dist.ProcessGroup | None,
        count_kept: bool,
        split_backward: bool = False,
        ranks: TensorRanks | None = None,
        scales: PartScales | None = None,
        crossings: Mapping[str, Crossing] | None = None,
        ties: Sequence[Tie] = (),
    ) -> None:
        self.model, self._scales = model, scales
        self._ranks, self._crossings = ranks, crossings or {}
        edges = [edge for edge in graph.edges() if {edge.producer, edge.consumer} & {layer.id for layer in layers}]
        places = [layer.id for layer in layers if layout.places(layer)]
        self._dealt = Dealt(layers, edges, scenario.model, ranks, places=places, crossings=self._crossings)
        self._layers = tuple(layers)
        self._reads = {layer.id: tuple(graph.predecessors(layer.id)) for layer in layers}
        self._incoming = tuple(cut for cut in cuts if cut.target == stage)
        self._outgoing = tuple(cut for cut in cuts if cut.source == stage)
        self._has_backward = any(layer.has_backward for layer in layers)
        # Where nothing is kept for a backward, nothing is to be made anew.
        self._recomputed = {la.id for la in layers if la.has_backward and layout.recomputed(la) == "full"}
        for layer in layers:
            module = model.layer(layer.id)
            if isinstance(module, LayerModule) and layer.has_backward:
                module.drops_attention = layout.recomputed(layer) == "selective"
        on_host = scenario.technique.host_activations
        self._away = {la.id for la in layers if on_host and la.has_backward and la.kind in BLOCKS}
        # A replica without rows still has experts that those of others go to.
        self._exchanging = {la.id for la in layers if la.has_experts and ranks is not None and ranks.experts}
        self._precision_of = scenario.precision_of
        modules = {layer.id: model.layer(layer.id) for layer in layers}
        store = WeightStore()
        if split_backward:
            postpone_linears(model, store)
            for module in modules.values():
                if ranks is not None and isinstance(module, SplitLayer):
                    store.summed |= dict.fromkeys(module.summed_linears(), partial(ranks.reduce, backward=True))
        tied = {layer: tie for tie in ties for layer in tie.names if layer in modules}
        holders = Holders(layers=layers, modules=modules, replicas=replicas, ranks=ranks, tied=tied)
        self._holders = holders
        super().__init__(
            stage,
            holders.state(scenario.optimizer, layout.sharding, messages_of(layers, scenario.technique)),
            store,
            holders.places(),
            {p: scenario.model.module(la.module).modality for la in layers for p in modules[la.id].parameters()},
            count_kept=count_kept,
        )
        self._modality_of = {module.name: module.modality for module in scenario.model.modules}
        self._microbatches: Sequence[Microbatch] = ()
        self._own_microbatches: Sequence[Microbatch] = ()  # of layers that take images or clips in turn
        self._in_flight: dict[int, InFlight] = {}
        self._losses: dict[str, Tensor] = {}

    @property
    def layer_ids(self) -> tuple[str, ...]:
        return tuple(layer.id for layer in self._layers)

    def copies_of(self, tie: Tie) -> tuple[Parameter, ...]:
        """Its matrix here."""
        return tuple(self._holders.shared(layer) for layer in tie.names if layer in self._holders.tied)

    @property
    def raw_modules(self) -> frozenset[str]:
        """Modules whose raw inputs some layer here reads."""
        return frozenset(layer.module for layer in self._layers if not layer.sources or layer.kind == "token_embed")

    def load(self, microbatches: Sequence[Microbatch]) -> None:
        """Take the data of the next step; its losses start from nothing."""
        self._microbatches = microbatches
        self._own_microbatches = [self._dealt.own_batch(batch) for batch in microbatches]
        self._losses = {}
        self.outputs.clear()

    def poison(self) -> None:
        super().poison()
        self._losses = {module: loss * torch.nan for module, loss in self._losses.items()}

    def losses(self) -> dict[str, float]:
        return {module: float(loss) for module, loss in self._losses.items()}

    def forward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        batch, state = self._microbatches[microbatch], InFlight()
        values = self._received_values(self._incoming, received, state, batch)
        whole = dict(values)  # as others than dealt layers see them
        self._run(self._layers, microbatch, values, whole, (batch, self._own_microbatches[microbatch]), state)
        if self._has_backward:
            self._in_flight[microbatch] = state
        return {cut.activation: self._handed(cut, values, whole, batch) for cut in self._outgoing}

    def _run(
        self,
        layers: Iterable[Layer],
        microbatch: int,
        values: dict[str, Tensor],
        whole: dict[str, Tensor],
        batches: tuple[Microbatch, Microbatch],
        state: InFlight,
    ) -> None:
        """Compute layers in their order; `batches`: what all read, and what dealt layers read on this rank."""
        batch, own = batches
        for layer in layers:
            is_dealt = layer.id in self._dealt.parts
            self.state.enter(layer.id, backward=False)
            with self.counting(state.kept, batch.addresses(), away=layer.id in self._away):
                inputs = self._inputs(layer, values, whole, batch, state)
                values[layer.id] = self._compute(layer, inputs, own if is_dealt else batch, state)
            self.outputs.add(microbatch, layer.id, values[layer.id])
            self.state.leave(layer.id, backward=False)
            if not is_dealt:
                whole[layer.id] = values[layer.id]
            elif layer.id in self._dealt.gathered:
                way = self._dealt.way(layer.id)
                whole[layer.id] = self._dealt.whole(layer.id, values[layer.id], batch, way, backward=False)

    def _handed(
        self, cut: CutTensor, values: Mapping[str, Tensor], whole: Mapping[str, Tensor], batch: Microbatch
    ) -> Tensor:
        """What another stage gets."""
        rows = (values if self._dealt.sends_part(cut.edge) else whole)[cut.edge.producer]
        if crossing := self._crossings.get(cut.activation):
            rows = crossing.cut(rows, crossing.part_rows(cut.edge, batch))
        return rows.detach()

    def backward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        state, batch = self._in_flight.pop(microbatch), self._microbatches[microbatch]
        self._add_received(self._outgoing, state, received, batch)
        self._run_back(state, batch)
        return {cut.gradient: self._returned(cut, state, batch) for cut in self._incoming if cut.carries_grad}

    def _run_back(self, state: InFlight, batch: Microbatch) -> None:
        """The backward of what was computed, the last layer first."""
        while state.computed:
            computed = state.computed.pop()
            name = computed.layer.id
            if computed.layer.kind == "loss":
                scale = 1.0 if self._scales is None else self._scales.of[self._modality_of[computed.layer.module]].scale
                state.gradients[name] = torch.full_like(computed.like, scale, device=self.model.device)
            self.state.enter(name, backward=True)
            self._join_gradients(name, computed.like, state, batch)
            gradient = state.gradients.pop(name, None)  # None: nobody reads what has no rows
            if gradient is None and name in self._exchanging:
                gradient = torch.zeros_like(computed.like, device=self.model.device)
            if computed.edge is not None and gradient is not None:
                torch.autograd.backward(computed.edge, gradient)
            self.state.leave(name, backward=True)
        for name, like in state.received.items():
            self._join_gradients(name, like, state, batch)

    def _returned(self, cut: CutTensor, state: InFlight, batch: Microbatch) -> Tensor:
        """The gradient of what was received."""
        gradient = state.gradients.get(cut.edge.producer)
        if gradient is None:
            gradient = torch.zeros_like(state.received[cut.edge.producer], device=self.model.device)
        if crossing := self._crossings.get(cut.activation):
            rows = crossing.part_rows(cut.edge, batch)
            return crossing.scattered(gradient, rows, self._ranks, self._needed_by(crossing, cut, batch))
        return gradient

    def _needed_by(self, crossing: Crossing, cut: CutTensor, batch: Microbatch) -> Tensor | None:
        """Of each row of a tensor that comes from another mesh the cp rank that reads it; None: all do."""
        if crossing.way != "placed" or self._ranks is None or self._ranks.context is None:
            return None
        return text_ranks(cut.edge, batch, self._ranks.context)

    def reads(self, *, gradients: bool) -> tuple[str, ...]:
        if gradients:
            return tuple(cut.gradient for cut in self._outgoing if cut.carries_grad)
        return tuple(cut.activation for cut in self._incoming)

    def kept_bytes(self) -> Iterable[int]:
        return (sum(state.kept.values()) for state in self._in_flight.values())

    def _received_values(
        self, cuts: Iterable[CutTensor], received: Mapping[str, Tensor], state: InFlight, batch: Microbatch
    ) -> dict[str, Tensor]:
        """Producer layer -> `[tokens, width]`; no tokens where nothing was sent."""
        values = {}
        for cut in cuts:
            flat = received.get(cut.activation)
            device, dtype = self.model.device, TORCH_DTYPES[self._precision_of(cut.edge)]
            flat = torch.empty(0, dtype=dtype, device=device) if flat is None else flat.view(dtype)
            value = flat.view(-1, cut.edge.width)
            if crossing := self._crossings.get(cut.activation):
                rows = crossing.part_rows(cut.edge, batch)
                value = crossing.whole(value, rows, self._ranks, self._needed_by(crossing, cut, batch))
            values[cut.edge.producer] = value
            if cut.carries_grad:
                state.carrying.add(cut.edge.producer)
                state.received[cut.edge.producer] = torch.empty_like(value, device="meta")
        return values

    def _add_received(
        self, cuts: Iterable[CutTensor], state: InFlight, received: Mapping[str, Tensor], batch: Microbatch
    ) -> None:
        """The gradients that came back of what other stages read; of a tensor that several read, their sum."""
        likes = {computed.layer.id: computed.like for computed in state.computed}
        for cut in cuts:
            if not cut.carries_grad:
                continue
            name, like = cut.edge.producer, likes[cut.edge.producer]
            is_part = name in self._dealt.parts and not self._dealt.sends_part(cut.edge)
            shape = (self._dealt.rows(name, batch), like.shape[1]) if is_part else tuple(like.shape)
            crossing, flat = self._crossings.get(cut.activation), received.get(cut.gradient)
            if flat is None and crossing is not None and crossing.told_by_first and shape[0]:
                flat = torch.empty(0, dtype=torch.uint8, device=self.model.device)
            if flat is not None:
                gradient = flat.view(like.dtype).view(-1, shape[1])
                if crossing is not None:
                    gradient = crossing.placed(gradient, crossing.part_rows(cut.edge, batch), self._ranks)
                state.add(whole_key(name) if is_part else name, gradient.view(shape))
            elif shape[0]:
                raise ValueError(f"no gradient {cut.gradient} came for {shape[0]} rows that were sent")

    def _inputs(
        self,
        layer: Layer,
        values: Mapping[str, Tensor],
        whole: Mapping[str, Tensor],
        batch: Microbatch,
        state: InFlight,
    ) -> dict[str, Tensor]:
        """What the layer reads, cut off: all rows, or of a dealt layer this rank's."""
        way, inputs = self._dealt.way(layer.id), dict[str, Tensor]()
        for name in self._reads[layer.id]:
            rescale = self._rescaling(name, layer)
            if self._dealt.held(name) == way:
                inputs[name] = cut_off(name, values[name], state, None, rescale)
            elif not way:
                inputs[name] = cut_off(name, whole[name], state, whole_key(name), rescale)
            else:
                part = self._dealt.part(name, whole[name], batch, way)
                inputs[name] = cut_off(name, part, state, part_key(name, way), rescale)
        return inputs

    def _rescaling(self, producer: str, layer: Layer) -> Callable[[Tensor], Tensor] | None:
        """What becomes of a gradient on its way back to what the layer has read: it goes on in that one's scale."""
        source, target = self._modality_of[producer.rsplit(".", 1)[0]], self._modality_of[layer.module]
        if self._scales is None or source == target:
            return None
        return partial(self._scales.passed, source=source, target=target)

    def _join_gradients(self, name: str, like: Tensor, state: InFlight, batch: Microbatch) -> None:
        """Gradients that came for all rows of a part, or for parts of all rows, are added to the producer's own."""
        way = self._dealt.held(name)
        if name in self._dealt.gathered and whole_key(name) in state.gradients:
            state.add(name, self._dealt.part_of_sum(name, state.gradients.pop(whole_key(name)), batch, way))
        if name in self._dealt.by_images and name in state.carrying:
            part = state.gradients.pop(part_key(name), None)
            if part is None:  # this rank's part has no rows, but others' may have
                part = torch.empty(0, like.shape[1], dtype=like.dtype, device=self.model.device)
            whole = self._dealt.whole(name, part, batch, "images", backward=True)
            state.add(name, self._dealt.part(name, whole, batch, way) if way else self._dealt.once(whole))
        if name in self._dealt.by_rows and part_key(name, "rows") in state.gradients:
            state.add(name, self._dealt.placed(name, state.gradients.pop(part_key(name, "rows")), batch))

    def _compute(self, layer: Layer, inputs: Mapping[str, Tensor], batch: Microbatch, state: InFlight) -> Tensor:
        """The layer's output, detached."""
        module = self.model.layer(layer.id)
        if isinstance(module, LayerModule):
            inputs = module.as_own(inputs)  # so that what is recomputed keeps them as it reads them
        output = recomputed(module, inputs, batch) if layer.id in self._recomputed else module(inputs, batch)
        if layer.has_backward:
            edge = get_gradient_edge(output) if output.requires_grad else None
            state.computed.append(Computed(layer, edge, torch.empty_like(output, device="meta")))
            state.carrying.add(layer.id)
        if layer.kind == "loss":
            part = output.detach().float()
            known = self._losses.get(layer.module)
            self._losses[layer.module] = part if known is None else known + part
        return output.detach()
