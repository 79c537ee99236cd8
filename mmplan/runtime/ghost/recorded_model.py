"""A model of one's own as the planner sees it: layers, what they cost and what passes between them, from recordings.

Layers are the units of `units.py`, and what glue does before a unit is called counts as its work. Units that feed each
other in a circle are one layer; units that no loss depends on are none, because no stage computes them.
"""

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Literal

import networkx as nx
from torch import nn

from mmplan.runtime.ghost.alignment import own_parameters, pieces_of, used_pieces
from mmplan.runtime.ghost.counting import Count
from mmplan.runtime.ghost.flow import Source
from mmplan.runtime.ghost.recording import Recording
from mmplan.runtime.ghost.shared_blocks import SharedBlock
from mmplan.runtime.ghost.summed_counts import SummedCounts
from mmplan.scenario.recorded import Recorded, RecordedKind, RecordedLayer, RecordedRead
from mmplan.scenario.scenario import Modality, Model, ModelModule, Training
from mmplan.scenario.schema_recorded import modules_of

LOSS = "loss"
MODALITIES: tuple[tuple[Modality, re.Pattern[str]], ...] = (
    ("vision", re.compile(r"vision|visual|image|video|pixel|vit\b|cnn|patch", re.IGNORECASE)),
    ("audio", re.compile(r"audio|sound|speech|mel\b|wave|acoustic", re.IGNORECASE)),
)


def model_from_recordings(
    name: str,
    model: nn.Module,
    recordings: Sequence[Recording],
    samples: int,
    modalities: Mapping[str, Modality],
    shared: Mapping[int, Mapping[str, SharedBlock]] | None = None,
) -> Model:
    """The model of a scenario.

    Args:
        samples: that all recordings together have.
        modalities: of modules by the beginnings of their names; of others their names decide.
        shared: by the degree of tensor parallelism, units of which a rank has a part, as they were counted.
    """
    shared = {} if shared is None else shared
    pieces = pieces_of(model, recordings)
    sizes = own_parameters(pieces)[0]
    used = used_pieces(recordings)
    units = [piece for piece in pieces if piece in used and any(piece == c.unit for r in recordings for c in r.calls)]
    groups = _in_order(units, recordings)
    modules = module_names(model, units)
    ids = _ids([group[0] for group in groups], modules)
    layer_of = {unit: layer for group, layer in zip(groups, ids, strict=True) for unit in group}
    end = f"{ids[-1].rpartition('.')[0]}.{LOSS}"
    layer_of |= _readers(model, pieces, recordings, used, layer_of, end)
    sums = _sums(recordings, layer_of, end, [*shared])
    kinds: dict[RecordedKind, str] = {}
    layers = []
    for layer in (*ids, end):
        own = tuple(piece for piece in pieces if layer_of.get(piece) == layer)
        parameters = {id(parameter): parameter for piece in own if sizes[piece] for parameter in pieces[piece]}
        kind = sums[layer].kind(
            parameters=sum(sizes[piece] for piece in own),
            trained=sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad),
            away={tp: _away(model, own, blocks) for tp, blocks in shared.items()},
        )
        reads = tuple(RecordedRead(layer=source, numbers=count) for source, count in sums[layer].reads.items())
        layers.append(
            RecordedLayer(
                id=layer,
                kind=kinds.setdefault(kind, layer),
                pieces=own,
                reads=reads,
                block=len(own) == 1 and _in_list(model, own[0]),
            )
        )
    recorded = Recorded(
        samples=samples, kinds=tuple((name, kind) for kind, name in kinds.items()), layers=tuple(layers)
    )
    return Model(name=name, modules=_modules(recorded, modalities), edges=(), recorded=recorded)


def module_names(model: nn.Module, units: Sequence[str]) -> dict[str, str]:
    """Unit -> module of the plan. A part of the model that holds several towers is taken apart, others are one."""
    paths: dict[str, str] = {}
    for unit in units:
        parts = unit.split(".")
        depth = 1
        while depth < len(parts) and _towers(model.get_submodule(".".join(parts[:depth]))) > 1:
            depth += 1
        paths[unit] = ".".join(parts[:depth])
    short: dict[str, str] = {}
    for path in dict.fromkeys(paths.values()):
        parts = [re.sub(r"[^A-Za-z0-9_-]", "_", part) for part in path.split(".")]
        tails = ("_".join(parts[first:]) for first in range(len(parts) - 1, -1, -1))
        free = (tail for tail in tails if tail[0].isalpha() and tail not in short.values())
        short[path] = next(free, f"module_{len(short)}")[:60]
    return {unit: short[path] for unit, path in paths.items()}


def _towers(module: nn.Module) -> int:
    """Children of the module that have blocks."""
    if isinstance(module, nn.ModuleList) or any(isinstance(child, nn.ModuleList) for child in module.children()):
        return 1
    return sum(any(isinstance(part, nn.ModuleList) for part in child.modules()) for child in module.children())


def _in_list(model: nn.Module, unit: str) -> bool:
    return isinstance(model.get_submodule(unit.rpartition(".")[0]), nn.ModuleList)


def _in_order(units: Sequence[str], recordings: Sequence[Recording]) -> list[list[str]]:
    """Units behind all that they read, in the order of their use; those that read each other stand together."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(units)
    graph.add_edges_from(
        (source.unit, call.unit) for r in recordings for call in r.calls if call.unit in graph for source in call.reads
    )
    position = {unit: index for index, unit in enumerate(units)}
    whole = nx.condensation(graph)
    members = {node: sorted(whole.nodes[node]["members"], key=position.__getitem__) for node in whole}
    order = nx.lexicographical_topological_sort(whole, key=lambda node: position[members[node][0]])
    return [members[node] for node in order]


def _ids(firsts: Sequence[str], modules: Mapping[str, str]) -> list[str]:
    counts: dict[str, int] = {}
    ids = []
    for unit in firsts:
        module = modules[unit]
        ids.append(f"{module}.{counts.get(module, 0)}")
        counts[module] = counts.get(module, 0) + 1
    return ids


def _readers(
    model: nn.Module,
    pieces: Mapping[str, Sequence[nn.Parameter]],
    recordings: Sequence[Recording],
    used: set[str],
    layer_of: Mapping[str, str],
    end: str,
) -> dict[str, str]:
    """Parameters outside of units -> the first layer for which glue reads them."""
    found: dict[str, str] = {}
    for recording in recordings:
        for call in (*recording.calls, recording.loss):
            if call.unit in layer_of or call is recording.loss:
                for parameter in sorted(call.parameters & pieces.keys() & used):
                    found.setdefault(parameter, layer_of.get(call.unit, end))
    return found


def _away(model: nn.Module, pieces: Sequence[str], shared: Mapping[str, SharedBlock]) -> tuple[int, int]:
    """Parameters of some pieces that a rank has not, and trained ones."""
    total = trained = 0
    for piece in pieces:
        if piece in shared:
            for name, whole in model.get_submodule(piece).named_parameters():
                count = whole.numel() - shared[piece].block.get_parameter(name).numel()
                total, trained = total + count, trained + count * whole.requires_grad
    return total, trained


def _sums(
    recordings: Sequence[Recording], layer_of: Mapping[str, str], end: str, degrees: Sequence[int]
) -> dict[str, SummedCounts]:
    sums = {layer: SummedCounts() for layer in (*dict.fromkeys(layer_of.values()), end)}
    for recording in recordings:
        counts: dict[str, list[Count]] = {}
        read: dict[str, dict[Source, None]] = {}
        before: list[Count] = []  # glue in front of units that no loss depends on
        for call in (*recording.calls, recording.loss):
            layer = end if call is recording.loss else layer_of.get(call.unit)
            if layer is None:
                before += call.counts[1:]
                continue
            counts.setdefault(layer, []).extend((*before, *call.counts))
            before = []
            own = (source for source in sorted(call.reads) if layer_of.get(source.unit) not in (layer, None))
            read.setdefault(layer, {}).update(dict.fromkeys(own))
        for layer, of_layer in counts.items():
            sums[layer].add(of_layer, degrees)
        for layer, sources in read.items():
            for source in sources:
                reads, producer = sums[layer].reads, layer_of[source.unit]
                reads[producer] = reads.get(producer, 0) + recording.like(source).numel()
        for source in dict.fromkeys(source for sources in read.values() for source in sources):
            sums[layer_of[source.unit]].output += recording.like(source).numel()
    return sums


def _modules(recorded: Recorded, modalities: Mapping[str, Modality]) -> tuple[ModelModule, ...]:
    made: dict[str, Modality] = {}
    for name in dict.fromkeys(layer.module for layer in recorded.layers):
        own = [layer for layer in recorded.layers if layer.module == name]
        read = {read.layer.rpartition(".")[0] for layer in own for read in layer.reads} - {name}
        feeding = {made[other] for other in read if other in made} if all(layer.reads for layer in own) else set()
        made[name] = modality_of(own[0].pieces[0] if own[0].pieces else "", modalities, feeding)
    modules = modules_of(recorded, made)
    return tuple(replace(module, training=Training(mode=_mode(recorded, module))) for module in modules)


def _mode(recorded: Recorded, module: ModelModule) -> Literal["full", "frozen"]:
    kinds = [recorded.kind(layer.kind) for layer in recorded.layers if layer.module == module.name]
    return "frozen" if any(k.parameters for k in kinds) and not any(k.trained for k in kinds) else "full"


def modality_of(piece: str, modalities: Mapping[str, Modality], feeding: Set[Modality]) -> Modality:
    """As the job says of the longest beginning of the name, else by a word in it, else that of all that it reads."""
    said = [start for start in modalities if piece == start or piece.startswith(f"{start}.")]
    if said:
        return modalities[max(said, key=len)]
    other: Modality = next(iter(feeding)) if len(feeding) == 1 else "text"
    return next((modality for modality, word in MODALITIES if word.search(piece)), other)
