"""Which module inside a block has the experts, and what it takes, read off one forward without weights.

Three forms are known by structure. A module whose own parameters hold all experts, one behind the other along their
first dim, is called with rows, the experts chosen for each and their weights ("chosen"), or with all rows once for
every expert, zeros for those not chosen ("every"). Or there is a list of alike modules, which the module around it
calls each on its rows ("listed"). Whether it is what it seems a trial tells (`expert_trials.py`).
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mmplan.runtime.ghost.half_meta import any_routing, half_meta
from mmplan.runtime.ghost.linear_flow import LinearFlow
from mmplan.runtime.ghost.recording import replaced_forwards
from mmplan.runtime.ghost.trials import fresh


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The experts of a block.

    Attributes:
        module: name within the block of the module that is called with the tokens.
        members: names of the experts within the block where they are modules of their own.
        parameters: names within the block of those of all experts.
        count: of experts; width: of a row.
        rows, chosen, weights: places of these among the leaves of the module's arguments.
        topk: experts of a token; 0: a trial tells.
        weight_bytes: of an element of the weights.
        made_of, weights_made_of: names of parameters within the block, and places among the leaves of its arguments,
            that rows and weights are made of.
        output: leaf of the block's result with a row for each token; tokens: in that recorded call.
    """

    form: Literal["chosen", "every", "listed"]
    module: str
    members: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    count: int
    width: int
    rows: int = 0
    chosen: int = 0
    weights: int = 0
    topk: int = 0
    weight_bytes: int = 0
    made_of: frozenset[str | int]
    weights_made_of: frozenset[str | int] = frozenset()
    output: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of a watched module, and what each leaf is made of."""

    leaves: Sequence[Any]
    made_of: Sequence[frozenset[str | int]]


def find_experts(block: nn.Module, args: Any, kwargs: Any, count: int) -> Experts | str:
    """The `count` experts of a block, or why they are not understood. Args: args, kwargs: as a recording has them."""
    stacked = {name: part for name, part in block.named_modules() if _stacks(part, count)}
    lists = {name: part for name, part in block.named_modules() if _lists(part, count)}
    found = [*stacked, *lists]
    if not found:
        return f"no module has {count} experts along the first dim of its parameters, or as a list of alike modules"
    if len(found) > 1:
        return f"several modules have {count} experts each: {' and '.join(found[:2])}"
    (name,) = found
    members = tuple(f"{name}.{key}" if name else key for key, _ in block.get_submodule(name).named_children())
    targets = stacked if stacked else {member: block.get_submodule(member) for member in members}
    calls, result = _watched(block, args, kwargs, targets)
    if not calls:
        return f"'{name}' has them and is not called"
    experts = _stacked(name, stacked[name], calls, count) if stacked else _listed(block, name, members, calls)
    return experts if isinstance(experts, str) else _with_output(block, experts, calls[0], result)


def place_of_code(module: nn.Module) -> str:
    """`file:line` of a module's forward, its class where that has no code in Python."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return type(module).__qualname__ if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _stacks(module: nn.Module, count: int) -> bool:
    own = [*module.parameters(recurse=False)]
    return any(p.dim() == 3 for p in own) and all(p.dim() > 0 and p.shape[0] == count for p in own)


def _lists(module: nn.Module, count: int) -> bool:
    forms = {
        (type(member), tuple((key, p.shape) for key, p in member.named_parameters())) for member in module.children()
    }
    alike = len(forms) == 1 and all(next(member.parameters(), None) is not None for member in module.children())
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and len(module) == count and alike


def _watched(
    block: nn.Module, args: Any, kwargs: Any, targets: Mapping[str, nn.Module]
) -> tuple[list[_Call], Sequence[Any]]:
    """Calls of these modules in one forward, and the leaves of its result."""
    args, kwargs = tree_map(fresh, (args, kwargs))
    flow, calls = LinearFlow(block, {}, tree_leaves((args, kwargs))), list[_Call]()

    def watched(_: str, forward: Any) -> Any:
        def called(*inner: Any, **named: Any) -> Any:
            leaves = tree_leaves((inner, named))
            calls.append(_Call(leaves, [flow.used(leaf) for leaf in leaves]))
            return forward(*inner, **named)

        return called

    with replaced_forwards(targets, watched), torch.no_grad(), half_meta(), any_routing(), flow:
        result = block(*args, **kwargs)
    return calls, tree_leaves(result)


def _stacked(name: str, module: nn.Module, calls: Sequence[_Call], count: int) -> Experts | str:
    if len(calls) > 1:
        return f"'{name}' is called {len(calls)} times"
    leaves, made_of = calls[0].leaves, calls[0].made_of
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    numbers = [place for place in tensors if not leaves[place].is_floating_point()]
    floats = [place for place in tensors if leaves[place].is_floating_point()]
    if len(floats) == 1 and not numbers:
        (rows,) = floats
        width = leaves[rows].shape[-1]
        if leaves[rows].numel() // width % count:
            return f"'{name}' gets {leaves[rows].numel() // width} rows for {count} experts"
        return Experts(form="every", module=name, count=count, width=width, rows=rows, made_of=made_of[rows])
    if len(floats) != 2 or len(numbers) != 1 or leaves[numbers[0]].dim() != 2:
        return f"'{name}' is not called with rows, chosen experts and weights, or with a row for every expert"
    (chosen,) = numbers
    tokens, topk = leaves[chosen].shape
    weights = [place for place in floats if leaves[place].shape in ((tokens, topk), (tokens, count))]
    if not weights:
        return f"'{name}' is called with no weight for each of the chosen experts"
    rows = next(place for place in floats if place != weights[-1])
    if leaves[rows].numel() != tokens * leaves[rows].shape[-1]:
        return f"'{name}' is called with other rows than the {tokens} that experts are chosen for"
    return Experts(
        form="chosen",
        module=name,
        count=count,
        width=leaves[rows].shape[-1],
        rows=rows,
        chosen=chosen,
        weights=weights[-1],
        topk=topk,
        weight_bytes=leaves[weights[-1]].element_size(),
        made_of=made_of[rows],
        weights_made_of=made_of[weights[-1]],
    )


def _listed(block: nn.Module, name: str, members: tuple[str, ...], calls: Sequence[_Call]) -> Experts | str:
    """The module that calls them is the one around the list, or the list itself where it has a forward of its own."""
    if any(sum(isinstance(leaf, Tensor) for leaf in call.leaves) != 1 for call in calls):
        return f"the experts in '{name}' are called with more than their rows"
    own = type(block.get_submodule(name)).forward is not nn.Module.forward
    (rows,) = (leaf for leaf in calls[0].leaves if isinstance(leaf, Tensor))
    return Experts(
        form="listed",
        module=name if own else name.rpartition(".")[0],
        members=members,
        count=len(members),
        width=rows.shape[-1],
        made_of=frozenset[str | int]().union(*(one for call in calls for one in call.made_of)),
    )


def _parameters(block: nn.Module, experts: Experts) -> tuple[str, ...]:
    own = [(name, True) for name in experts.members] or [(experts.module, False)]
    return tuple(
        f"{name}.{key}" if name else key
        for name, inside in own
        for key, _ in block.get_submodule(name).named_parameters(recurse=inside)
    )


def _with_output(block: nn.Module, experts: Experts, call: _Call, result: Sequence[Any]) -> Experts | str:
    """With the leaf of the block's result that has a row for each token."""
    for place, leaf in enumerate(result):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() and leaf.shape[-1] == experts.width:
            tokens = leaf.numel() // experts.width
            seen = call.leaves[experts.rows].numel() // experts.width if experts.form != "listed" else tokens
            if seen == tokens * (experts.count if experts.form == "every" else 1):
                return replace(experts, output=place, tokens=tokens, parameters=_parameters(block, experts))
    return f"'{experts.module}' gets other rows than the block gives"
