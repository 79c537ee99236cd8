"""Norms and mean losses over several ranks against one process; wrong reductions are named."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from case_processes import run_on_ranks
from split_norm_cases import (
    CHUNKS,
    MODALITIES,
    PROCESSES,
    STEPS,
    norm_of,
    run_norm,
    run_split_norm_cases,
    sequence,
    tokens_of,
)
from torch import Tensor

from mmplan.runtime.numerics.modality_norm import ModalityNorm
from mmplan.runtime.numerics.norm_diagnosis import (
    GLOBAL,
    LOCAL,
    LOCAL_MIXED,
    MEAN_OF_RANKS,
    RIGHT,
    UNKNOWN,
    diagnose_statistics,
)
from mmplan.runtime.numerics.sequence_chunks import (
    DelayedMean,
    averaging_bias,
    exact_mean,
    noise_ratio,
    token_weights,
    tokens_in_step,
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(run_split_norm_cases, PROCESSES, tmp_path_factory.mktemp("norms"))


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("over", ["token", "modality"])
def test_a_norm_over_ranks_is_that_of_one_process(kind: str, over: str, ranks: list[dict[str, Any]]) -> None:
    """Columns are split for statistics of tokens, tokens for those of modalities."""
    expected = run_norm(norm_of(kind, over), *sequence())
    found = [rank["norms"][kind, over] for rank in ranks]
    dim = 1 if over == "token" else 0
    for name in ("y", "x"):
        whole = torch.cat([one[name] for one in found], dim)
        torch.testing.assert_close(whole, expected[name], rtol=1e-5, atol=2e-5)
    for index, gradient in enumerate(expected["parameters"]):
        parts = [one["parameters"][index] for one in found]
        whole = torch.cat(parts, 1) if over == "token" else sum(parts)
        torch.testing.assert_close(whole, gradient, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_statistics_over_a_modality_are_those_of_its_tokens(kind: str) -> None:
    x, _, modality = sequence()
    norm = ModalityNorm(2, x.shape[1], kind=kind, over="modality")  # type: ignore[arg-type]
    y = norm(x, modality)
    for index in (0, 1):
        tokens = x[modality == index].double()
        centred = tokens - tokens.mean() if kind == "layer" else tokens
        expected = (centred / centred.square().mean().sqrt()).float()
        torch.testing.assert_close(y[modality == index], expected, rtol=1e-4, atol=1e-4)
    assert (y[modality == 2] == 0).all()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("used", "reduction"),
    [("right", RIGHT), ("global", GLOBAL), ("local", LOCAL), ("mixed", LOCAL_MIXED), ("mean", MEAN_OF_RANKS)],
)
def test_a_wrong_reduction_is_named(used: str, reduction: str, ranks: list[dict[str, Any]]) -> None:
    for index, rank in enumerate(ranks):
        result = rank["reductions"]
        mean, std = result[used].unbind(-1)
        told = diagnose_statistics(mean, std, result["moments"], rank=index, modalities=MODALITIES)
        for one in told:
            if mean[MODALITIES.index(one.modality)].isnan():
                continue  # this rank has none of it
            assert one.reduction == reduction and one.right == (used == "right")


@pytest.mark.distributed
def test_the_contamination_of_a_global_sum_is_told_with_its_size(ranks: list[dict[str, Any]]) -> None:
    x, _, modality = sequence()
    real, text = x[modality < 2].double(), x[modality == 1].double()
    mean, std = ranks[0]["reductions"]["global"].unbind(-1)
    of_text = diagnose_statistics(mean, std, ranks[0]["reductions"]["moments"], rank=0, modalities=MODALITIES)[1]
    assert of_text.foreign == {"vision": pytest.approx((modality == 0).sum().item() / (modality < 2).sum().item())}
    assert of_text.mean_off == pytest.approx(((real.mean() - text.mean()) / text.std(correction=0)).item(), rel=1e-5)
    assert of_text.scale_off == pytest.approx((real.std(correction=0) / text.std(correction=0)).item(), rel=1e-5)
    assert str(of_text).startswith("text is normalised by one sum over all ranks and all modalities: the elements are ")
    other = diagnose_statistics(mean + 1, std, ranks[0]["reductions"]["moments"], rank=0, modalities=MODALITIES)
    assert {one.reduction for one in other} == {UNKNOWN}


def test_statistics_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"moments \(3, 2, 3\) and means \(2,\) of 1 modalities"):
        diagnose_statistics(torch.zeros(2), torch.ones(2), torch.zeros(3, 2, 3), rank=0, modalities=["vision"])


def chunk_gradients(counts: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """Gradients of cross entropies with logits x W: of the mean over all tokens, and of each chunk's own mean."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, (sum(counts),), generator=generator)
    weight = torch.randn(5, 4, generator=generator, dtype=torch.float64, requires_grad=True)

    def gradient(rows: Tensor, targets: Tensor) -> Tensor:
        return torch.autograd.grad(F.cross_entropy(rows @ weight, targets), weight)[0]

    chunks = zip(x.split(counts), labels.split(counts), strict=True)
    return gradient(x, labels), [gradient(rows, targets) for rows, targets in chunks]


@pytest.mark.parametrize("counts", [(7, 2, 11), (1, 1, 1, 17), (4, 4, 4)])
def test_the_bias_of_averaging_is_the_derived_one(counts: tuple[int, ...]) -> None:
    exact, own = chunk_gradients(counts)
    averaged = torch.stack(own).mean(0)
    torch.testing.assert_close(averaged - exact, averaging_bias(counts, own))
    lengths, size = torch.tensor(counts, dtype=torch.float64), len(counts)
    covariance = sum((n - lengths.mean()) * g for n, g in zip(lengths, own, strict=True)) / size
    torch.testing.assert_close(averaged - exact, -size / sum(counts) * covariance)


def test_the_articles_bias_is_not_the_real_one() -> None:
    """n (R - 1) / (2 S) of even chunks is (R - 1) / (2 R), where averaging has no bias at all."""
    exact, own = chunk_gradients((4, 4, 4))
    torch.testing.assert_close(torch.stack(own).mean(0), exact)
    of_the_article = 4 * (3 - 1) / (2 * 12)
    assert of_the_article == pytest.approx(1 / 3)
    assert token_weights((4, 4, 4)) == (1.0, 1.0, 1.0)
    assert token_weights((1, 3, 0)) == (pytest.approx(4 / 3), pytest.approx(4 / 9), 0.0)


def test_the_noise_of_averaging_is_the_derived_one() -> None:
    counts = (1, 3, 8)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(200_000, sum(counts), generator=generator)
    averaged = torch.stack([part.mean(1) for part in tokens.split(counts, 1)]).mean(0)
    assert averaged.var().item() / tokens.mean(1).var().item() == pytest.approx(noise_ratio(counts), rel=0.02)
    assert noise_ratio((5, 5)) == 1.0


@pytest.mark.distributed
def test_gradients_of_uneven_chunks_are_exact(ranks: list[dict[str, Any]]) -> None:
    for step in range(STEPS):
        tokens = [tokens_of(step, rank) for rank in range(PROCESSES)]
        whole = torch.cat(tokens).mean(0)
        own = [t.mean(0) if len(t) else torch.zeros(t.shape[1], dtype=t.dtype) for t in tokens]
        for rank in ranks:
            torch.testing.assert_close(rank["means"]["exact"][step], whole)
            bias = averaging_bias([len(t) for t in tokens], own)
            torch.testing.assert_close(rank["means"]["naive"][step], whole + bias)


@pytest.mark.distributed
def test_delayed_corrections_make_up_for_the_bias_two_steps_later(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        means = rank["means"]
        biases = [naive - exact for naive, exact in zip(means["naive"], means["exact"], strict=True)]
        for step, found in enumerate(means["delayed"]):
            late = biases[step - 2] if step >= 2 else 0.0
            torch.testing.assert_close(found, means["naive"][step] - late)
        torch.testing.assert_close(sum(means["delayed"]) + means["flushed"], sum(means["exact"]))
    assert len(CHUNKS) == PROCESSES


def test_one_process_alone_needs_no_correction() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    loss = exact_mean((weight * torch.arange(3.0)).sum(), tokens_in_step(4), averaged=True)
    loss.backward()
    assert torch.equal(weight.grad, torch.arange(3.0) / 4)
    mean = DelayedMean([weight])
    for _ in range(3):
        mean.reduce_(5)
    assert torch.equal(weight.grad, torch.arange(3.0) / 4)
    with pytest.raises(ValueError, match=r"chunks of \[0, 0\] tokens"):
        averaging_bias([0, 0], [weight, weight])
