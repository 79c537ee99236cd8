"""Models without weights: built in moments whatever their size, given weights unit by unit where a rank needs them."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmplan.runtime.ghost.half_meta import META

INITIAL_DEVIATION = 0.02  # of weights that no file gives; the value of most published language models


def build_weightless(build: Callable[[], nn.Module]) -> nn.Module:
    """The module that `build` makes, its parameters without storage; its buffers are real, because no file has them."""
    with _Weightless(), _parameters_on_meta():
        return build()


class _Weightless(TorchFunctionMode):
    """`torch.empty`, which layers make their weights with, takes no memory."""

    def __torch_function__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        assert callable(func) and isinstance(args, tuple)
        options = dict(kwargs) if isinstance(kwargs, dict) else {}
        if func is torch.empty:
            options["device"] = META
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], nn.Parameter) and name.endswith("_") and not name.endswith("__"):
            _note_zero(args[0], name == "zero_" or (name == "fill_" and args[1:] == (0,)))
        return func(*args, **options)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters lose their storage when a module takes them."""
    register = nn.Module.register_parameter

    def without_storage(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device != META:
            zero = parameter.numel() > 0 and not parameter.any()
            parameter = nn.Parameter(torch.empty_like(parameter, device=META), parameter.requires_grad)
            _note_zero(parameter, zero)
        register(module, name, parameter)

    nn.Module.register_parameter = without_storage  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _note_zero(parameter: nn.Parameter, zero: bool) -> None:
    parameter.__dict__["starts_at_zero"] = zero


def starts_at_zero(parameter: Tensor) -> bool:
    """Whether the code that built the model has set it to zero, as that of adapters does, so that they add nothing."""
    return bool(parameter.__dict__.get("starts_at_zero", False))


def initial_value(name: str, like: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """A parameter's first value where no file gives it: a function of seed and name alone, the same on every rank.

    Matrices are drawn with a deviation of 0.02; vectors are ones, and zeros where their name ends with `bias`.
    """
    if like.ndim < 2:
        return (torch.zeros if name.endswith("bias") else torch.ones)(like.shape, dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return (torch.randn(like.shape, generator=generator) * INITIAL_DEVIATION).to(dtype)


def set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put a parameter in the place of that name."""
    owner, _, own_name = name.rpartition(".")
    setattr(model.get_submodule(owner), own_name, parameter)
