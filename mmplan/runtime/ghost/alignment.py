"""Which layer of the plan each piece of a real model belongs to: its units, and parameters that glue reads.

A plan speaks of layers (`vision.3`, `llm.head`), a model of its own modules. Both stand in the order of computation and
have parameters: pieces are laid in the order of their use onto the layers, module by module of the plan, so that every
layer gets exactly its number of parameters. What no loss depends on may be left out, as plans leave it out.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from mmplan.cost_models.counts import parameters
from mmplan.cost_models.graph import ComputationGraph
from mmplan.errors import InputError
from mmplan.runtime.ghost.recording import Recording

Sizes = tuple[tuple[str, int], ...]  # layers of a module with their parameters, in order


def align(graph: ComputationGraph, model: nn.Module, recordings: Sequence[Recording]) -> dict[str, str]:
    """Piece -> layer, in the order of use.

    Args:
        recordings: of batches that together use every module; one may lack what another has.

    Raises:
        InputError: the parameters of the model are not those of the plan's layers; names the first that differ.
    """
    pieces = _pieces(model, recordings)
    sizes, tied = _own_parameters(pieces)
    used = used_pieces(recordings)
    modules: dict[str, Sizes] = {}
    for layer in graph.layers():
        if count := parameters(layer):
            modules[layer.module] = (*modules.get(layer.module, ()), (layer.id, count))
    search = _Search([(name, sizes[name], name in used) for name in pieces if name not in tied], [*modules.values()])
    found = search.solve()
    if found is None:
        raise InputError(search.told())
    return found | {name: _tied_layer(found[owner], graph) for name, owner in tied.items() if owner in found}


def used_pieces(recordings: Sequence[Recording]) -> set[str]:
    """Pieces that some loss depends on."""
    used = set[str]()
    for recording in recordings:
        calls = {(call.unit, call.number): call for call in recording.calls}
        waiting, seen = [recording.loss], set[tuple[str, int]]()
        while waiting:
            call = waiting.pop()
            used |= {call.unit} | call.parameters
            for unit, number in {(source.unit, source.call) for source in call.reads} - seen:
                seen.add((unit, number))
                waiting.append(calls[unit, number])
    return used


def _pieces(model: nn.Module, recordings: Sequence[Recording]) -> dict[str, list[nn.Parameter]]:
    """Units that are called, and parameters outside of them before the first call that reads them."""
    units = dict.fromkeys(call.unit for recording in recordings for call in recording.calls)
    called = {unit: list(model.get_submodule(unit).parameters()) for unit in units}
    inside = {id(parameter) for own in called.values() for parameter in own}
    order: list[str] = []
    for recording in recordings:
        row = [
            piece
            for call in (*recording.calls, recording.loss)
            for piece in (*sorted(call.parameters), call.unit)
            if piece in called or (piece and id(model.get_parameter(piece)) not in inside)
        ]
        order = _merged(order, list(dict.fromkeys(row)))
    return {piece: called[piece] if piece in called else [model.get_parameter(piece)] for piece in order}


def _merged(order: list[str], row: list[str]) -> list[str]:
    """Both in one order: what only `row` has stands before the next that both have."""
    known, before, merged = set(order), dict[str, list[str]](), list[str]()
    pending: list[str] = []
    for piece in row:
        if piece in known:
            before[piece], pending = pending, []
        else:
            pending.append(piece)
    for piece in order:
        merged += [*before.get(piece, []), piece]
    return merged + pending


def _own_parameters(pieces: Mapping[str, list[nn.Parameter]]) -> tuple[dict[str, int], dict[str, str]]:
    """Parameters of each piece that no earlier one holds, and pieces that hold nothing else -> who holds theirs."""
    holder: dict[int, str] = {}
    sizes, tied = {}, {}
    for name, own in pieces.items():
        sizes[name] = sum(parameter.numel() for parameter in own if id(parameter) not in holder)
        if sizes[name] == 0:
            tied[name] = holder[id(own[0])]
        for parameter in own:
            holder.setdefault(id(parameter), name)
    return sizes, tied


def _tied_layer(owner: str, graph: ComputationGraph) -> str:
    """The head of the module whose token table is in `owner`."""
    module = graph.layer(owner).module
    return next(layer.id for layer in graph.layers() if layer.module == module and layer.kind == "head")


class _Search:
    """Depth first over the units; the place in each module's row of layers is what is left to decide."""

    def __init__(self, units: Sequence[tuple[str, int, bool]], modules: Sequence[Sizes]) -> None:
        self._units, self._modules = units, modules
        self._dead: set[tuple[int, tuple[int, ...]]] = set()
        self._furthest = 0
        # Parameters of a module up to the end of each of its layers.
        self._ends = [[sum(size for _, size in sizes[: i + 1]) for i in range(len(sizes))] for sizes in modules]

    def solve(self) -> dict[str, str] | None:
        """Iterative, because a model may have more units than Python has stack."""
        start = (0,) * len(self._modules)
        path: list[tuple[tuple[int, ...], list[tuple[tuple[int, ...], str | None]], str | None]] = []
        path.append((start, self._choices(0, start, None), None))
        while path:
            filled, choices, _ = path[-1]
            at = len(path) - 1
            if at == len(self._units) and all(f == ends[-1] for f, ends in zip(filled, self._ends, strict=True)):
                layers = [layer for _, _, layer in path[1:]]
                return {unit: la for (unit, _, _), la in zip(self._units, layers, strict=True) if la is not None}
            if not choices:
                self._dead.add((at, filled))
                path.pop()
                continue
            after, layer = choices.pop(0)
            if (at + 1, after) not in self._dead:
                self._furthest = max(self._furthest, at + 1)
                path.append((after, self._choices(at + 1, after, layer), layer))
        return None

    def _choices(self, at: int, filled: tuple[int, ...], last: str | None) -> list[tuple[tuple[int, ...], str | None]]:
        """Layers that can take the unit, that of the unit before first, then leaving it out."""
        if at >= len(self._units):
            return []
        _, size, used = self._units[at]
        found: list[tuple[tuple[int, ...], str | None]] = []
        for index, (sizes, ends) in enumerate(zip(self._modules, self._ends, strict=True)):
            layer = next((i for i, end in enumerate(ends) if filled[index] < end), None)
            if layer is not None and filled[index] + size <= ends[layer]:
                after = (*filled[:index], filled[index] + size, *filled[index + 1 :])
                found.append((after, sizes[layer][0]))
        found.sort(key=lambda choice: last is None or str(choice[1]).split(".")[0] != last.split(".")[0])
        return found if used else [*found, (filled, None)]

    def told(self) -> str:
        has, wanted = sum(size for _, size, _ in self._units), sum(ends[-1] for ends in self._ends)
        name, size, _ = self._units[min(self._furthest, len(self._units) - 1)]
        return (
            f"the model's units do not make up the layers of the plan: '{name}' with {size:,} parameters has no place; "
            f"the model's forward uses {has:,} parameters, the plan's layers have {wanted:,}"
        )
