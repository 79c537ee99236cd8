"""Models without weights: built in moments whatever their size, given weights unit by unit where a rank needs them."""

import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmplan.runtime.ghost.first_values import FirstValue, Journal, seeded
from mmplan.runtime.ghost.half_meta import META

INITIAL_DEVIATION = 0.02  # of weights that no file gives; the value of most published language models

_IS_META = vars(torch._C.TensorBase)["is_meta"].__get__


def build_weightless(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The module that `build` makes, its parameters without storage; its buffers are real, because no file has them.

    Args:
        seed: of what its code draws for buffers, and for parameters that it computes before a module takes them.
    """
    journal = Journal()
    with seeded(f"{seed}/build"), _Weightless(journal), journal, _parameters_on_meta(journal):
        model = build()
    for parameter in model.parameters():
        if parameter.device == META:
            parameter.__dict__["first_value"] = journal.first_value(parameter)
    return model


class _Weightless(TorchFunctionMode):
    """`torch.empty`, which layers make their weights with, takes no memory."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def __torch_function__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        assert callable(func) and isinstance(args, tuple)
        options = dict(kwargs) if isinstance(kwargs, dict) else {}
        if func is torch.empty:
            options["device"] = META
        if func == _IS_META and args[0].device == META:
            self._note_initialiser(sys._getframe(1))
        return func(*args, **options)

    def _note_initialiser(self, asking: FrameType) -> None:
        """Those of torch that read values ask whether there are any, and leave a tensor without as it is."""
        code = asking.f_code
        if asking.f_globals is vars(nn.init):
            arguments = {name: asking.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
            self._journal.note_call(vars(nn.init)[code.co_name], arguments)


@contextmanager
def _parameters_on_meta(journal: Journal) -> Iterator[None]:
    """Parameters lose their storage when a module takes them."""
    register = nn.Module.register_parameter

    def without_storage(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device != META:
            value = parameter
            parameter = nn.Parameter(torch.empty_like(value, device=META), value.requires_grad)
            journal.keep(parameter, value)
        register(module, name, parameter)

    nn.Module.register_parameter = without_storage  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def initial_value(name: str, like: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """A parameter's first value where no file gives it, the same on every rank: what the model's code sets it to.

    Where it does not, or not in a way that can be done again, matrices are drawn with a deviation of 0.02, of seed and
    name alone; vectors are ones, and zeros where their name ends with `bias`.
    """
    first = _first_value(like)
    if first is not None and first.is_set and first.is_known:
        return first.value(seed).to(dtype)
    if like.ndim < 2:
        return (torch.zeros if name.endswith("bias") else torch.ones)(like.shape, dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return (torch.randn(like.shape, generator=generator) * INITIAL_DEVIATION).to(dtype)


def lost_values(model: nn.Module) -> tuple[str, ...]:
    """Names of parameters that the code of a model without weights sets in a way that cannot be done again."""
    firsts = {name: _first_value(parameter) for name, parameter in model.named_parameters()}
    return tuple(name for name, first in firsts.items() if first is not None and first.is_set and not first.is_known)


def _first_value(parameter: Tensor) -> FirstValue | None:
    first = parameter.__dict__.get("first_value")
    assert first is None or isinstance(first, FirstValue)
    return first


def set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put a parameter in the place of that name."""
    owner, _, own_name = name.rpartition(".")
    setattr(model.get_submodule(owner), own_name, parameter)
