"""Whether a module computes each image of itself, so that ranks can take images in turn: run whole and on two parts.

The module has drawn weights, blocks of one form the same ones, so that a tower takes little more memory than a block.
Outputs of the parts, one behind the other, and the sums of their gradients have to be those of the whole.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mmplan.runtime.ghost.image_ways import Deal, ImageWay, deal_of
from mmplan.runtime.ghost.trials import DEVIATION, Results, drawn, first_difference, run_drawn
from mmplan.runtime.ghost.weightless import set_parameter

PARTS = 2


def differs(
    module: nn.Module, alike: Mapping[str, str], args: Any, kwargs: Any, way: ImageWay, device: torch.device
) -> str | None:
    """Why the images of a call do not lie so; None: they do.

    Args:
        module: without weights.
        alike: names of its parameters that have the values of another one.

    Raises:
        DrawsNumbersError: its forward does.
    """
    try:
        deals = [deal_of(way, tree_leaves((args, kwargs)), part, PARTS) for part in range(PARTS)]
    except ValueError as error:
        return str(error)
    block = _with_drawn_weights(module, alike, device)
    whole = run_drawn(block, _chosen(block, way), args, kwargs, device)
    if isinstance(whole, str):
        return f"it fails alone: {whole}"
    parts = list[Results]()
    for part, deal in enumerate(deals):
        weight = _weights(whole, way, deal, part, device)
        found = run_drawn(block, _dealt(_chosen(block, way), deal), args, kwargs, device, weight)
        if isinstance(found, str):
            return f"it fails on some of the images: {found}"
        parts.append(found)
    if any(len(part) != len(whole) for part in parts):
        return "some of the images give other outputs"
    joined = [
        (name, torch.cat(values) if name.startswith("output") else torch.stack(values).sum(0))
        for (name, _), values in zip(whole, zip(*([v for _, v in p] for p in parts), strict=True), strict=True)
        if name.startswith("output") or len({value.shape for value in values}) == 1
    ]
    return first_difference(whole, joined)


def _with_drawn_weights(module: nn.Module, alike: Mapping[str, str], device: torch.device) -> nn.Module:
    made = copy.deepcopy(module)
    values: dict[str, nn.Parameter] = {}
    for name, parameter in list(made.named_parameters()):
        first = alike.get(name, name)
        if first not in values:
            value = drawn(first, parameter.shape, device) * DEVIATION
            values[first] = nn.Parameter(value + 1.0 if parameter.dim() < 2 else value)
        set_parameter(made, name, values[first])
    return made.to(device)


def _chosen(module: nn.Module, way: ImageWay) -> Callable[..., list[Any]]:
    """A forward that returns what has rows of images alone."""

    def run(*args: Any, **kwargs: Any) -> list[Any]:
        leaves = tree_leaves(module(*args, **kwargs))
        return [leaves[slot] for slot in way.outputs]

    return run


def _dealt(forward: Callable[..., Any], deal: Deal) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        own_args, own_kwargs = tree_unflatten(deal.own(leaves), spec)
        return forward(*own_args, **own_kwargs)

    return run


def _weights(
    whole: Results, way: ImageWay, deal: Deal, part: int, device: torch.device
) -> Callable[[str, Tensor], Tensor]:
    """What the rows of a part count where the whole has all."""
    counts: Sequence[tuple[int, ...]] = [deal.counts[slot] for slot in way.outputs if slot in deal.counts]
    shapes = {name: value.shape for name, value in whole if name.startswith("output")}

    def weight(name: str, leaf: Tensor) -> Tensor:
        value = drawn(name, shapes[name], device)
        fitting = [sum(rows[:part]) for rows in counts if sum(rows) == value.shape[0] and rows[part] == leaf.shape[0]]
        first = fitting[0] if fitting else 0
        return value[first : first + leaf.shape[0]]

    return weight
