"""Which path an operator takes: its Triton kernel on a GPU (or in Triton's interpreter), else its torch reference.

Triton exists on Linux only, so everything here imports without it: `jit` then leaves a kernel a plain function, which
`uses_triton` never lets be called. Kernels are `no_type_check`: Triton, not Python, gives their parameters types.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["interpreted", "jit", "launch", "persistent_programs", "tl", "triton", "uses_triton"]

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = SimpleNamespace(constexpr=int)  # what the signatures of kernels name


def jit(kernel: Callable[..., Any]) -> Any:
    """`triton.jit` where there is Triton."""
    return kernel if triton is None else triton.jit(kernel)


def interpreted() -> bool:
    """Whether TRITON_INTERPRET=1 was set before Triton was imported: kernels then run on CPU tensors, slowly."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def uses_triton(*tensors: torch.Tensor) -> bool:
    """The one place that chooses: a kernel if all tensors are on the same GPU, or on the CPU under the interpreter."""
    if triton is None or len({tensor.device for tensor in tensors}) != 1:
        return False
    return tensors[0].is_cuda or (tensors[0].device.type == "cpu" and interpreted())


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Starts a kernel on the device of its first argument, which need not be the current one."""
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        kernel[grid](*arguments, **options)


def persistent_programs(device: torch.device, tiles: int, per_multiprocessor: int = 4) -> int:
    """How many programs walk over so many tiles: some per multiprocessor of a GPU; three in the interpreter, whose
    tests so see programs with several tiles and with fewer."""
    if device.type != "cuda":
        return min(tiles, 3)
    return min(tiles, per_multiprocessor * torch.cuda.get_device_properties(device).multi_processor_count)
