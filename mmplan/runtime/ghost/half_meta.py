"""A forward without weights: what is computed of integers alone is real, what is made of weights or pixels is a shape.

What multimodal models read from tensors (grids, masks, image positions) they compute of integers, so their own Python
runs to the end on tensors without memory, which plain meta tensors and fake tensors do not allow.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
import torch.fx.experimental._config
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map

META = torch.device("meta")
CPU = torch.device("cpu")
MOST_REAL_FLOATS = 1_000_000  # larger results (attention masks of long sequences) are of no use but for their shape


class _HalfMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, a result is real when it is computed of real tensors alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if tree_any(_is_shape_only, (args, kwargs)):
            return _shapes_only(func, args, kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = CPU
        return tree_map(_without_masses, func(*args, **kwargs))


class _RealConstants(TorchFunctionMode):
    """Tensors of Python numbers are real wherever they are asked for: torch itself would drop the numbers on meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
            kwargs["device"] = CPU
        return func(*args, **kwargs)


@contextmanager
def half_meta() -> Iterator[None]:
    """Forwards inside compute shapes, and values where they follow from integers alone."""
    enter_autocast = torch.autocast.__init__

    def on_some_device(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        enter_autocast(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)  # it knows no meta

    torch.autocast.__init__ = on_some_device  # type: ignore[method-assign]
    mode: AbstractContextManager[object] = _HalfMeta()  # type: ignore[no-untyped-call]
    try:
        with mode, _RealConstants():
            yield
    finally:
        torch.autocast.__init__ = enter_autocast  # type: ignore[method-assign]


@contextmanager
def any_routing() -> Iterator[None]:
    """Where shapes depend on values that are not known, as those of routed tokens do, they are the largest possible; a
    value that Python reads is 0.

    For the inside of a block, whose output has the shape of its input however its tokens were routed. Where that is not
    so, a run finds other numbers of bytes than its program says, and ends.
    """
    with torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
        yield


def _shapes_only(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    if name == "_local_scalar_dense" and torch.fx.experimental._config.meta_nonzero_assume_all_nonzero:
        return 0
    if name in ("index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put"):
        args = (args[0], _positions(args[1]), *args[2:])
    if name == "masked_select" and not _is_shape_only(args[1]):
        count = int(args[1].expand(np.broadcast_shapes(args[0].shape, args[1].shape)).sum())
        return args[0].new_empty(count, device=META)
    if name == "_grouped_mm" and args[0].ndim == 2 and args[1].ndim == 3:  # torch's own rule knows bf16 alone
        return args[0].new_empty((args[0].shape[0], args[1].shape[2]), device=META)
    if kwargs.get("device") is not None:
        kwargs["device"] = META
    return func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))


def _positions(indices: Any) -> list[Any]:
    """Masks whose values are known as the positions that they pick, of which there is a known number."""
    found: list[Any] = []
    for index in indices:
        known_mask = isinstance(index, Tensor) and index.dtype == torch.bool and not _is_shape_only(index)
        found += index.nonzero().unbind(1) if known_mask else [index]
    return found


def _is_shape_only(value: Any) -> bool:
    """Also weights that are shared out among replicas and not open now (`slots.py`)."""
    return isinstance(value, Tensor) and (
        value.device.type == "meta" or (value.numel() > 0 and value.untyped_storage().nbytes() == 0)
    )


def _to_meta(value: Any) -> Any:
    return torch.empty_like(value, device=META) if isinstance(value, Tensor) and value.device.type != "meta" else value


def _without_masses(value: Any) -> Any:
    return _to_meta(value) if _is_float(value) and value.numel() > MOST_REAL_FLOATS else value


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def as_input(value: Any) -> Any:
    """A tensor of a batch as such a forward takes it: floats lose their values."""
    return tree_map(lambda leaf: _to_meta(leaf) if _is_float(leaf) else leaf, value)
