"""A block run alone on drawn numbers, to see whether ranks that share it in some way compute what one would."""

import copy
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mmplan.runtime.failure import described
from mmplan.runtime.ghost.half_meta import META, any_routing, half_meta
from mmplan.runtime.ghost.weightless import set_parameter

DEVIATION = 0.1  # of drawn weights
TOLERANCE = 1e-4  # of the largest element; fp32 sums in another order differ by some 1e-6, wrong splits by 0.1 and more
# Of the largest element: gradients below are rounding, as those of key biases, 6e-7 of it in CLIP ViT-L (577 rows).
SMALLEST_SCALE = 0.02

Results = list[tuple[str, Tensor]]


class DrawsNumbersError(Exception):
    """A block draws random numbers."""


def settings(block: nn.Module) -> Any:
    """What modules of one form may differ in: the kinds of modules inside, and their numbers but for their place."""
    return repr(block), tuple(
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str) and not key.endswith("idx")
    )


def drawn_block(block: nn.Module, device: torch.device, own: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A copy of the block with drawn weights. Args: own: what of a parameter this rank has."""
    made = copy.deepcopy(block)
    for name, parameter in list(made.named_parameters()):
        value = drawn(name, parameter.shape, device) * DEVIATION
        set_parameter(made, name, nn.Parameter(own(name, value + 1.0 if parameter.dim() < 2 else value)))
    return made if device == META else made.to(device)  # buffers keep their values


def run_drawn(
    block: nn.Module,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
    device: torch.device,
    weight: Callable[[str, Tensor], Tensor] | None = None,
    seed: str = "",
) -> Results | str:
    """Outputs, gradients of arguments and of parameters, each with a name; or why there are none.

    Args:
        block: whose parameters those are.
        forward: of it.
        args, kwargs: as a recording has them.
        seed: of drawn arguments.
        weight: what an output counts in the sum whose gradients are taken; None: drawn numbers.

    Raises:
        DrawsNumbersError: the forward does.
    """
    if device == META:
        with half_meta(), any_routing():
            return _run_drawn(block, forward, args, kwargs, device, weight, seed)
    return _run_drawn(block, forward, args, kwargs, device, weight, seed)


def _run_drawn(
    block: nn.Module,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
    device: torch.device,
    weight: Callable[[str, Tensor], Tensor] | None,
    seed: str,
) -> Results | str:
    leaves, spec = tree_flatten((args, kwargs))
    given = [drawn_like(f"argument {i}{seed}", leaf, device) for i, leaf in enumerate(leaves)]
    args, kwargs = tree_unflatten([leaf.clone() if is_float(leaf) else leaf for leaf in given], spec)
    state = torch.random.get_rng_state()
    wanted = {f"argument {i}": leaf for i, leaf in enumerate(given) if is_float(leaf) and leaf.requires_grad}
    wanted |= dict(block.named_parameters())
    weight = weight or (lambda name, leaf: drawn(name, leaf.shape, device))
    try:
        results = [leaf for leaf in tree_leaves(forward(*args, **kwargs)) if is_float(leaf) and leaf.requires_grad]
        outputs = {f"output {i}": leaf for i, leaf in enumerate(results)}
        weighted = [(leaf * weight(name, leaf)).sum() for name, leaf in outputs.items()]
        gradients = torch.autograd.grad(
            torch.stack(weighted).sum(), [*wanted.values()], allow_unused=True, materialize_grads=True
        )
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return described(error)
    if not torch.equal(state, torch.random.get_rng_state()):
        raise DrawsNumbersError
    return [(name, leaf.detach()) for name, leaf in outputs.items()] + [*zip(wanted, gradients, strict=True)]


def fresh(value: Any) -> Any:
    """A copy of what a block may write into: a cache of keys and values."""
    plain = value is None or isinstance(value, bool | int | float | str | torch.dtype | Tensor | nn.Module)
    return value if plain else copy.deepcopy(value)


def first_difference(expected: Results, found: Results) -> str | None:
    """What a block gives else; without storage, of shapes alone. Gradients that are zero but for rounding count by a
    part of the largest."""
    real = [value for _, value in expected if value.device != META and value.numel()]
    least = max((float(value.abs().max()) for value in real), default=0.0) * SMALLEST_SCALE
    for (name, value), (_, other) in zip(expected, found, strict=True):
        if value.shape != other.shape:
            return f"{name} has the shape {tuple(other.shape)} instead of {tuple(value.shape)}"
        if value.device == META or not value.numel():
            continue
        if not float((other - value).abs().max()) <= TOLERANCE * max(least, float(value.abs().max())):
            return f"{name} differs when it is split"
    return None


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def drawn(name: str, shape: Sequence[int], device: torch.device) -> Tensor:
    """Normal numbers, the same on all ranks; on meta a shape alone."""
    if device == META:
        return torch.empty(tuple(shape), device=META)
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=draw).to(device)


def drawn_like(name: str, value: Any, device: torch.device) -> Any:
    """An argument of a recording with values: those it has, or drawn ones that require a gradient."""
    if not isinstance(value, Tensor):
        return fresh(value)
    if value.device == META and value.is_floating_point():
        return drawn(name, value.shape, device).requires_grad_()
    if device == META:
        return value
    if value.device == META:
        return torch.zeros(value.shape, dtype=value.dtype, device=device)
    return value.to(device, torch.float32) if value.is_floating_point() else value.to(device)
