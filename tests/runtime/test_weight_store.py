"""The two-part backward of linear layers, alone in one process."""

import torch
from torch import Tensor, nn

from mmplan.runtime.weight_store import Postponed, WeightStore, postpone_linears


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2, bias=False))


def gradients(model: nn.Sequential) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_input_gradients_come_first_and_weights_equal_autograd() -> None:
    whole, parts = network(), network()
    store = WeightStore()
    postpone_linears(parts, store)
    x = torch.randn(7, 3)
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    whole(first).square().sum().backward()
    loss = parts(second).square().sum()
    with store.postponing(4):
        loss.backward()
    assert first.grad is not None
    assert torch.equal(first.grad, second.grad)  # type: ignore[arg-type]
    assert len(gradients(parts)) == 2  # the norm's: they do not wait
    made: dict[Tensor, Tensor] = {}
    store.compute(4, lambda parameter, gradient: made.__setitem__(parameter, gradient))
    found = [made.get(p, p.grad) for p in parts.parameters()]
    for gradient, expected in zip(found, gradients(whole), strict=True):
        assert gradient is not None
        torch.testing.assert_close(gradient, expected)


def test_outside_of_a_split_backward_nothing_is_postponed() -> None:
    whole, parts = network(), network()
    postpone_linears(parts, WeightStore())
    x = torch.randn(7, 3)
    for model in (whole, parts):
        model(x).square().sum().backward()
    for gradient, expected in zip(gradients(parts), gradients(whole), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_a_bias_that_is_added_behind_is_not_postponed() -> None:
    """As behind a sum over ranks; layers inside of modules that are left out do as before."""
    model, store = nn.ModuleList([nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 2))]), WeightStore()
    postpone_linears(model, store, apart={"1"})
    first = model[0].forward
    assert isinstance(first, Postponed)
    with store.postponing(0):
        model[1](first.product(torch.randn(7, 3)) + model[0].bias).sum().backward()
    made: list[Tensor] = []
    store.compute(0, lambda parameter, gradient: made.append(parameter))
    assert len(made) == 1
    assert made[0] is model[0].weight
    assert all(p.grad is not None for p in (model[0].bias, *model[1].parameters()))


def test_frozen_linears_are_left_alone() -> None:
    model = network()
    model[0].requires_grad_(False)
    store = WeightStore()
    postpone_linears(model, store)
    with store.postponing(0):
        model(torch.randn(7, 3)).sum().backward()
    made: list[Tensor] = []
    store.compute(0, lambda parameter, gradient: made.append(parameter))
    assert len(made) == 1
    assert made[0] is model[2].weight


def test_what_waits_is_counted_until_it_is_computed() -> None:
    model, store = network(), WeightStore()
    postpone_linears(model, store)
    with store.postponing(0):
        model(torch.randn(7, 3)).square().sum().backward()
    # inputs [7, 3] and [7, 5], output gradients [7, 5] and [7, 2], of 4 bytes
    assert sum(store.storages().values()) == 4 * 7 * (3 + 5 + 5 + 2)
    store.compute(0, lambda parameter, gradient: None)
    assert store.storages() == {}
