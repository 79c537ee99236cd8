"""A job's parameters begin as the model's own code sets them, though it is built without weights."""

import copy
import math
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from mmplan.runtime.ghost import first_values
from mmplan.runtime.ghost.weightless import build_weightless, initial_value, lost_values


class Own(nn.Module):
    """Sets its parameters in the ways that models' code does."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4, padding_idx=2)
        self.head = nn.Linear(4, 3)
        self.head.weight.data.fill_(0.25)
        nn.init.constant_(self.head.bias, 3.0)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.gate = nn.Parameter(torch.zeros(4, 4))
        self.class_token = nn.Parameter(torch.randn(1, 1, 5) * 5**-0.5)
        self.narrow = nn.Linear(50, 20, bias=False)
        nn.init.trunc_normal_(self.narrow.weight, std=3.0, a=-6.0, b=6.0)
        self.square = nn.Linear(4, 4, bias=False)
        nn.init.orthogonal_(self.square.weight)
        self.norm = nn.LayerNorm(4)
        self.scaled = nn.Linear(400, 400)
        with torch.no_grad():
            self.norm.weight[1:3].mul_(2).add_(torch.tensor([0.5, 1.5]))
            self.scaled.weight.mul_(10)
        self.twin = copy.deepcopy(self.head)
        self.other = copy.deepcopy(self.scaled)
        self.half = nn.Linear(4, 4).half()
        self.tokens_again = nn.Linear(4, 7, bias=False)
        self.tokens_again.weight = self.tokens.weight
        self.unset = nn.Parameter(torch.empty(6, 6))
        self.register_buffer("noise", torch.rand(3))


def values(build: Callable[[], nn.Module], seed: int = 0) -> dict[str, Tensor]:
    bare = build_weightless(build, seed)
    assert all(parameter.device.type == "meta" for parameter in bare.parameters())
    return {name: initial_value(name, p, seed, torch.float32) for name, p in bare.named_parameters()}


def test_what_the_code_sets_is_kept_to_the_bit() -> None:
    found, real = values(Own), Own()
    fixed = ("head.weight", "head.bias", "logit_scale", "gate", "norm.weight", "norm.bias", "twin.weight", "twin.bias")
    for name in fixed:
        assert torch.equal(found[name], real.get_parameter(name)), name
    assert found["logit_scale"] == pytest.approx(2.6593, abs=1e-4) and found["head.bias"].tolist() == [3.0] * 3
    assert found["norm.weight"].tolist() == [1.0, 2.5, 3.5, 1.0]
    assert not found["tokens.weight"][2].any() and found["tokens.weight"][[0, 1, 3, 4, 5, 6]].all()


def test_what_it_draws_has_its_own_distribution() -> None:
    found = values(Own)
    # `nn.Linear` draws evenly from -1/sqrt(inputs) to 1/sqrt(inputs), whose deviation is this over sqrt(3).
    assert float(found["scaled.weight"].std()) == pytest.approx(10 * 400**-0.5 / math.sqrt(3), rel=0.01)
    assert float(found["scaled.bias"].abs().max()) <= 400**-0.5
    assert 5 < float(found["narrow.weight"].abs().max()) <= 6  # of a deviation of 3, cut at 2 of them
    torch.testing.assert_close(found["square.weight"] @ found["square.weight"].T, torch.eye(4))
    assert torch.equal(found["scaled.weight"], found["other.weight"])  # a copy of a layer remains one
    assert torch.equal(found["half.weight"], found["half.weight"].half().float())


def test_draws_are_those_of_the_seed_whatever_was_drawn_before() -> None:
    state = torch.get_rng_state()
    first = values(Own)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    again, other = values(Own), values(Own, seed=1)
    drawn = ("class_token", "narrow.weight", "scaled.weight", "scaled.bias", "tokens.weight", "unset")
    for name, value in first.items():
        assert torch.equal(value, again[name])
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    assert torch.equal(build_weightless(Own).noise, build_weightless(Own).noise)


def test_what_cannot_be_done_again_is_named() -> None:
    assert lost_values(build_weightless(Own)) == ()
    with patch.object(first_values, "MOST_KEPT", 4):
        bare = build_weightless(Own)
        assert lost_values(bare) == ("class_token",)  # five numbers that the code drew for real
        value = initial_value("class_token", bare.class_token, 0, torch.float32)
        assert 0 < float(value.std()) < 0.05
        assert not initial_value("gate", bare.gate, 0, torch.float32).any()  # of one number, however large
