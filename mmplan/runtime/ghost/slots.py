"""In which order replicas open the pieces of a stage of a real model that they share out by layer (ZeRO-2 and -3).

Collectives need one order on all replicas, whatever their microbatches hold: a unit is open while it is at work alone,
units that a microbatch leaves out are opened and closed in their turn. What has no turn of its own stays open through
the whole pass of the stage: parameters that glue reads, and units that are called twice or in changing order.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import nn
from torch.nn import Parameter

from mmplan.errors import InputError
from mmplan.planner.shared_bytes import SharedBytes
from mmplan.runtime.ghost.recording import Recording
from mmplan.runtime.ghost.units import parameter_names
from mmplan.scenario.technique import Sharding

ALWAYS = ""  # the first slot


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Of one stage.

    pieces: slot -> its pieces; turns: slots that are opened, in order; returning: those of them that have a backward.
    """

    pieces: Mapping[str, tuple[str, ...]]
    turns: tuple[str, ...]
    returning: frozenset[str]

    def parameters(self, model: nn.Module) -> dict[str, list[Parameter]]:
        """Slot -> parameters; what several share is with each of them."""
        return {
            slot: [model.get_parameter(name) for piece in pieces for name in parameter_names(model, piece)]
            for slot, pieces in self.pieces.items()
        }


def find_slots(
    model: nn.Module,
    pieces: Sequence[str],
    recordings: Sequence[Recording],
    *,
    computed: Set[str],
    returning: Set[str],
) -> Slots:
    """The slots of a stage.

    Args:
        pieces: of the stage, in the order of their use.
        recordings: the same on all replicas.
        computed: pieces that a loss depends on; others are never opened.
        returning: pieces that have a backward.
    """
    place = {piece: index for index, piece in enumerate(pieces)}
    glue = frozenset[str]().union(*(recording.glue for recording in recordings))
    always = {piece for piece in pieces if piece in glue or glue & set(parameter_names(model, piece))}
    for recording in recordings:
        latest = -1
        for call in recording.calls:
            if call.unit in place and call.unit in computed:
                always |= {call.unit} if place[call.unit] <= latest else set()
                latest = max(latest, place[call.unit])
    called = {call.unit for recording in recordings for call in recording.calls}
    always |= {piece for piece in pieces if piece in computed and piece not in called}
    always = _with_sharers(model, pieces, always)
    order = tuple(piece for piece in pieces if piece in computed and piece not in always)
    slots = {ALWAYS: tuple(piece for piece in pieces if piece in always)} if always else {}
    _require_one_type(model, slots.get(ALWAYS, ()))
    slots |= {piece: (piece,) for piece in pieces if piece not in always}
    turns = (*((ALWAYS,) if always else ()), *order)
    return Slots(pieces=slots, turns=turns, returning=frozenset(slot for slot in turns if returning & set(slots[slot])))


def _require_one_type(model: nn.Module, pieces: Sequence[str]) -> None:
    """Of what lies in one buffer.

    Raises:
        InputError: it has several.
    """
    first = {model.get_parameter(name).dtype: piece for piece in pieces for name in parameter_names(model, piece)}
    if len(first) > 1:
        raise InputError(
            f"precision: {' and '.join(first.values())} are read by glue or called twice, so that replicas share them "
            f"out together, and have {' and '.join(str(dtype) for dtype in first)}: set `constraints.sharding: [none, "
            "optimizer]` in the scenario and optimize again, or give their modules one precision"
        )


def _with_sharers(model: nn.Module, pieces: Sequence[str], chosen: Set[str]) -> set[str]:
    """And pieces that share a parameter with one of them."""
    ids = {piece: {id(model.get_parameter(name)) for name in parameter_names(model, piece)} for piece in pieces}
    found = set(chosen)
    held = {one for piece in found for one in ids[piece]}
    while more := {piece for piece in pieces if piece not in found and ids[piece] & held}:
        found |= more
        held |= {one for piece in more for one in ids[piece]}
    return found


def slot_bytes(
    slots: Slots,
    layers: Mapping[str, Sequence[Parameter]],
    to_train: Set[int],
    sharding: Sharding,
    *,
    replicas: int,
    gradient_bytes: int,
) -> SharedBytes:
    """What replicas hand to collectives for the stage, as `LayerShards` does it.

    Args:
        layers: slot -> parameters whose state they share.
        to_train: ids of parameters.
        gradient_bytes: of an element.
    """
    owner: dict[Parameter, str] = {}
    for slot, parameters in layers.items():
        for parameter in parameters:
            owner.setdefault(parameter, slot)

    def together(slot: str, *, wanted: bool) -> int:
        count = sum(p.numel() for p, at in owner.items() if at == slot and (id(p) in to_train) == wanted)
        return math.ceil(count / replicas) * replicas

    def weight_bytes(counts: Mapping[str, int], used: Iterable[str]) -> int:
        sizes = {at: p.element_size() for p, at in owner.items()}  # what lies in one buffer is of one type
        return sum(sizes.get(slot, 0) * counts[slot] for slot in used)

    def used(slot: str) -> list[str]:
        return list(dict.fromkeys(owner[parameter] for parameter in layers[slot]))

    opened = [one for slot in slots.turns for one in used(slot)]
    returning = [one for slot in slots.turns if slot in slots.returning for one in used(slot)]
    trained_of = {slot: together(slot, wanted=True) for slot in layers}
    scattered = gradient_bytes * sum(trained_of[slot] for slot in returning)
    if sharding == "gradients":
        return SharedBytes(backward=scattered, update=weight_bytes(trained_of, trained_of))
    held = {slot: trained_of[slot] + together(slot, wanted=False) for slot in layers}
    return SharedBytes(
        forward=weight_bytes(held, opened),
        backward=weight_bytes(held, returning) + scattered,
    )
