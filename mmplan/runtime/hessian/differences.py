"""Is a second derivative the right one? Held against differences of first derivatives along the eigenvector found.

Autograd tells where an operator has no second derivative, but not where the one it has is wrong: a function of the
user's own whose backward takes what its forward has kept for a constant.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmplan.runtime.hessian.products import Curvature

_STEPS = (1e-2, 1e-3, 1e-4)  # as fractions of the norm of the weights: large ones bend, small ones drown in fp32


def difference(
    matrix: Curvature, parameters: Sequence[nn.Parameter], vector: Tensor, eigenvalue: float
) -> float | None:
    """By how much the slope of the gradient along a unit eigenvector differs from its eigenvalue, as a fraction of it.

    The smallest difference over some step sizes counts. None for an eigenvalue of zero. The weights are as before.
    """
    norm = float(torch.stack([parameter.detach().norm() for parameter in parameters]).norm())
    if not eigenvalue or not norm:
        return None
    kept = [parameter.detach().clone() for parameter in parameters]
    found = []
    try:
        for step in _STEPS:
            slopes = []
            for length in (step * norm, -step * norm):
                _move(parameters, kept, vector, length)
                slopes.append(float(matrix.gradient() @ vector))
            slope = (slopes[0] - slopes[1]) / (2 * step * norm)
            found.append(abs(slope - eigenvalue) / abs(eigenvalue))
    finally:
        _move(parameters, kept, vector, 0.0)
    return min(found)


def _move(parameters: Sequence[nn.Parameter], kept: Sequence[Tensor], vector: Tensor, length: float) -> None:
    parts = torch.split(vector, [parameter.numel() for parameter in parameters])
    for parameter, start, part in zip(parameters, kept, parts, strict=True):
        parameter.data = start + length * part.view_as(start)
