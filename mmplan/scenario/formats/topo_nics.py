"""The NICs of a node beside its GPUs: how many carry traffic, which GPU is near to which, and what is too few or far.

NICs that every row shows alike and that sit under one bridge are ports or virtual functions of one card: two are taken
as two ports, more as functions that share one port.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.scenario.catalogue import catalogue_link
from mmplan.scenario.document import counted
from mmplan.scenario.formats.topo_matrix import Matrix

_NEAR = ("PIX", "PXB", "PHB")
_PORTS_OF_A_CARD = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Nics:
    """`network` is what a scenario takes where the NICs give less than the device's usual network."""

    network: dict[str, object] | None = None
    read: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def nics_of(matrix: Matrix, usual_network: str | None) -> Nics:
    """What the NIC columns say; `usual_network` is the catalogue link of the node's device, where it is known."""
    gpus, nics = [gpu for gpu in matrix.gpus if gpu in matrix.cells], matrix.nics
    if not nics or not gpus:
        return Nics(read=("no NIC columns",) if not nics else ())
    cards = _cards(matrix, gpus)
    near = [card for card in cards if any(_link(matrix, gpu, card[0]) not in ("SYS", "SOC") for gpu in gpus)]
    used = near or cards  # where all are across sockets, these carry the traffic none the less
    ports = sum(len(card) if len(card) <= _PORTS_OF_A_CARD else 1 for card in used)
    read = [f"{counted(len(nics), 'NIC')}: {_affinity(matrix, gpus)}"]
    warnings = [
        f"{counted(len(card), 'NIC')} from {card[0]} to {card[-1]} are alike: functions of one card, counted as one"
        for card in used
        if len(card) > _PORTS_OF_A_CARD
    ]
    if len(gpus) < len(matrix.gpus):
        return Nics(read=tuple(read), warnings=(*warnings, "not all GPUs have a row: NICs are not compared with GPUs"))
    aside = len(nics) - sum(len(card) for card in used)
    if aside:
        read.append(f"{counted(aside, 'NIC')} on the far socket of every GPU not counted")
    far = [gpu for gpu in gpus if all(_link(matrix, gpu, nic) in ("SYS", "SOC") for nic in nics)]
    if far:
        warnings.append(f"{_listed(far)}: every NIC is across sockets (SYS): traffic to other nodes is slower there")
    network: dict[str, object] | None = None
    if ports < len(gpus):
        warnings.append(_too_few(ports, len(gpus), usual_network))
        if usual_network is not None and ports:
            link = catalogue_link(usual_network)
            source = f"{counted(ports, 'port')} of {usual_network} for {len(gpus)} GPUs"
            share = link.bytes_per_s * ports / len(gpus)
            network = {"link": usual_network, "bandwidth": f"{share / 1e9:.6g} GB/s", "source": source}
    return Nics(network=network, read=tuple(read), warnings=tuple(warnings))


def _link(matrix: Matrix, gpu: str, nic: str) -> str:
    return matrix.cells[gpu][nic]


def _cards(matrix: Matrix, gpus: Sequence[str]) -> list[list[str]]:
    """NICs that the rows of all GPUs show alike, joined by PIX where the NICs have rows of their own."""
    cards: list[list[str]] = []
    views = {nic: tuple(_link(matrix, gpu, nic) for gpu in gpus) for nic in matrix.nics}
    by_view: dict[tuple[str, ...], list[list[str]]] = {}
    for nic in matrix.nics:
        same = by_view.setdefault(views[nic], [])
        card = next((one for one in same if matrix.link(one[0], nic) == "PIX"), None)
        if card is None:
            card = []
            same.append(card)
            cards.append(card)
        card.append(nic)
    return cards


def _affinity(matrix: Matrix, gpus: Sequence[str]) -> str:
    """The NICs that are near to each GPU, GPUs with the same ones together."""
    near: dict[tuple[str, ...], list[str]] = {}
    for gpu in gpus:
        near.setdefault(tuple(nic for nic in matrix.nics if _link(matrix, gpu, nic) in _NEAR), []).append(gpu)
    if list(near) == [()]:
        return "none under a bridge of a GPU"
    told = [f"{_listed(group)} near {_listed(nics) if nics else 'none'}" for nics, group in near.items()]
    return "; ".join(told[:8]) + (f" and {len(told) - 8} more" if len(told) > 8 else "")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} ... {names[-1]} ({len(names)})"


def _too_few(ports: int, gpus: int, usual_network: str | None) -> str:
    said = f"{counted(ports, 'port')} on a GPU's side of the sockets for {gpus} GPUs: each has {ports}/{gpus} of a port"
    return said if usual_network is not None else f"{said}; write cluster.network with that share"
