"""Plans with tensor parallelism on four processes against the whole model in one: losses, every gradient, bytes."""

import pytest
from case_processes import run_on_ranks
from gradient_cases import PROCESSES, cases
from gradient_runs import whole_model
from meshed_plan_cases import uneven_cases
from tensor_plan_cases import tensor_cases
from tensor_plan_runs import TensorRankResult, run_tensor_cases

from mmplan.runtime.places import widths
from mmplan.runtime.tensor_parallel import name_in_whole, slice_of

pytestmark = pytest.mark.distributed

EVEN, UNEVEN = tensor_cases(), uneven_cases(cases()["1f1b"].scenario)
CASES = EVEN | UNEVEN
MORE_PROCESSES = 5
Results = dict[str, list[TensorRankResult]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of four processes, and of five for meshes that take no fewer."""
    found: Results = {}
    for plans, processes in ((EVEN, PROCESSES), (UNEVEN, MORE_PROCESSES)):
        ranks = run_on_ranks(run_tensor_cases, processes, tmp_path_factory.mktemp("ranks"), plans)
        found |= {name: [rank[name] for rank in ranks] for name in plans}
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_is_its_part_of_that_of_one_process(name: str, results: Results) -> None:
    """To 1e-5 of each gradient's largest element, in fp32, on every rank. Gradients of the biases of keys are zero but
    for rounding, so no scale is below a thousandth of the model's largest. Where a module is in bf16 its sums over
    ranks are rounded to 2^-9, layer upon layer, as far as gradients go."""
    expected, losses = whole_model(CASES[name])
    exact = CASES[name].scenario.precisions == ("fp32",)
    least = max(gradient.abs().max() for gradient in expected.values()) / 1000
    seen = set()
    for rank in results[name]:
        for parameter, found in rank.gradients.items():
            gradient = expected[name_in_whole(parameter)]
            seen.add(name_in_whole(parameter))
            own = slice_of(gradient, found.shape, *rank.places[parameter])
            error = (found - own).abs().max() / gradient.abs().max().clamp_min(least)
            assert error < (1e-5 if exact else 2**-4), f"{parameter}: relative error {error:.1e}"
    assert seen == expected.keys()
    for module, loss in losses.items():
        first = [rank for rank in results[name] if rank.index == 0]
        assert sum(rank.losses.get(module, 0.0) for rank in first) == pytest.approx(loss, rel=1e-6 if exact else 1e-3)


@pytest.mark.parametrize("name", CASES)
def test_ranks_exchange_the_predicted_bytes(name: str, results: Results) -> None:
    """Of ranks that share layers, those of the first: where tokens are dealt out for experts, a last one has fewer."""
    dealt = CASES[name].ep > 1 and CASES[name].etp < CASES[name].tp
    shares = max(widths(CASES[name])) > 1 or CASES[name].ep > 1
    assert any(rank.tensor_bytes > 0 for rank in results[name]) == shares
    for rank in results[name]:
        assert rank.planned_sent_bytes in (None, rank.sent_bytes)
        if rank.index == 0 or not dealt:
            assert rank.tensor_bytes == rank.planned_tensor_bytes
        else:
            assert 0 < rank.tensor_bytes <= rank.planned_tensor_bytes
