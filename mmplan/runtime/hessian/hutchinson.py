"""The trace of a symmetric matrix that is known by its products alone: the mean of z' A z over vectors z of independent
signs (Hutchinson 1990)."""

import torch
from torch import Tensor

from mmplan.runtime.hessian.lanczos import Product


def trace(product: Product, size: int, probes: int, generator: torch.Generator, like: Tensor) -> float:
    """The mean over `probes` vectors of signs; exact in expectation, its variance twice the squares off the diagonal.

    Args:
        generator: on the CPU, so that all devices draw the same.
        like: has the device and type of vectors.
    """
    total = 0.0
    for _ in range(probes):
        signs = torch.randint(0, 2, (size,), generator=generator).to(like.device, like.dtype) * 2 - 1
        total += float(signs @ product(signs))
    return total / probes
