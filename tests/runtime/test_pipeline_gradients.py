"""The executor on four processes against the whole model in one: losses, every gradient, and bytes."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from case_processes import run_on_ranks
from gradient_cases import FAULTS, LEFT_OUT, NO_WEIGHTS, PROCESSES, STALE, TABLE_ON_TWO, WRONG_SCALE, cases
from gradient_runs import RankResult, run_all_cases, whole_model

from mmplan.planner.plan import Plan
from mmplan.runtime.train import step_data

pytestmark = pytest.mark.distributed

CASES = cases()
ROUNDING = 1e-7
Results = dict[str, list[RankResult]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    ranks = run_on_ranks(run_all_cases, PROCESSES, tmp_path_factory.mktemp("ranks"), CASES)
    return {name: [rank[name] for rank in ranks] for name in (*CASES, LEFT_OUT, *FAULTS)}


@cache
def _whole(*same: object) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """What one process computes follows from the scenario and how samples are grouped."""
    plans = (p for p in CASES.values() if (p.scenario, p.dp, p.microbatch_size, p.composition) == same)
    return whole_model(next(plans))


@pytest.mark.parametrize("name", CASES)
def test_pipeline_equals_one_process(name: str, results: Results) -> None:
    _require_equal(CASES[name], results[name])


@pytest.mark.parametrize("fault", FAULTS)
def test_errors_put_in_on_purpose_are_caught(fault: str, results: Results) -> None:
    with pytest.raises(AssertionError, match=r"^layers\.[\w.]+: \d"):
        _require_equal(CASES[FAULTS[fault]], results[fault])


def test_errors_put_in_on_purpose_do_what_their_names_say(results: Results) -> None:
    """Half of every sum over two replicas; other losses only where features are stale."""
    for fault, case in FAULTS.items():
        plan = CASES[case]
        expected, losses = _whole(plan.scenario, plan.dp, plan.microbatch_size, plan.composition)
        found = {name: gradient for rank in results[fault] for name, gradient in rank.gradients.items()}
        loss = sum(rank.losses.get("llm", 0.0) for rank in results[fault])
        assert (loss == pytest.approx(losses["llm"], rel=1e-6)) == (fault != STALE)
        name = max(expected, key=lambda key: float(expected[key].abs().max()))
        if fault == WRONG_SCALE:
            assert torch.allclose(2 * found[name], expected[name], atol=1e-5 * float(expected[name].abs().max()))
        if fault == NO_WEIGHTS:
            assert not torch.equal(found[name], expected[name])


def _require_equal(plan: Plan, ranks: list[RankResult]) -> None:
    """To 1e-6 of each gradient's largest element, in fp32; one that is 0 but for rounding (of a key bias) stays so. In
    bf16 what a step takes from a weight is rounded twice, to 2^-8 of it."""
    expected, expected_losses = _whole(plan.scenario, plan.dp, plan.microbatch_size, plan.composition)
    found: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for parameter in rank.gradients.keys() & found.keys():  # replicas, and stages, hold the same sums
            assert torch.equal(rank.gradients[parameter], found[parameter]), parameter
        found |= rank.gradients
    assert found.keys() == expected.keys()
    largest: dict[str, float] = {}
    for parameter, gradient in expected.items():
        layer = parameter.split(".parts.")[0]
        largest[layer] = max(largest.get(layer, 0.0), float(gradient.abs().max()))
    for parameter, gradient in expected.items():
        size, of_layer = float(gradient.abs().max()), largest[parameter.split(".parts.")[0]]
        error = float((found[parameter] - gradient).abs().max())
        to = 1e-6 if found[parameter].dtype == torch.float32 else 2**-8
        assert error <= (to * size if size > ROUNDING * of_layer else ROUNDING * of_layer), f"{parameter}: {error:.1e}"
    for module, loss in expected_losses.items():
        assert sum(rank.losses.get(module, 0.0) for rank in ranks) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_bytes_on_the_network_are_those_of_the_program(name: str, results: Results) -> None:
    for rank in results[name]:
        assert rank.sent_bytes == rank.program_bytes
        assert rank.shared_bytes == rank.program_shared_bytes


@pytest.mark.parametrize("name", CASES)
def test_state_takes_the_bytes_that_plans_count(name: str, results: Results) -> None:
    """But for a tied matrix, which plans count once more in the head, and for what is added to a layer's weights and
    gradients to give two replicas equal shares: an element of 4 bytes to each."""
    for rank in results[name]:
        if "sharded, tied" in name:
            assert 0.9 * rank.planned_state_bytes < rank.state_bytes <= rank.planned_state_bytes
        elif "odd" in name:
            assert 0 < rank.state_bytes - rank.planned_state_bytes <= 3 * 2 * 4
        else:
            assert rank.state_bytes == rank.planned_state_bytes


def test_a_sum_over_stages_that_is_left_out_is_seen(results: Results) -> None:
    """Then each stage has its own part of the table's gradient: no copy has all of it, and copies differ."""
    expected, _ = whole_model(CASES[TABLE_ON_TWO])
    table = "layers.llm_embed.parts.table.weight"
    first, _, last, _ = (rank.gradients[table] for rank in results[LEFT_OUT])
    assert not torch.equal(first, last)
    for found in (first, last):
        assert (found - expected[table]).abs().max() > 0.01 * expected[table].abs().max()
    assert torch.allclose(first + last, expected[table], atol=1e-5 * float(expected[table].abs().max()))


def test_balanced_microbatches_train_like_those_in_order() -> None:
    """One step has the same samples and weighs every token alike: equal losses and gradients up to rounding."""
    plan = CASES["balanced samples"]
    balanced, losses = whole_model(plan)
    in_order, expected = whole_model(replace(plan, composition="in order"))
    assert step_data(plan, 0).indices != step_data(replace(plan, composition="in order"), 0).indices
    assert losses == pytest.approx(expected, rel=1e-6)
    largest = max(gradient.abs().max() for gradient in in_order.values())
    for name, gradient in in_order.items():
        assert (balanced[name] - gradient).abs().max() < 1e-6 * largest, name


def test_the_cases_hold_microbatches_with_and_without_images() -> None:
    for plan in CASES.values():
        images = [sum(load["vision"].sequences for load in row) for row in step_data(plan, 0).loads]
        per_microbatch = [load["vision"].sequences for row in step_data(plan, 0).loads for load in row]
        assert max(per_microbatch) > 0
        if plan.microbatch_size == 1:
            assert min(per_microbatch) == 0
        if plan.dp == 2 and plan.composition == "in order":
            assert images[0] != images[1]
