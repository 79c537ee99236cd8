"""What blocks keep, in host memory between forward and backward: gradients to the bit, and nothing on the device."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from tiny_plans import TWO_STAGES, hand_plan, tiny_scenario

from mmplan.cost_models.layout import RecomputeLevel
from mmplan.errors import InputError
from mmplan.planner.plan_technique import require_executable
from mmplan.runtime.ghost.refusals import refuse_plan
from mmplan.runtime.host_activations import kept_on_host
from mmplan.runtime.launch import execute
from mmplan.runtime.validate import validate
from mmplan.scenario.technique import Offload


def test_gradients_are_the_same_and_no_intermediate_stays_on_the_device() -> None:
    """Products, a view that shares its storage, an expanded one, and an integer index."""
    torch.manual_seed(0)
    weight = torch.randn(6, 6, requires_grad=True)
    rows, index = torch.randn(5, 6), torch.tensor([0, 3, 3, 1])
    seen: list[weakref.ref[torch.Tensor]] = []

    def loss() -> torch.Tensor:
        hidden = (rows @ weight).tanh()
        gate = hidden[:, 1:4].sigmoid() * hidden[:, :1].expand(-1, 3)
        seen.append(weakref.ref(hidden))
        return (gate.t() @ hidden).exp().index_select(1, index).sum()

    (expected,) = torch.autograd.grad(loss(), [weight])
    with kept_on_host({weight.untyped_storage().data_ptr()}):
        value = loss()
    gc.collect()
    assert seen[-1]() is None
    (found,) = torch.autograd.grad(value, [weight])
    assert torch.equal(found, expected)


def test_a_storage_is_copied_once_and_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = torch.randn(4, 4, requires_grad=True), torch.randn(8, 4)
    copies: list[int] = []
    plain = torch.Tensor.copy_

    def counted(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        copies.append(source.numel())
        return plain(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    with kept_on_host({weight.untyped_storage().data_ptr()}):
        hidden = rows @ weight
        (hidden[:4] * hidden[4:]).sum()
    assert copies == [rows.nbytes, 8 * 4 * 4]


@pytest.mark.distributed
@pytest.mark.usefixtures("at_hand_once")
@pytest.mark.parametrize("recompute", ["none", "half"])
def test_a_run_has_the_losses_of_a_plain_one_and_the_predicted_memory(recompute: RecomputeLevel) -> None:
    scenario = replace(tiny_scenario(), global_batch=8)
    away = replace(scenario, technique=replace(scenario.technique, offload="activations"))
    plain, plan = hand_plan(scenario, TWO_STAGES), hand_plan(away, TWO_STAGES)
    plan = replace(plan, stages=tuple(replace(stage, recompute=recompute) for stage in plan.stages))
    runs = [execute(one, steps=2, local=2) for one in (plain, plan)]
    assert runs[0] is not None and runs[1] is not None
    for step, expected in zip(runs[1].steps, runs[0].steps, strict=True):
        assert step.losses == expected.losses
    for rank, whole in zip(runs[1].ranks, runs[0].ranks, strict=True):
        assert rank.peak_memory_bytes < whole.peak_memory_bytes
    rows = [row for row in validate(plan, runs[1]).rows if row.threshold is not None]
    assert "peak_memory_bytes" in {row.quantity for row in rows}
    assert all(row.passed for row in rows), [row for row in rows if not row.passed]


@pytest.mark.parametrize("offload", ["optimizer+activations", "optimizer"])
def test_states_in_host_memory_are_planned_and_not_executed(offload: Offload) -> None:
    scenario = tiny_scenario()
    with pytest.raises(InputError, match=f"technique.offload: {offload}"[:28]):
        require_executable(replace(scenario, technique=replace(scenario.technique, offload=offload)))


def test_models_of_ones_own_keep_theirs_on_the_device() -> None:
    plan = hand_plan(tiny_scenario(), TWO_STAGES)
    away = replace(plan.scenario, technique=replace(plan.scenario.technique, offload="activations"))
    with pytest.raises(InputError, match="and optimize again"):
        refuse_plan(replace(plan, scenario=away))
