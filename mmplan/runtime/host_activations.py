"""What a block keeps for its backward waits for it in host memory (vDNN, arXiv 1602.08124, section 3).

Copies are made where they are asked for, nothing runs beside them: a run is no quicker than its plan, and as lean.
"""

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True, slots=True)
class _Away:
    """A view of a storage whose bytes are on the host."""

    storage: Tensor
    device: torch.device
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]

    def back(self) -> Tensor:
        """The same view on its device."""
        whole = self.storage.to(self.device, copy=True).untyped_storage()
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(whole, self.offset, self.shape, self.strides)


@contextmanager
def kept_on_host(stays: Set[int]) -> Iterator[None]:
    """Tensors that autograd saves inside are copied to the host, a storage that several operators keep once, and come
    back for the backward; not those with storages at the addresses `stays` (weights, the raw batch)."""
    copies: dict[int, Tensor] = {}
    originals: list[Tensor] = []  # while they live no other storage gets their addresses

    def out(tensor: Tensor) -> Tensor | _Away:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in stays or not storage.nbytes():
            return tensor
        if address not in copies:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            copies[address] = torch.empty(whole.numel(), dtype=torch.uint8).copy_(whole)
            originals.append(tensor.detach())
        offset, shape, strides = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        return _Away(copies[address], tensor.device, tensor.dtype, offset, shape, strides)

    def back(kept: Tensor | _Away) -> Tensor:
        return kept.back() if isinstance(kept, _Away) else kept

    try:
        with saved_tensors_hooks(out, back):
            yield
    finally:
        copies.clear()
        originals.clear()
