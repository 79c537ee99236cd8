"""Norms of gradients per modality and in total, the same whatever ranks hold them: equal to one process to 1e-6.

torch.nn.utils.get_total_norm adds squares in fp32 one after another: over 30 million elements on a CPU it is 4e-4 off.
Here squares of 4,096 elements are added in fp32 and their sums in fp64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mmplan.kernels.masked_norm import masked_squared_norm
from mmplan.runtime.norms import wide
from mmplan.runtime.numerics.collectives import Group, reduce_
from mmplan.runtime.numerics.sharing import HeldGradient, Sharing

_ROW = 4096  # error of an fp32 sum of so many squares: below 1e-6


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """0-dim tensors in fp64 on the model's device, the same on all ranks; 0 of a part without gradients."""

    total: Tensor
    of: dict[str, Tensor]


def gradient_norms(sharing: Sharing) -> GradientNorms:
    """The 2-norms of all gradients of each modality, of what is `shared`, and of the model; collective."""
    return norms_of(sharing, sharing.gradients())


def norms_of(sharing: Sharing, gradients: list[HeldGradient]) -> GradientNorms:
    own = {one.name: inner(one.values, one.values)[None] for one in gradients}
    squares = sharing.summed(own, gradients, 1)[:, 0]
    return GradientNorms(squares.sum().sqrt(), dict(zip(sharing.parts, squares.sqrt(), strict=True)))


def token_norms(gradient: Tensor, modality: Tensor, modalities: int, group: Group = None) -> Tensor:
    """Norm of the gradient at each modality's tokens: [modalities] in fp32, over the tokens of all ranks of the group.

    Args:
        gradient: [..., width], this rank's tokens.
        modality: [...], 0 to modalities - 1, anything else (padding) counts nowhere.
    """
    return reduce_(masked_squared_norm(gradient, modality, modalities), group).sqrt()


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Sum of products of two tensors of one shape, in fp64."""
    a, b = wide(a).reshape(-1), wide(b).reshape(-1)
    rows = len(a) // _ROW * _ROW
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for left, right in ((a[:rows].view(-1, _ROW), b[:rows].view(-1, _ROW)), (a[rows:][None], b[rows:][None])):
        if left.numel() and left.data_ptr() == right.data_ptr():
            total += torch.linalg.vector_norm(left, dim=1).double().square().sum()
        elif left.numel():
            total += (left * right).sum(1, dtype=torch.float64).sum()
    return total
