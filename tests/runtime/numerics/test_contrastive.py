"""Contrastive losses in shards against the loss of the whole batch, and gradients of a batch in chunks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from case_processes import run_on_ranks
from contrastive_cases import (
    COUNTS,
    PROCESSES,
    SETTINGS,
    attention_product,
    attention_weights,
    derivatives,
    features,
    kept_elements,
    largest_tensor,
    loss_of,
    run_contrastive_cases,
    tower,
)
from torch import Tensor, nn

from mmplan.runtime.numerics.contrastive import info_nce, siglip
from mmplan.runtime.numerics.gradient_cache import Tower, cached_backward


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(run_contrastive_cases, PROCESSES, tmp_path_factory.mktemp("contrastive"))


def whole_loss(name: str, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """From the papers' pseudocode, on B x B logits."""
    logits, labels = x @ y.T * scale, torch.arange(len(x))
    if name == "info_nce":
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    return -F.logsigmoid((2 * torch.eye(len(x)) - 1) * (logits - 2.0)).sum() / len(x)


@pytest.mark.distributed
@pytest.mark.parametrize(("loss", "counts", "exchange"), SETTINGS)
def test_loss_gradient_and_hessian_vector_product_are_those_of_the_whole_batch(
    loss: str, counts: str, exchange: str, ranks: list[dict[str, Any]]
) -> None:
    x, y, v, w = (features(seed) for seed in range(4))
    inputs = [x.requires_grad_(), y.requires_grad_(), torch.tensor(7.0, dtype=torch.float64, requires_grad=True)]
    expected = derivatives(whole_loss(loss, *inputs), inputs, [v, w, torch.tensor(0.3)])
    found = [rank["sharded"][loss, counts, exchange] for rank in ranks]
    assert [one["loss"] for one in found] == pytest.approx([expected["loss"]] * PROCESSES, rel=1e-12)
    for order in ("first", "second"):
        for index in (0, 1):
            torch.testing.assert_close(torch.cat([one[order][index] for one in found]), expected[order][index])
        torch.testing.assert_close(sum(one[order][2] for one in found), expected[order][2])


@pytest.mark.distributed
def test_features_gathered_without_derivative_give_another_gradient_and_another_product(
    ranks: list[dict[str, Any]],
) -> None:
    """The loss is the same; what this rank's features do to the rows of other ranks is missing."""
    plain = [rank["plainly gathered"] for rank in ranks]
    right = [rank["sharded"]["info_nce", "even", "gather"] for rank in ranks]
    assert sum(one["loss"] for one in plain) == pytest.approx(right[0]["loss"])
    for order in ("first", "second"):
        off = torch.cat([a[order][0] - b[order][0] for a, b in zip(plain, right, strict=True)])
        assert off.norm() > 0.1 * torch.cat([one[order][0] for one in right]).norm(), order


@pytest.mark.distributed
def test_the_product_with_the_hessian_of_attentive_encoders_is_that_of_one_process(ranks: list[dict[str, Any]]) -> None:
    """In the encoders' weights, averaged over ranks as DDP does; attention by torch's MATH kernel."""
    expected = attention_product(slice(None), *attention_weights(), sharded=False)
    found = [rank["attention"] for rank in ranks]
    for order in ("first", "second"):
        for index in (0, 1):
            mean = torch.stack([one[order][index] for one in found]).mean(0)
            torch.testing.assert_close(mean, expected[order][index])


@pytest.mark.distributed
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_no_tensor_is_larger_than_a_rank_pairs_logits_or_the_gathered_features(
    exchange: str, ranks: list[dict[str, Any]]
) -> None:
    batch = 64 * PROCESSES
    allowed = 64 * 64 if exchange == "ring" else max(64 * 64, batch * features(0).shape[1])
    assert [rank["largest"][exchange][0] for rank in ranks] == [allowed] * PROCESSES
    assert largest_tensor(batch, exchange) == batch**2


@pytest.mark.distributed
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_what_a_rank_keeps_for_the_backward_is_its_part_of_the_whole(
    exchange: str, ranks: list[dict[str, Any]]
) -> None:
    """Of the logits exactly a part in N; features, whole on every rank, and statistics come on top."""
    batch, width = 64 * PROCESSES, features(0).shape[1]
    whole = kept_elements(batch, exchange)
    for rank in ranks:
        assert rank["largest"][exchange][1] <= whole / PROCESSES + 8 * batch * width


@pytest.mark.distributed
def test_a_cached_batch_under_ddp_has_the_gradients_of_one_process(ranks: list[dict[str, Any]]) -> None:
    modules = [tower(10), tower(11)]
    whole_loss("info_nce", modules[0](features(0)), modules[1](features(1)), torch.tensor(7.0)).backward()
    for rank in ranks:
        for index, module in enumerate(modules):
            for name, parameter in module.named_parameters():
                torch.testing.assert_close(rank["cached under DDP"][f"{index}.{name}"], parameter.grad)


@pytest.mark.parametrize("loss", ["info_nce", "siglip"])
def test_one_process_without_a_group_has_the_same_loss(loss: str) -> None:
    x, y, scale = features(0), features(1), torch.tensor(7.0)
    torch.testing.assert_close(loss_of(loss, x, y, scale), whole_loss(loss, x, y, scale))
    assert len(COUNTS) == 3


def test_dropout_drops_the_same_in_a_cached_batch() -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.5), nn.Linear(16, 5)).double()
    chunks = features(0).split(3)
    torch.manual_seed(1)
    whole = info_nce(torch.cat([encoder(chunk) for chunk in chunks]), features(1), 7.0, averaged=False)
    whole.backward()
    expected = [parameter.grad for parameter in encoder.parameters()]
    encoder.zero_grad()
    torch.manual_seed(1)
    frozen = Tower(encode=lambda rows: rows, chunks=[features(1)])
    loss = cached_backward(
        [Tower(encode=encoder, chunks=chunks), frozen], lambda x, y: info_nce(x, y, 7.0, averaged=False)
    )
    drawn = torch.rand(1)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-12)
    torch.testing.assert_close([parameter.grad for parameter in encoder.parameters()], expected)
    torch.manual_seed(1)
    for chunk in chunks:
        encoder(chunk)
    assert torch.equal(drawn, torch.rand(1))  # the generator goes on as if nothing had been done twice


def test_what_is_no_batch_of_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"images \(12, 5\) and texts \(11, 5\) are no pairs"):
        info_nce(features(0), features(1, 11), 7.0, averaged=False)
    with pytest.raises(ValueError, match="exchange 'tree' is none of gather, ring"):
        info_nce(features(0), features(1), 7.0, averaged=False, exchange="tree")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 pairs"):
        siglip(features(0, 0), features(1, 0), 7.0, 0.0, averaged=False)
    with pytest.raises(ValueError, match="tower 0 of 1 has no chunks"):
        cached_backward([Tower(encode=tower(0), chunks=[])], lambda x: x.sum())
