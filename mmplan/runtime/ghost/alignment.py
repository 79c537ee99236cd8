"""Which layer of the plan each piece of a real model belongs to: its units, and parameters that glue reads.

A plan speaks of layers (`vision.3`, `llm.head`), a model of its own modules. Both stand in the order of computation and
have parameters: pieces are laid in the order of their use onto the layers, module by module of the plan, so that every
layer gets exactly its number of parameters. What no loss depends on may be left out, as plans leave it out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from mmplan.cost_models.counts import parameters
from mmplan.cost_models.graph import ComputationGraph
from mmplan.errors import InputError
from mmplan.runtime.ghost.recording import Recording
from mmplan.runtime.ghost.units import find_units

MOST_DEAD_ENDS = 100_000  # of a search; those that ended well had some hundred

Sizes = tuple[tuple[str, int], ...]  # layers of a module with their parameters, in order


def align(graph: ComputationGraph, model: nn.Module, recordings: Sequence[Recording]) -> dict[str, str]:
    """Piece -> layer, in the order of use.

    Args:
        recordings: of batches that together use every module; one may lack what another has.

    Raises:
        InputError: the parameters of the model are not those of the plan's layers; names the first that differ.
    """
    pieces = pieces_of(model, recordings)
    sizes, tied = own_parameters(pieces)
    if any(layer.pieces for layer in graph.layers()):
        return _as_recorded(graph, pieces, sizes)
    used = used_pieces(recordings)
    modules: dict[str, Sizes] = {}
    for layer in graph.layers():
        if count := parameters(layer):
            modules[layer.module] = (*modules.get(layer.module, ()), (layer.id, count))
    search = _Search([(name, sizes[name], name in used) for name in pieces if name not in tied], [*modules.values()])
    found = search.solve()
    if found is None:
        unseen = [name for name in find_units(model) if name not in pieces]
        looked = f"no batch of the {len(recordings)} looked at uses"
        why = "".join(f"; {looked} '{name}' ({len(unseen)} such modules)" for name in unseen[:1])
        raise InputError(search.told() + why)
    heads = {layer.module: layer.id for layer in graph.layers() if layer.kind == "head"}
    shared = {name: found[owner].split(".")[0] for name, owner in tied.items() if owner in found}
    if lost := next((name for name, module in shared.items() if module not in heads), None):
        raise InputError(f"'{lost}' shares its parameters with '{tied[lost]}', and the plan has no head for it")
    return found | {name: heads[module] for name, module in shared.items()}


def _as_recorded(
    graph: ComputationGraph, pieces: Mapping[str, Sequence[nn.Parameter]], sizes: Mapping[str, int]
) -> dict[str, str]:
    """The pieces that the layers are said to be; InputError where the model has others, or of other sizes."""
    layer_of = {piece: layer.id for layer in graph.layers() for piece in layer.pieces}
    again = "`mmplan import job` records it anew"
    if lost := next((piece for piece in layer_of if piece not in pieces), None):
        raise InputError(f"the plan's model has '{lost}', which no batch of this job's model uses: {again}")
    for layer in graph.layers():
        has, wanted = sum(sizes[piece] for piece in layer.pieces), parameters(layer)
        if has != wanted:
            names = " and ".join(f"'{piece}'" for piece in layer.pieces)
            raise InputError(f"{names} have {has:,} parameters, {layer.id} of the plan has {wanted:,}: {again}")
    return {piece: layer_of[piece] for piece in pieces if piece in layer_of}


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


def pieces_of(model: nn.Module, recordings: Sequence[Recording]) -> dict[str, list[nn.Parameter]]:
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


def own_parameters(pieces: Mapping[str, list[nn.Parameter]]) -> tuple[dict[str, int], dict[str, str]]:
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


@dataclass(frozen=True, slots=True)
class _Row:
    """How far a module of the plan is filled.

    Plans keep what a tower stores besides its blocks in its first layer, wherever the model uses it: `owed` parameters
    of that layer are still to come when its blocks are at work already. They go to the layer that is at work then.
    """

    filled: int = 0
    owed: int = 0


_State = tuple[_Row, ...]
_Choice = tuple[_State, str | None]  # what is filled after a piece, and its layer; None: it is left out


class _Search:
    """Depth first over the pieces; how far each module's row of layers is filled is what is left to decide."""

    def __init__(self, pieces: Sequence[tuple[str, int, bool]], modules: Sequence[Sizes]) -> None:
        self._pieces, self._modules = pieces, modules
        self._ends = [list(accumulate(size for _, size in sizes)) for sizes in modules]
        self._unused = sum(size for _, size, used in pieces if not used)
        self._dead: set[tuple[int, _State]] = set()
        self._furthest = 0

    def solve(self) -> dict[str, str] | None:
        """Piece -> layer. Without recursion, because a model may have more pieces than Python has stack."""
        everything, wanted = sum(size for _, size, _ in self._pieces), sum(ends[-1] for ends in self._ends)
        if everything - self._unused > wanted or everything + self._unused < wanted:
            return None
        start = tuple(_Row() for _ in self._modules)
        path: list[tuple[_State, Iterator[_Choice], str | None]] = [(start, self._choices(0, start, None), None)]
        while path and len(self._dead) < MOST_DEAD_ENDS:
            state, choices, last = path[-1]
            at = len(path) - 1
            if at == len(self._pieces) and self._complete(state):
                layers = [layer for _, _, layer in path[1:]]
                return {name: la for (name, _, _), la in zip(self._pieces, layers, strict=True) if la is not None}
            chosen = next((choice for choice in choices if (at + 1, choice[0]) not in self._dead), None)
            if chosen is None:
                self._dead.add((at, state))
                path.pop()
                continue
            after, layer = chosen
            self._furthest = max(self._furthest, at + 1)
            path.append((after, self._choices(at + 1, after, layer or last), layer))
        return None

    def _complete(self, state: _State) -> bool:
        """Every layer is full; what is owed is no more than what no loss depends on."""
        full = all(row.filled == ends[-1] for row, ends in zip(state, self._ends, strict=True))
        return full and sum(row.owed for row in state) <= self._unused

    def _choices(self, at: int, state: _State, last: str | None) -> Iterator[_Choice]:
        """Layers that can take the next piece: those that it fills first, then those of the last piece's module, then
        leaving it out."""
        if at == len(self._pieces):
            return
        _, size, used = self._pieces[at]
        near = last.split(".")[0] if last is not None else ""
        order = sorted(range(len(state)), key=lambda index: self._modules[index][0][0].split(".")[0] != near)
        for early in (False, True):
            found = [(i, row, la) for i in order for row, la in self._fillings(i, state[i], size, early=early)]
            for index, row, layer in sorted(found, key=lambda each: each[1].filled not in self._ends[each[0]]):
                yield (*state[:index], row, *state[index + 1 :]), layer
        if not used:
            yield state, None

    def _fillings(self, index: int, row: _Row, size: int, *, early: bool) -> Iterator[tuple[_Row, str]]:
        """Ways to put `size` parameters into a module: into the layer at work; or `early`, into the second before the
        first is full, or as a part of what the first is owed."""
        sizes, ends = self._modules[index], self._ends[index]
        layer = next((i for i, end in enumerate(ends) if row.filled < end), None)
        if not early:
            if layer is not None and row.filled + size <= ends[layer]:
                yield _Row(row.filled + size, row.owed), sizes[layer][0]
            return
        if size <= row.owed:
            yield _Row(row.filled, row.owed - size), sizes[self._at_work(ends, row.filled)][0]
        if layer == 0 and len(ends) > 1 and ends[0] + size <= ends[1]:
            yield _Row(ends[0] + size, ends[0] - row.filled), sizes[1][0]

    @staticmethod
    def _at_work(ends: Sequence[int], filled: int) -> int:
        """The layer that the last parameters went into."""
        return next(i for i, end in enumerate(ends) if filled <= end)

    def told(self) -> str:
        has, wanted = sum(size for _, size, _ in self._pieces), sum(ends[-1] for ends in self._ends)
        name, size, _ = self._pieces[min(self._furthest, len(self._pieces) - 1)]
        return (
            f"the model's modules do not make up the layers of the plan: '{name}' with {size:,} parameters has no "
            f"place; the model's forward uses {has:,} parameters, the plan's layers have {wanted:,}"
        )
