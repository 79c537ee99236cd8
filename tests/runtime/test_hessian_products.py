"""Products, Lanczos and traces against dense Hessians and scipy's eigsh; against curvlinops: `tests/interop`."""

import pytest
import torch
from curved_cases import curvature, curved_subject, dense_hessian, ends, loss_of_layer
from expert_models import text_only
from layer_zoo import scenario_of
from test_linear_attention import FORMS

from mmplan.runtime.hessian.diagnose import require_twice
from mmplan.runtime.hessian.differences import difference
from mmplan.runtime.hessian.hutchinson import trace
from mmplan.runtime.hessian.lanczos import Spectrum, lanczos
from mmplan.runtime.hessian.own_scenario import scenario_subject
from mmplan.runtime.hessian.products import Curvature
from mmplan.runtime.hessian.settings import ITERATIONS, TOLERANCE
from mmplan.scenario.scenario import Sample

# (model, layer, modality, dense matrix by loops because Python reads values)
CASES = [
    ("llava", "vision.embed", "vision", False),  # patch embedding, class token, positions
    ("llava", "vision.1", "vision", False),  # attention block with layer norms and biases
    ("llava", "projector.0", "vision", False),
    ("llm", "llm.0", "text", False),  # grouped keys, gated MLP, RMS norms, rotary
    ("llava", "llm.head", "vision", False),
    ("qwen", "vision.0", "vision", False),  # windows, RMS norm, norms of queries and keys
    ("experts", "llm.0", "text", True),  # experts
]


def found(matrix: Curvature, seed: int = 0) -> Spectrum:
    start = torch.randn(matrix.size, generator=torch.Generator().manual_seed(seed))
    return lanczos(matrix, start, iterations=ITERATIONS, tolerance=TOLERANCE)


@pytest.mark.parametrize(("name", "layer", "modality", "by_loops"), CASES, ids=[f"{c[0]} {c[1]}" for c in CASES])
def test_the_largest_eigenvalue_is_that_of_the_dense_hessian(
    name: str, layer: str, modality: str, by_loops: bool
) -> None:
    subject = curved_subject(name)
    dense = dense_hessian(subject, layer, modality, by_loops=by_loops)
    _, largest = ends(dense)
    matrix = curvature(subject, layer, modality)
    spectrum = found(matrix)
    assert spectrum.converged
    assert spectrum.largest == pytest.approx(largest, rel=0.01)
    assert abs(spectrum.largest - largest) <= spectrum.residual + 1e-5 * abs(largest)  # what the residual promises
    vector = torch.randn(matrix.size, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(matrix(vector), dense @ vector, rtol=1e-3, atol=1e-5 * float(dense.abs().max()))


def test_the_gauss_newton_matrix_is_that_of_jacobian_and_softmax() -> None:
    """J' H_z J with J of the logits by torch.func and H_z = diag(p) - p p' for each target, by hand."""
    subject = curved_subject("llm")
    layer = "llm.0"
    loss, start = loss_of_layer(subject, layer, "text")
    (piece,) = subject.batch(0)

    def logits_and_targets(flat: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        handle = subject.model.layer("llm.head").register_forward_hook(lambda m, a, out: kept.append(out))
        try:
            loss(flat)
        finally:
            handle.remove()
        return kept[0]

    for parameter in subject.model.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        loss(start)
    jacobian = torch.func.jacrev(logits_and_targets, chunk_size=256)(start).detach()
    p = logits_and_targets(start).softmax(-1).detach()
    label_rows = [row for row in range(len(p)) if row not in (8, 14)]  # the last token of each sequence has none
    expected = torch.zeros(len(start), len(start))
    for row in label_rows:
        inner = torch.diag(p[row]) - torch.outer(p[row], p[row])
        expected += jacobian[row].T @ inner @ jacobian[row] / piece.targets["llm"]
    matrix = curvature(subject, layer, "text", gauss_newton=True)
    spectrum = found(matrix)
    assert spectrum.largest == pytest.approx(ends(expected)[1], rel=0.01)
    assert spectrum.least > -1e-5 * spectrum.largest


def test_the_largest_eigenvalue_is_found_where_the_most_negative_is_larger_in_magnitude() -> None:
    """diag(-9, 1, 2, 3): power iteration ends at -9."""
    diagonal = torch.tensor([-9.0, 1.0, 2.0, 3.0])
    spectrum = lanczos(lambda v: diagonal * v, torch.ones(4), iterations=50, tolerance=1e-3)
    assert (spectrum.largest, spectrum.least, spectrum.magnitude) == pytest.approx((3.0, -9.0, -9.0), rel=1e-5)
    assert spectrum.iterations == 4
    assert spectrum.residual == 0.0


def test_a_matrix_of_zeros_has_the_eigenvalue_zero_after_one_product() -> None:
    spectrum = lanczos(torch.zeros_like, torch.ones(5), iterations=50, tolerance=1e-3)
    assert (spectrum.largest, spectrum.least, spectrum.iterations, spectrum.converged) == (0.0, 0.0, 1, True)


def test_eigenvalues_do_not_come_twice_however_long_it_goes_on() -> None:
    """Without orthogonalising again, 60 steps find copies of the outlier and residuals lie."""
    diagonal = torch.cat([torch.linspace(0, 1, 199), torch.tensor([100.0])])
    start = torch.randn(200, generator=torch.Generator().manual_seed(0))
    spectrum = lanczos(lambda v: diagonal * v, start, iterations=60, tolerance=1e-30)
    assert spectrum.iterations < 200
    assert spectrum.largest == pytest.approx(100.0, rel=1e-5)
    assert spectrum.least == pytest.approx(0.0, abs=0.02)


def test_too_few_steps_are_told_and_give_too_small_a_value() -> None:
    diagonal = torch.linspace(0, 1, 500)
    start = torch.randn(500, generator=torch.Generator().manual_seed(0))
    spectrum = lanczos(lambda v: diagonal * v, start, iterations=3, tolerance=1e-3)
    assert not spectrum.converged
    assert spectrum.residual > 0
    assert spectrum.largest < 1


def test_the_trace_is_the_mean_over_signs() -> None:
    """For a diagonal matrix every vector of signs gives the trace exactly; with entries beside it, about."""
    diagonal = torch.tensor([1.0, -2.0, 5.0])
    generator = torch.Generator().manual_seed(0)
    assert trace(lambda v: diagonal * v, 3, 1, generator, diagonal) == pytest.approx(4.0)
    full = torch.randn(30, 30, generator=generator)
    full = full + full.T
    estimate = trace(lambda v: full @ v, 30, 4000, generator, full)
    deviation = (2 * (full.square().sum() - full.diagonal().square().sum()) / 4000) ** 0.5
    assert abs(estimate - float(full.trace())) < 4 * float(deviation)


def test_the_trace_of_a_layer_is_that_of_its_dense_hessian() -> None:
    subject = curved_subject("llava")
    dense = dense_hessian(subject, "projector.0", "vision")
    matrix = curvature(subject, "projector.0", "vision")
    generator = torch.Generator().manual_seed(0)
    probes = 60
    estimate = trace(matrix, matrix.size, probes, generator, torch.ones(1))
    deviation = (2 * (dense.square().sum() - dense.diagonal().square().sum()) / probes) ** 0.5
    assert abs(estimate - float(dense.trace())) < 4 * float(deviation)


def test_scipy_finds_the_same_ends_by_products_of_another_kind() -> None:
    """eigsh on forward-over-reverse products (torch.func.jvp of grad), which share no code with ours."""
    linalg = pytest.importorskip("scipy.sparse.linalg")
    subject = curved_subject("llm")
    loss, start = loss_of_layer(subject, "llm.1", "text")
    for parameter in subject.model.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        loss(start)

    def product(vector: object) -> object:
        tangent = torch.as_tensor(vector, dtype=torch.float32).reshape(-1)
        return torch.func.jvp(torch.func.grad(loss), (start,), (tangent,))[1].detach().numpy()

    operator = linalg.LinearOperator((len(start), len(start)), matvec=product)
    (largest,) = linalg.eigsh(operator, k=1, which="LA", return_eigenvectors=False, tol=1e-4)
    assert found(curvature(subject, "llm.1", "text")).largest == pytest.approx(float(largest), rel=0.01)


@pytest.mark.parametrize("form", FORMS)
def test_products_of_every_form_of_block_agree_with_differences_of_gradients(form: str) -> None:
    """Functions of mmplan's own (linear attention) among them, whose backward has to be differentiable in turn."""
    scenario = scenario_of(text_only(FORMS[form]), samples=(Sample(text_tokens=9), Sample(text_tokens=70)))
    subject = scenario_subject(scenario, weights=None, samples=2, microbatch=None, device=torch.device("cpu"))
    matrix = curvature(subject, "llm.0", "text")
    require_twice(matrix.first_gradients())
    spectrum = lanczos(matrix, torch.ones(matrix.size), iterations=12, tolerance=0.1)
    far = difference(matrix, subject.layers["llm.0"], spectrum.vector, float(spectrum.vector @ matrix(spectrum.vector)))
    assert far is not None
    assert far < 0.01
