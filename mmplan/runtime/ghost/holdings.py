"""Which parameters of a real model each stage of a plan holds: their state, their places, and what is exchanged."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from mmplan.cost_models.graph import ComputationGraph
from mmplan.errors import InputError
from mmplan.planner.place import TiedSum
from mmplan.planner.plan import Plan
from mmplan.planner.shared_bytes import SharedBytes
from mmplan.runtime.compression.sums import Messages, messages_of
from mmplan.runtime.ghost.held_experts import HeldExperts
from mmplan.runtime.ghost.recording import Recording
from mmplan.runtime.ghost.slots import Slots, find_slots, slot_bytes
from mmplan.runtime.ghost.traffic import Owners
from mmplan.runtime.ghost.units import parameter_names
from mmplan.runtime.held import Cut, Place, whole_place
from mmplan.runtime.shards import each_once, owners_of
from mmplan.runtime.state import JointState, StageState, by_type, stage_state
from mmplan.runtime.ties import Tie, copy_place, tied_sharding, ties_of
from mmplan.scenario.scenario import DTYPE_BYTES
from mmplan.scenario.technique import Sharding


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dealt:
    """Parameters that all `ranks` of a stage have whole, of which each has the gradient of its images: their names."""

    names: frozenset[str]
    ranks: dist.ProcessGroup | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Holdings:
    """pieces: of each stage; layers: of pieces, the plan's; trained: names of parameters; slots: of each stage,
    None but where replicas share out its pieces one by one; ties: what several stages hold; messages: what replicas
    say of gradients where they do not sum them whole; cuts: parameters of which tp ranks have parts; experts: those
    that lie on ranks of their own; dealt: those of modules whose images ranks take in turn; logits: modules of whose
    logits tp ranks have columns."""

    model: nn.Module
    pieces: tuple[tuple[str, ...], ...]
    layers: Mapping[str, str]
    trained: frozenset[str]
    slots: tuple[Slots | None, ...]
    ties: tuple[Tie, ...]
    messages: Messages | None
    cuts: Mapping[str, Cut]
    experts: HeldExperts | None = None
    dealt: Dealt | None = None
    logits: frozenset[str] = frozenset()

    @property
    def tied(self) -> frozenset[int]:
        """Ids of parameters."""
        return frozenset(id(self.model.get_parameter(name)) for tie in self.ties for name in tie.names)

    def alone(self, stage: int) -> dict[str, list[Parameter]]:
        """Slot or layer -> the stage's parameters that no other stage holds, those of experts and dealt ones apart."""
        elsewhere = self.tied | self._ids_of_experts | self._ids_of_dealt
        return {piece: [p for p in own if id(p) not in elsewhere] for piece, own in self._of(stage).items()}

    def of_experts(self, stage: int) -> dict[str, list[Parameter]]:
        """The same of those experts that lie on other ranks than the rest of the stage."""
        if self.experts is None:
            return {}
        here = {id(self.model.get_parameter(name)) for name in self.experts.here}
        return {piece: [p for p in own if id(p) in here] for piece, own in self._of(stage).items()}

    def of_dealt(self, stage: int) -> dict[str, list[Parameter]]:
        """The same of modules whose images ranks take in turn."""
        if self.dealt is None:
            return {}
        here = self._ids_of_dealt
        return {piece: [p for p in own if id(p) in here] for piece, own in self._of(stage).items()}

    def of_tie(self, plan: Plan, stage: int, tie: Tie) -> tuple[dict[str, list[Parameter]], Sharding]:
        """Slot or nothing -> parameters of the tie whose state the stage keeps; and how replicas share it. By layer
        where they do so with all else, one stage of a rank has them, and one slot of each stage."""
        ids = {id(self.model.get_parameter(name)) for name in tie.names}
        alone = all(self.slots[one] is not None for one in tie.stages) and len(tie.leading(plan)) == len(tie.stages)
        if alone and all(len(self._slots_with(ids, one)) == 1 for one in tie.stages):
            (slot,), copies = self._slots_with(ids, stage), copies_of(self, plan, stage, tie)
            return {one: copies if one == slot else [] for one in self._of(stage)}, plan.sharding
        return {"": copies_of(self, plan, stage, tie)}, tied_sharding(plan.sharding)

    def _slots_with(self, ids: Set[int], stage: int) -> list[str]:
        return [slot for slot, own in self._of(stage).items() if ids & {id(parameter) for parameter in own}]

    @property
    def _ids_of_dealt(self) -> frozenset[int]:
        names = frozenset[str]() if self.dealt is None else self.dealt.names
        return frozenset(id(self.model.get_parameter(name)) for name in names)

    @property
    def _ids_of_experts(self) -> frozenset[int]:
        names = frozenset[str]() if self.experts is None else self.experts.here | self.experts.away
        return frozenset(id(self.model.get_parameter(name)) for name in names)

    def _of(self, stage: int) -> dict[str, list[Parameter]]:
        if (slots := self.slots[stage]) is not None:
            found = slots.parameters(self.model)
        else:
            found = {}
            for piece in self.pieces[stage]:
                own = [self.model.get_parameter(name) for name in parameter_names(self.model, piece)]
                found.setdefault(self.layers.get(piece, piece), []).extend(own)
        return found


def dealt_parameters(model: nn.Module, names: Set[str], ranks: dist.ProcessGroup | None) -> Dealt:
    """By the names that the model lists them under."""
    own = {id(model.get_parameter(name)) for name in names}
    return Dealt(names=frozenset(name for name, p in model.named_parameters() if id(p) in own), ranks=ranks)


def holdings(
    plan: Plan,
    graph: ComputationGraph,
    model: nn.Module,
    owners: Owners,
    recordings: Sequence[Recording],
    *,
    trainable: Set[str],
    returning: Set[str],
) -> Holdings:
    """Args: trainable, returning: pieces whose layers are trained, or have a backward."""
    layers_of = [frozenset(stage.layers) for stage in plan.stages]
    own = [tuple(p for p, layer in owners.layer_of.items() if layer in layers) for layers in layers_of]
    pieces = tuple(
        (*mine, *_read_elsewhere(model, mine, owners, recordings, layers))
        for mine, layers in zip(own, layers_of, strict=True)
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    stages_of: dict[str, list[int]] = {}
    for stage, mine in enumerate(pieces):
        for piece in mine:
            for name in parameter_names(model, piece):
                stages_of.setdefault(names[id(model.get_parameter(name))], []).append(stage)
    layouts = [plan.layout(stage) for stage in range(len(plan.stages))]
    by_layer = plan.sharding in ("gradients", "parameters")
    read = {piece for mine in pieces for piece in mine} - owners.layer_of.keys()
    trained = frozenset(
        names[id(parameter)]
        for piece in owners.used & trainable
        for name in parameter_names(model, piece)
        if (parameter := model.get_parameter(name)).requires_grad
    )
    ties = ties_of(stages_of, trained)
    _refuse_ties_between_meshes(plan, ties)
    return Holdings(
        model=model,
        pieces=pieces,
        layers=owners.layer_of,
        trained=trained,
        slots=tuple(
            find_slots(
                model,
                mine,
                recordings,
                computed=owners.used | read,
                returning=returning | (read if returning & set(mine) else set()),
            )
            if by_layer and layout.replicas * (layout.tp if layout.spread else 1) > 1
            else None
            for mine, layout in zip(pieces, layouts, strict=True)
        ),
        ties=ties,
        messages=messages_of(graph.layers(), plan.scenario.technique) if plan.sharding == "none" else None,
        cuts={},
    )


def _refuse_ties_between_meshes(plan: Plan, ties: Sequence[Tie]) -> None:
    """InputError where ranks of unlike meshes would have to sum gradients."""
    for tie in ties:
        if len({plan.mesh(stage) for stage in tie.stages}) > 1:
            own = next(mesh for mesh in plan.meshes if mesh in {plan.mesh(stage) for stage in tie.stages})
            raise InputError(
                f"'{tie.names[0]}' is held by stages {' and '.join(map(str, tie.stages))}, and "
                f"{' and '.join(own.modules)} have ranks of their own: take them out of `constraints.modules` and "
                "optimize again"
            )


def _read_elsewhere(
    model: nn.Module, own: Sequence[str], owners: Owners, recordings: Sequence[Recording], layers: Set[str]
) -> tuple[str, ...]:
    """Parameters of other stages' pieces that glue reads for some layers of this one."""
    held = {id(model.get_parameter(name)) for piece in own for name in parameter_names(model, piece)}
    read = {
        name
        for recording in recordings
        for layer, call in owners.readers(recording)
        if layer in layers
        for name in call.parameters
    }
    return tuple(sorted(name for name in read if id(model.get_parameter(name)) not in held))


def state_of(held: Holdings, plan: Plan, stage: int, replicas: dist.ProcessGroup | None) -> StageState:
    """Of a stage: of the parameters that it holds alone, and of those that it is the first on its rank to share."""
    optimizer, parts = plan.scenario.optimizer, dict[StageState, Sequence[Parameter]]()

    def add(
        layers: Mapping[str, list[Parameter]],
        sharding: Sharding,
        ranks: dist.ProcessGroup | None,
        messages: Messages | None = None,
    ) -> None:
        # Under ZeRO-1 weights lie one behind the other in one buffer.
        for own in by_type(layers) if sharding == "optimizer" else [layers]:
            parts[stage_state(own, optimizer, sharding, ranks, messages)] = each_once(own)

    add(held.alone(stage), plan.sharding, replicas, held.messages)
    if held.experts is not None and any((experts := held.of_experts(stage)).values()):
        add(experts, plan.sharding, held.experts.ranks.replicas)
    if held.dealt is not None and any((dealt := held.of_dealt(stage)).values()):
        add(dealt, plan.sharding, held.dealt.ranks)
    for tie in held.ties:
        if copies_of(held, plan, stage, tie):
            layers, sharding = held.of_tie(plan, stage, tie)
            add(layers, sharding, replicas)
    return next(iter(parts)) if len(parts) == 1 else JointState(parts)


def copies_of(held: Holdings, plan: Plan, stage: int, tie: Tie) -> list[Parameter]:
    """Parameters of the tie whose state the stage keeps."""
    return [held.model.get_parameter(name) for name in tie.names] if stage in tie.leading(plan) else []


def places_of(held: Holdings, plan: Plan, stage: int, index: int) -> dict[Parameter, Place]:
    """Of tied parameters the first name counts. Args: index: among the tp ranks."""
    names = {id(parameter): name for name, parameter in held.model.named_parameters()}
    places = {
        p: held.cuts[names[id(p)]].place(names[id(p)], p, index)
        if names[id(p)] in held.cuts
        else whole_place(names[id(p)], p)
        for p in each_once(held.alone(stage))
    }
    if held.experts is not None:
        places |= {p: held.experts.place(names[id(p)], p) for p in each_once(held.of_experts(stage))}
    if held.dealt is not None:
        writes = held.dealt.ranks is None or held.dealt.ranks.rank() == 0
        dealt = {p: whole_place(names[id(p)], p) for p in each_once(held.of_dealt(stage))}
        places |= {p: replace(place, writes=writes) for p, place in dealt.items()}
    for tie in held.ties:
        for parameter in copies_of(held, plan, stage, tie):
            place = whole_place(names[id(parameter)], parameter)
            places[parameter] = copy_place(place, tie, first=stage == tie.stages[0])
    return places


def tie_sums(held: Holdings, plan: Plan) -> tuple[TiedSum, ...]:
    """What ranks hand to the sums over stages."""
    width, found = DTYPE_BYTES[plan.scenario.optimizer.gradient_dtype], []
    for tie in held.ties:
        count = sum(held.model.get_parameter(name).numel() for name in tie.names)
        holders = 1 if plan.sharding == "none" else plan.layout(tie.stages[0]).replicas
        share = math.ceil(count / holders)
        if tie.trained:
            found.append(TiedSum(stages=tie.stages, bytes=width * share if len(tie.leading(plan)) > 1 else 0))
    return tuple(found)


def held_bytes(held: Holdings, plan: Plan) -> tuple[SharedBytes, ...]:
    """What ranks hand to collectives by stage: gradients, and with ZeRO weights, in equal shares."""
    gradient = DTYPE_BYTES[plan.scenario.optimizer.gradient_dtype]
    to_train = {id(held.model.get_parameter(name)) for name in held.trained}

    def together(parameters: Sequence[Parameter], ranks: int, *, whole: bool) -> SharedBytes:
        counts = Counter[torch.dtype]()
        for parameter in parameters:
            counts[parameter.dtype] += parameter.numel() if id(parameter) in to_train else 0
        if ranks == 1 or whole:
            return SharedBytes(reduce=0 if ranks == 1 else gradient * counts.total())
        padded = {dtype: math.ceil(count / ranks) * ranks for dtype, count in counts.items()}
        return SharedBytes(
            reduce=gradient * sum(padded.values()),
            update=sum(dtype.itemsize * count for dtype, count in padded.items()),
        )

    def on_ranks(stage: int, layers: Mapping[str, Sequence[Parameter]], ranks: int) -> SharedBytes:
        slots = held.slots[stage]
        if slots is None or ranks == 1:
            return together(each_once(layers), ranks, whole=plan.sharding == "none")
        return slot_bytes(slots, layers, to_train, plan.sharding, replicas=ranks, gradient_bytes=gradient)

    found = []
    for stage in range(len(plan.stages)):
        layers, layout = held.alone(stage), plan.layout(stage)
        replicas = layout.replicas
        if held.messages is not None and replicas > 1:
            counts = Counter[str]()
            for parameter, layer in owners_of(layers).items():
                counts[layer] += parameter.numel() if id(parameter) in to_train else 0
            parts = [SharedBytes(reduce=held.messages.sum_bytes(counts, gradient))]
        else:
            parts = [on_ranks(stage, layers, replicas)]
        if held.experts is not None:
            parts.append(on_ranks(stage, held.of_experts(stage), held.experts.replicas))
        if held.dealt is not None:
            parts.append(on_ranks(stage, held.of_dealt(stage), replicas * layout.tp))
        for tie in held.ties:
            copies, sharding = held.of_tie(plan, stage, tie)
            if sharding == plan.sharding:
                parts.append(on_ranks(stage, copies, replicas))
            else:
                parts.append(together(each_once(copies), replicas, whole=False))
        one = SharedBytes(*map(sum, zip(*parts, strict=True)))
        runs = plan.parts // layout.dp  # of a microbatch, part by part
        found.append(one._replace(forward=runs * one.forward, backward=runs * one.backward))
    return tuple(found)
