"""Both ends of the spectrum of a symmetric matrix that is known by its products alone (Lanczos 1950).

It is the largest eigenvalue with its sign that is iterated for: along its eigenvector a disturbance of the weights adds
most to the loss, while along that of a negative eigenvalue it takes away, however large that is in magnitude. Power
iteration tends to the largest magnitude, which for the Hessian of a network may be the most negative eigenvalue.

Every new vector is orthogonalised against all before, twice ("twice is enough", Parlett, The Symmetric Eigenvalue
Problem, section 6.9), because without that found eigenvalues come again and again. Residuals bound the error: within
`residual` of a Ritz value lies an eigenvalue (Parlett, section 4.5); the error is of the order of residual^2 over the
gap to the next eigenvalue.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]

BREAKDOWN = 1e-6  # of the largest eigenvalue: the rest of a vector in fp32 that lies in the space already


@dataclass(frozen=True, kw_only=True, slots=True)
class Spectrum:
    """The ends, in the units of the matrix.

    Attributes:
        largest: the largest eigenvalue, with its sign.
        least: the smallest, with its sign; the most negative one where there is one.
        residual: norm of `A x - largest x` of the unit vector found, an upper bound of the error of `largest`.
        least_residual: the same of `least`.
        iterations: products made.
        vector: the unit vector of `largest`.
        converged: `residual` is within the tolerance. The other end is told as far as it is known then.
    """

    largest: float
    least: float
    residual: float
    least_residual: float
    iterations: int
    vector: Tensor
    converged: bool

    @property
    def magnitude(self) -> float:
        """The eigenvalue of largest magnitude, with its sign."""
        return self.largest if self.largest >= -self.least else self.least


def lanczos(product: Product, start: Tensor, *, iterations: int, tolerance: float) -> Spectrum:
    """Iterate from `start` until the largest eigenvalue is known to `tolerance`, a fraction of it.

    Args:
        start: [n], not zero; best random, because what it is orthogonal to is never found.
        iterations: at most; at least 1.

    Raises:
        ArithmeticError: a product is not finite.
    """
    vector = start / start.norm()
    basis: list[Tensor] = []
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        basis.append(vector)
        image = product(vector)
        diagonal.append(float(image @ vector))
        for _ in range(2):
            for known in basis:
                image = image - (image @ known) * known
        rest = float(image.norm())
        if not math.isfinite(diagonal[-1] + rest):
            raise ArithmeticError("a product is no number")
        values, last, weights = _ritz(diagonal, beside)
        scale = max(abs(values[0]), abs(values[-1]))
        if rest <= BREAKDOWN * scale or len(basis) == len(start):  # the space is closed: what it has is exact
            rest = 0.0
        residual, least_residual = rest * last[-1], rest * last[0]
        converged = residual <= tolerance * abs(values[-1])
        if rest == 0.0 or converged or len(basis) >= iterations:
            return Spectrum(
                largest=values[-1],
                least=values[0],
                residual=residual,
                least_residual=least_residual,
                iterations=len(basis),
                vector=_combined(basis, weights),
                converged=converged,
            )
        beside.append(rest)
        vector = image / rest


def _ritz(diagonal: list[float], beside: list[float]) -> tuple[list[float], list[float], list[float]]:
    """Of the tridiagonal matrix: eigenvalues in order, the size of the last entry of each eigenvector, and the
    eigenvector of the largest."""
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if beside:
        off = torch.tensor(beside, dtype=torch.float64)
        matrix += torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(matrix)
    return values.tolist(), vectors[-1].abs().tolist(), vectors[:, -1].tolist()


def _combined(basis: list[Tensor], weights: list[float]) -> Tensor:
    total = torch.zeros_like(basis[0])
    for vector, weight in zip(basis, weights, strict=True):
        total += weight * vector
    return total
