"""States of the generators that training may draw from (dropout, a job's own data), as tensors."""

import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

_TORCH, _CUDA, _PYTHON, _NUMPY = "random/torch", "random/cuda", "random/python", "random/numpy"


def random_states() -> dict[str, Tensor]:
    """Those of this process, by key in its file."""
    version, words, gauss = random.getstate()
    states = {_TORCH: torch.get_rng_state(), _PYTHON: _packed(version, words, gauss)}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states[_CUDA] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        import numpy as np

        _, keys, place, has_gauss, gauss = np.random.get_state()
        states[_NUMPY] = _packed(int(place), [int(key) for key in keys], float(gauss) if has_gauss else None)
    return states


def restore_random_states(file: Path) -> None:
    """Those in a rank's file become those of this process."""
    with safe_open(file, framework="pt") as opened:
        keys = (key for key in opened.keys() if key.startswith("random/"))  # noqa: SIM118 - it is no mapping
        found: Mapping[str, Tensor] = {key: opened.get_tensor(key) for key in keys}
    if _TORCH in found:
        torch.set_rng_state(found[_TORCH])
    if _CUDA in found and _on_cuda():
        torch.cuda.set_rng_state(found[_CUDA])
    if _PYTHON in found:
        version, words, gauss = _unpacked(found[_PYTHON])
        random.setstate((version, tuple(words), gauss))
    if _NUMPY in found:
        import numpy as np

        place, words, gauss = _unpacked(found[_NUMPY])
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), place, int(gauss is not None), gauss or 0.0))


def _on_cuda() -> bool:
    """Not where a process computes on the CPU of a machine with GPUs: to ask would take up memory of the first one."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized


def _packed(number: int, words: Any, gauss: float | None) -> Tensor:
    """A Mersenne twister's state; doubles hold its 32-bit words exactly, and NaN that no second normal is left."""
    return torch.tensor([number, *words, torch.nan if gauss is None else gauss], dtype=torch.float64)


def _unpacked(state: Tensor) -> tuple[int, list[int], float | None]:
    number, *words, gauss = state.tolist()
    return int(number), [int(word) for word in words], None if gauss != gauss else float(gauss)
