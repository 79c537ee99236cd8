"""Eigenvalues of an independent package, curvlinops, which takes its products another way."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmplan.runtime.hessian.lanczos import lanczos
from mmplan.runtime.hessian.products import Curvature, targets_of
from mmplan.runtime.hessian.settings import ITERATIONS, TOLERANCE
from mmplan.runtime.hessian.subject import Outputs, Piece

pytestmark = pytest.mark.interop


def test_curvlinops_has_the_same_largest_eigenvalue() -> None:
    """An independent package, on a small attention model as it takes them: forward on inputs, loss on targets."""
    import curvlinops
    from scipy.sparse import linalg

    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
    model = nn.Sequential(nn.Linear(5, 8), block, nn.Flatten(), nn.Linear(24, 3))
    x, y = torch.randn(12, 3, 5), torch.randint(0, 3, (12,))
    parameters = list(block.parameters())

    def run() -> Outputs:
        return Outputs(losses={"loss": F.cross_entropy(model(x), y, reduction="sum")}, logits=None)

    piece = Piece(run=run, targets={"loss": 12.0}, modalities=frozenset({"text"}))
    matrix = Curvature([piece], targets_of([piece]), parameters)
    start = torch.randn(matrix.size, generator=torch.Generator().manual_seed(0))
    spectrum = lanczos(matrix, start, iterations=ITERATIONS, tolerance=TOLERANCE)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = curvlinops.HessianLinearOperator(model, nn.CrossEntropyLoss(), parameters, [(x, y)])
        (largest,) = linalg.eigsh(theirs.to_scipy(), k=1, which="LA", return_eigenvectors=False)
    assert spectrum.largest == pytest.approx(float(largest), rel=0.01)
