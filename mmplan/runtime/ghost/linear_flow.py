"""Which linear layers inside a block feed which others, read off one forward without weights.

Two rows of linear layers of which the second reads nothing but the first (queries, keys and values before the output of
an attention; gate and up before down) can be split over ranks: the first by columns, the second by rows, with one sum
behind it (Megatron-LM, arXiv 1909.08053, section 3). Whether a split is right a trial tells (`splits.py`).
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from mmplan.runtime.ghost.half_meta import any_routing, half_meta
from mmplan.runtime.ghost.trials import fresh


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A tensor that layers split by columns read. `made_of`: names of parameters within the block, and positions among
    the leaves of its arguments."""

    readers: tuple[str, ...]
    made_of: frozenset[str | int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Names of linear layers within a block: those split by columns, and the one split by rows that alone reads them.

    between: other parameters that what is between is computed with, of which every rank has the whole; sections: of the
    columns of a layer that makes several things of one width (queries, keys and values); entries: what those split by
    columns read.
    """

    columns: tuple[str, ...]
    row: str
    between: tuple[str, ...]
    sections: int
    entries: tuple[Entry, ...]


def find_pairs(block: nn.Module, args: Any, kwargs: Any, degree: int, apart: Sequence[str] = ()) -> tuple[Pair, ...]:
    """Pairs that `degree` ranks can share, in the order of their use.

    Args:
        args, kwargs: as a recording has them.
        apart: modules inside the block whose layers are left out.
    """
    left_out = tuple(f"{name}." for name in apart)
    linears = {
        name: part
        for name, part in block.named_modules()
        if type(part) is nn.Linear and not f"{name}.".startswith(left_out)
    }
    args, kwargs = tree_map(fresh, (args, kwargs))
    flow = LinearFlow(block, linears, tree_leaves((args, kwargs)))
    with torch.no_grad(), half_meta(), any_routing(), flow:
        result = block(*args, **kwargs)
    left = flow.origins(result)  # reach the end of the block without another linear layer
    pairs: list[Pair] = []
    taken = set[str]()
    for row, columns in flow.reached.items():
        readers = {name: [other for other, read in flow.reached.items() if name in read] for name in columns}
        alone = all(found == [row] for found in readers.values()) and not columns & left
        once = not (flow.repeated & (columns | {row}))
        if not columns or columns & taken or not alone or not once:
            continue
        read, made = linears[row].in_features, [linears[name].out_features for name in columns]
        sections = made[0] // read if len(made) == 1 and made[0] % read == 0 else 1
        if any(width % (sections * degree) for width in made) or read % degree:
            continue
        taken |= columns | {row}
        between = sorted(name for name, read in flow.read_with.items() if read & columns)
        pairs.append(
            Pair(
                columns=tuple(sorted(columns)),
                row=row,
                between=tuple(between),
                sections=sections,
                entries=flow.entries(columns),
            )
        )
    return tuple(pairs)


class LinearFlow(TorchFunctionMode):
    """Follows outputs of linear layers up to the next ones."""

    def __init__(self, block: nn.Module, linears: Mapping[str, nn.Linear], arguments: Sequence[Any]) -> None:
        super().__init__()
        self.reached: dict[str, frozenset[str]] = {}  # linear layer -> those that its input is made of
        self.read_with: dict[str, frozenset[str]] = {}  # other parameter -> linear layers whose outputs it meets
        self._inputs: dict[str, Tensor] = {}  # of linear layers
        self.repeated: set[str] = set()
        self._with: dict[int, frozenset[str | int]] = {id(p): frozenset({n}) for n, p in block.named_parameters()}
        self._with |= {id(leaf): frozenset({i}) for i, leaf in enumerate(arguments) if isinstance(leaf, Tensor)}
        self._linear_of = {id(linear.weight): name for name, linear in linears.items()}
        own = {id(p) for linear in linears.values() for p in linear.parameters()}
        self._made_of: dict[int, frozenset[str]] = {}
        self._parameters: dict[int, frozenset[str]] = {
            id(p): frozenset({name}) for name, p in block.named_parameters() if id(p) not in own
        }
        self._alive: list[Any] = []  # an id is a tensor's own only while it lives

    def origins(self, values: Any) -> frozenset[str]:
        return frozenset[str]().union(*(self._made_of.get(id(leaf), frozenset()) for leaf in tree_leaves(values)))

    def entries(self, columns: Set[str]) -> tuple[Entry, ...]:
        """What these linear layers read, in the order of use."""
        found: dict[int, list[str]] = {}
        for name in self._inputs:
            if name in columns:
                found.setdefault(id(self._inputs[name]), []).append(name)
        return tuple(Entry(readers=tuple(names), made_of=self.used(self._inputs[names[0]])) for names in found.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        linear = self._linear_of.get(id(args[1])) if func is F.linear and len(args) > 1 else None
        read, result = self.origins((args, kwargs)), func(*args, **kwargs)
        used = self.used((args, kwargs))
        if linear is not None:
            self.repeated |= {linear} & self.reached.keys()
            self._inputs[linear] = args[0]
            self.reached[linear] = self.origins(args[0]) | self.reached.get(linear, frozenset())
            self._keep(result, frozenset({linear}), frozenset(), used)
            return result
        met = frozenset[str]().union(
            *(self._parameters.get(id(leaf), frozenset()) for leaf in tree_leaves((args, kwargs)))
        )
        for name in met if read else ():
            self.read_with[name] = self.read_with.get(name, frozenset()) | read
        name = getattr(func, "__name__", "")
        written = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")
        self._keep((result, args[0]) if written else result, read, frozenset() if read else met, used)
        return result

    def used(self, values: Any) -> frozenset[str | int]:
        """Parameters and arguments that some values are made of (`Entry.made_of`)."""
        return frozenset[str | int]().union(*(self._with.get(id(leaf), frozenset()) for leaf in tree_leaves(values)))

    def _keep(self, values: Any, read: frozenset[str], met: frozenset[str], used: frozenset[str | int]) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor) and (read or met or used):
                self._with[id(leaf)] = self._with.get(id(leaf), frozenset()) | used
                self._made_of[id(leaf)] = self._made_of.get(id(leaf), frozenset()) | read
                self._parameters[id(leaf)] = self._parameters.get(id(leaf), frozenset()) | met
                self._alive.append(leaf)
