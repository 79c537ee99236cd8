"""Which ranks hold the same weights as this one: a stage's parameters by group, their state and their places."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from mmplan.cost_models.layer import Layer
from mmplan.runtime.compression.sums import Messages
from mmplan.runtime.held import Place
from mmplan.runtime.shards import each_once, owners_of
from mmplan.runtime.state import JointState, StageState, by_type, stage_state
from mmplan.runtime.tensor_parallel import SplitLayer, places_of
from mmplan.runtime.tensor_sums import TensorRanks
from mmplan.runtime.ties import Tie, copy_place
from mmplan.scenario.scenario import Optimizer
from mmplan.scenario.technique import Sharding


@dataclass(frozen=True, kw_only=True, slots=True)
class Holders:
    """The parameters of a stage's layers (by id, in order), in groups: those on all `replicas`, those of modules that
    are whole on every rank of the stage, and those of experts that lie on other ranks than the rest of their layers.

    `tied`: by layer, of whose matrix other stages have copies.
    """

    layers: Sequence[Layer]
    modules: Mapping[str, nn.Module]
    replicas: dist.ProcessGroup | None
    ranks: TensorRanks | None
    tied: Mapping[str, Tie]

    def state(self, optimizer: Optimizer, sharding: Sharding, messages: Messages | None = None) -> StageState:
        """Weights, gradients and optimizer state; the parts reduce in the order of their names above, on all ranks.

        Args:
            messages: what of those on all replicas is compressed.
        """
        dealt, experts = self._dealt(), self._experts()
        copies = self._copies() if sharding != "none" and self.replicas is not None else []
        apart = {p for group in (dealt, experts, *copies) for own in group.values() for p in own}
        rest = {name: [p for p in module.parameters() if p not in apart] for name, module in self.modules.items()}
        if messages is not None and sharding == "none":
            rest = self._whole_ones_last(rest, messages)
        groups = [(rest, self.replicas), *((copy, self.replicas) for copy in copies)]
        if self.ranks is not None:
            of_experts = None if self.ranks.experts is None else self.ranks.experts.replicas
            groups += [(dealt, self.ranks.stage), (experts, of_experts)]
        if sharding == "optimizer":  # weights lie one behind the other in one buffer
            groups = [(own, holders) for every, holders in groups for own in by_type(every)]
        states = {
            stage_state(own, optimizer, sharding, holders, None if index else messages): each_once(own)
            for index, (own, holders) in enumerate(groups)
            if index == 0 or any(own.values())
        }
        return next(iter(states)) if len(states) == 1 else JointState(states)

    def shared(self, layer: str) -> Parameter:
        """Of a layer in `tied` the matrix."""
        module = self.modules[layer]
        return module.get_parameter("parts.table.weight" if layer == self.tied[layer].names[0] else "parts.head.weight")

    def _whole_ones_last(
        self, parameters: Mapping[str, Sequence[Parameter]], messages: Messages
    ) -> dict[str, list[Parameter]]:
        """By layer those that are compressed; then all others, under no layer's name. Copies that ranks which share a
        layer hold are among the latter: each rank would choose other elements of them, and copies would drift apart."""
        places, split = self.places(), self.ranks is not None and self.ranks.degree > 1
        coded, whole = dict[str, list[Parameter]](), list[Parameter]()
        for parameter, layer in owners_of(parameters).items():
            place = places[parameter]
            copied = split and (place.sharers > 1 or place.shape == tuple(parameter.shape))
            target = whole if copied or layer not in messages.layers else coded.setdefault(layer, [])
            target.append(parameter)
        return {**coded, "": whole}

    def places(self) -> dict[Parameter, Place]:
        """Where they lie in the whole model."""
        places: dict[Parameter, Place] = {}
        for layer in self.layers:
            places = places_of(self.modules[layer.id], layer) | places  # a tied matrix is the first layer's
        for layer_id, tie in self.tied.items():
            copy, table = self.shared(layer_id), tie.names[0]
            place = replace(places[copy], name=f"{table}/parts.table.weight")
            places[copy] = copy_place(place, tie, first=layer_id == table)
        for parameters in self._dealt().values():
            for parameter in parameters:
                writes = self.ranks is None or self.ranks.stage is None or self.ranks.stage.rank() == 0
                places[parameter] = replace(places[parameter], writes=writes)
        return places

    def _copies(self) -> list[dict[str, list[Parameter]]]:
        """Trained matrices that other stages have too, each in a group of its own: equal shares on all these stages."""
        return [
            {name: [self.shared(layer)] if name == layer else [] for name in self.modules}
            for layer, tie in self.tied.items()
            if tie.trained
        ]

    def _dealt(self) -> dict[str, list[Parameter]]:
        spread = () if self.ranks is None else self.ranks.spread
        return {
            layer.id: list(self.modules[layer.id].parameters()) if layer.module in spread else []
            for layer in self.layers
        }

    def _experts(self) -> dict[str, list[Parameter]]:
        return {
            name: module.expert_parameters() if isinstance(module, SplitLayer) else []
            for name, module in self.modules.items()
        }
