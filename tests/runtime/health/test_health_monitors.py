"""Each metric against its definition: closed forms, what it must see and what it must not."""

import itertools
import math
import random
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from mmplan.runtime.health import attenuation, collapse, conflict, dispersion, drift, key_values, retrieval, robustness
from mmplan.runtime.health.hooks import attach
from mmplan.runtime.health.loss import BLOCK, RECENT, LossWatch, rank_p
from mmplan.runtime.health.loss import RULE as LOSS
from mmplan.runtime.health.overflow import tracing
from mmplan.runtime.health.rules import RULES, chosen_rules
from mmplan.runtime.health.staleness import Ledger, jitter_s
from mmplan.runtime.health.statistics import drift_value
from mmplan.runtime.health.taps import attention_weights
from mmplan.runtime.health.variance import contribution_variance


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_attention_that_tells_queries_apart_has_ratio_one_and_even_attention_an_infinite_one() -> None:
    ratios = collapse.spectral_ratio(torch.stack([torch.eye(6), torch.full((6, 6), 1 / 6)]))
    assert ratios[0] == pytest.approx(1.0) and ratios[1] > 1e6
    assert collapse.effective_rank(torch.eye(6)) == pytest.approx(6.0, rel=1e-5)
    assert collapse.effective_rank(torch.full((6, 6), 1 / 6)) == pytest.approx(1.0, rel=1e-3)


def test_weights_of_a_multihead_attention_are_computed_where_it_does_not_return_them() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    query, key = draw(3, 5, 8), draw(3, 7, 8, seed=1)
    _, weights = module(query, key, key, average_attn_weights=False)
    torch.testing.assert_close(attention_weights(module, query, key), weights)


def test_the_divergence_of_outputs_is_the_kl_of_their_distributions() -> None:
    clean, shaken = draw(4, 3, 9), draw(4, 3, 9, seed=1)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=clean), torch.distributions.Categorical(logits=shaken)
    ).mean()
    assert robustness.output_divergence(clean, shaken) == pytest.approx(float(expected), rel=1e-5)
    assert float(robustness.perturbed(torch.zeros(100_000)).var()) == pytest.approx(0.01, rel=0.02)


def test_jed_is_the_trace_of_the_covariance_over_the_mean_squared_norms() -> None:
    images, texts = draw(50, 6) + 1, draw(50, 6, seed=1) - 2
    joint = torch.cat([images, texts], 1)
    expected = torch.cov(joint.T, correction=0).trace() / (images.square().sum(1).mean() + texts.square().sum(1).mean())
    found = dispersion.joint_dispersion(dispersion.moments(images), dispersion.moments(texts))
    assert found == pytest.approx(float(expected), rel=1e-5)


def test_jed_below_0_15_is_a_collapse_and_perfect_retrieval_has_it_near_one() -> None:
    perfect = nn.functional.normalize(draw(200, 64), dim=-1)
    collapsed = nn.functional.normalize(draw(200, 64) + 5, dim=-1)
    high = dispersion.joint_dispersion(*[dispersion.moments(perfect)] * 2)
    low = dispersion.joint_dispersion(*[dispersion.moments(collapsed)] * 2)
    assert high > 0.95 and low < 0.15
    cosines = collapsed @ collapsed.T
    mean = (cosines.sum() - 200) / (200 * 199)
    assert float(mean) == pytest.approx(1 - low, abs=0.01) and mean > 0.85
    scores = retrieval.similarity(perfect, perfect)
    assert bool((retrieval.pair_ranks(scores) == 1).all())


def test_spearman_has_mean_ranks_of_ties() -> None:
    first, second = torch.tensor([1.0, 2, 2, 4, 5]), torch.tensor([2.0, 1, 3, 3, 9])
    ranks = torch.tensor([[1.0, 2.5, 2.5, 4, 5], [2.0, 1, 3.5, 3.5, 5]])
    assert retrieval.spearman(first, second) == pytest.approx(float(torch.corrcoef(ranks.double())[0, 1]), rel=1e-9)
    assert retrieval.spearman(first, -first) == pytest.approx(-1.0)
    assert retrieval.spearman(torch.ones(4), torch.ones(4)) == 1.0


def test_cmrc_does_not_see_random_alignment_and_sees_captions_near_every_image() -> None:
    n = 128
    blind = [retrieval.cmrc(draw(n, n, seed=seed)) or 0.0 for seed in range(20)]
    assert sum(blind) / 20 == pytest.approx(n / (n + 2), abs=0.02)  # why: see the module
    images = nn.functional.normalize(draw(n, 16), dim=-1)
    scores = images @ (images + 0.3 * draw(n, 16, seed=1)).T
    hubs = scores + 2 * draw(n, seed=2)  # added to whole columns: captions
    value = retrieval.cmrc(hubs)
    assert value is not None and value < 0.5
    assert retrieval.one_sided(hubs)
    assert not retrieval.one_sided(draw(n, n) + 2 * draw(n, seed=2))  # no direction has learned
    images = nn.functional.normalize(draw(n, 64), dim=-1)
    even = [images @ (images + 0.25 * draw(n, 64, seed=seed)).T for seed in range(2, 32)]
    assert not any(retrieval.one_sided(scores) for scores in even)
    assert all((retrieval.cmrc(scores) or 0.0) < 0.78 for scores in even)  # and yet learns well
    assert retrieval.cmrc(torch.eye(n)) is None  # nothing to judge where all are found


def test_the_variance_of_contributions_is_that_of_its_definition() -> None:
    parts = draw(5, 40).double()
    expected = parts.var(0, correction=1).sum()
    total = float(parts.sum(0).square().sum())
    assert contribution_variance(float(parts.square().sum()), total, 5) == pytest.approx(float(expected), rel=1e-9)
    with pytest.raises(ValueError, match="1 contribution has no variance"):
        contribution_variance(1.0, 1.0, 1)


@pytest.mark.parametrize(("kind", "growth"), [("sum", 16.0), ("mean", 1 / 16)])
def test_variance_grows_with_length_where_losses_are_sums_and_falls_where_they_are_means(
    kind: str, growth: float
) -> None:
    def variance(length: int, shards: int = 8) -> float:
        tokens = draw(shards, length, 256, seed=length)
        parts = tokens.sum(1) if kind == "sum" else tokens.mean(1)
        return contribution_variance(float(parts.square().sum()), float(parts.sum(0).square().sum()), shards)

    assert variance(1024) / variance(64) == pytest.approx(growth, rel=0.15)
    assert variance(64, 32) == pytest.approx(variance(64, 8), rel=0.15)  # no growth with shards, unlike reported


def test_shares_are_of_the_sum_of_norms() -> None:
    assert attenuation.shares({"vision": 3.0, "text": 1.0}) == {"vision": 0.75, "text": 0.25}
    assert attenuation.shares({"vision": 0.0, "text": 0.0}) == {"vision": 0.0, "text": 0.0}


def test_the_stronger_of_a_conflict_is_scaled_and_nobody_without_one() -> None:
    text = draw(20)
    found = conflict.worst_conflict({"vision": -5 * text, "text": text})
    assert found is not None and (found.stronger, found.weaker) == ("vision", "text")
    assert found.cosine == pytest.approx(-1.0) and found.norm_ratio == pytest.approx(5.0)
    assert conflict.scales(found, ["vision", "text"], -0.3) == {"vision": 0.3, "text": 1.0}
    agreed = conflict.worst_conflict({"vision": 5 * text, "text": text})
    assert conflict.scales(agreed, ["vision", "text"], -0.3) == {"vision": 1.0, "text": 1.0}
    assert conflict.worst_conflict({"vision": text}) is None


class Tied(nn.Module):
    """Image and text use one matrix; the image's loss is three times as steep and wants the opposite."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.text.weight = self.image.weight

    def losses(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return -3 * self.image(x).sum(), self.text(x).sum() * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image, text = self.losses(x)
        return image + text


@pytest.mark.parametrize(("mitigation", "weaker_gets_better"), [(None, False), (0.3, True)])
def test_mitigation_lets_the_weaker_modality_learn(mitigation: float | None, weaker_gets_better: bool) -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.ones(2, 4)
    plain = model.image.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(model, modalities={"vision": "image", "text": "text"}, interval=1, mitigation=mitigation) as health:
        for step in range(5):
            optimizer.zero_grad()
            model(x).backward()
            if step == 1:
                text = float(model.losses(x)[1].detach())
            optimizer.step()
    assert (float(model.losses(x)[1].detach()) < text) == weaker_gets_better
    assert model.image.weight is plain and model.text.weight is plain
    found = [r for r in health.readings if r.monitor == "shared_conflict"]
    assert found[0].value == pytest.approx(-1.0) and found[0].detail["stronger"] == "vision"


def test_divergence_of_gaussians_is_the_closed_form() -> None:
    one, other = key_values.spread(draw(1000) * 2 + 1), key_values.spread(draw(1000, seed=1))
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(one.mean, one.variance**0.5),
        torch.distributions.Normal(other.mean, other.variance**0.5),
    )
    assert key_values.divergence(one, other) == pytest.approx(float(expected), rel=1e-5)
    assert key_values.divergence(one, one) == pytest.approx(0.0, abs=1e-12)


def test_moments_of_heads_add_up_to_those_of_all_heads() -> None:
    keys = draw(3, 7, 16) * torch.arange(16)
    parts = [key_values.spread(part) for part in key_values.head_parts(keys, 4)]
    whole, added = key_values.spread(keys), sum(parts[1:], parts[0])
    assert (added.numbers, added.mean) == (whole.numbers, pytest.approx(whole.mean))
    assert added.variance == pytest.approx(float(keys.double().var(correction=0)), rel=1e-9)
    with pytest.raises(ValueError, match="16 channels"):
        key_values.head_parts(keys, 3)


def test_the_betting_density_integrates_to_one() -> None:
    # With p = exp(-u); behind u = 500 the integrand is 1 / u^2.
    grid = [(i + 0.5) / 100 for i in range(50_000)]
    integral = sum(drift.betting_density(math.exp(-u)) * math.exp(-u) for u in grid) / 100 + 1 / 500
    assert integral == pytest.approx(1.0, abs=1e-4)
    assert drift.betting_density(1.0) == pytest.approx(drift.betting_density(1 - 2e-6), abs=1e-5)


def test_false_alarms_of_the_drift_detector_stay_under_their_bound() -> None:
    readings, limit = 300, 1000.0
    fired = 0
    for seed in range(200):
        source, detector = random.Random(seed), drift.DriftDetector(seed)
        fired += any(detector.update(source.gauss(0, 1)) >= limit for _ in range(readings))
    assert fired / 200 <= readings / limit


def test_the_drift_detector_tells_when_it_began() -> None:
    source, detector = random.Random(1), drift.DriftDetector(1)
    for at in range(200):
        statistic = detector.update(source.gauss(4.0 if at >= 150 else 0.0, 1))
        if statistic >= drift.RULE.limit:
            assert abs(at - detector.readings_ago - 150) <= 5
            return
    raise AssertionError("no alarm")


def test_features_of_an_earlier_pass_are_told_from_those_of_this_one() -> None:
    ledger, made = Ledger(), [draw(2, 3, seed=seed) for seed in range(3)]
    for features in made:
        ledger.made("vision", features)
    assert [ledger.lag("vision", features) for features in reversed(made)] == [0, 1, 2]
    assert ledger.lag("vision", draw(2, 3, seed=9)) is None and ledger.lag("audio", made[0]) is None


def test_features_of_another_microbatch_are_stale() -> None:
    ledger, first, second = Ledger(), draw(2, 3), draw(2, 3, seed=1)
    ledger.made("vision", first, microbatch=0)
    ledger.made("vision", second, microbatch=1)
    assert ledger.lag("vision", first, microbatch=0) == 0
    assert ledger.lag("vision", second, microbatch=0) == 1


def test_jitter_is_the_deviation_of_delays() -> None:
    assert jitter_s([0.0, 1.0, 2.0], [0.5, 1.5, 2.5]) == 0.0
    assert jitter_s([0.0, 1.0], [0.0, 1.02]) == pytest.approx(0.01)


def test_a_mean_that_batchnorm_holds_still_does_not_drift() -> None:
    rows, watch = draw(64, 8), drift.EmbeddingDrift(learns=True)
    error = drift.standard_error(rows)
    assert error == pytest.approx(math.sqrt(float(rows.var(0, correction=0).sum()) / 64), rel=1e-5)
    far = 0
    for step in range(60):
        mean = 1e-3 * error * draw(8, seed=step) * (20 if step > 40 else 1)  # of weights that move, not of samples
        for value in drift_value("vision", watch, mean, step, 1, error):
            assert not value.holds
            far += RULES["drift"].beyond(value.value)
    assert far


def test_the_dispersion_of_batches_of_one_is_that_of_the_last_eight_samples() -> None:
    rows, pooled = draw(12, 4), dispersion.PooledDispersion()
    found = [pooled.update(*(dispersion.moments(part[at : at + 1]) for part in (rows, rows + 1))) for at in range(12)]
    assert found[:7] == [None] * 7
    for at in range(7, 12):
        last = rows[at - 7 : at + 1]
        whole = dispersion.joint_dispersion(dispersion.moments(last), dispersion.moments(last + 1))
        assert found[at] == pytest.approx(whole)
    own = dispersion.moments(rows), dispersion.moments(rows + 1)
    assert pooled.update(*own) == dispersion.joint_dispersion(*own)  # a large batch stands alone


def fires_at(losses: Iterable[float]) -> list[int]:
    """Steps at which the rule of the loss fires."""
    watch = LossWatch()
    rises = enumerate(map(watch.update, losses))
    return [step for step, rise in rises if rise is not None and rise.counts and LOSS.beyond(rise.evidence)]


def noisy(level: Callable[[int], float], spread: float, count: int, seed: int) -> list[float]:
    """Losses of small batches: log-normal about a level, with an outlier in every thirtieth step or so."""
    chance = random.Random(seed)
    return [
        level(at) * math.exp(chance.gauss(0, spread)) * (5 if chance.random() < 1 / 30 else 1) for at in range(count)
    ]


@pytest.mark.parametrize("spread", [0.05, 0.3, 0.8])
def test_noise_of_the_loss_is_no_rise(spread: float) -> None:
    for seed in range(5):
        assert not fires_at(noisy(lambda at: 2.0, spread, 600, seed))
        assert not fires_at(noisy(lambda at: 0.1 + 3 * math.exp(-at / 100), spread, 600, seed))


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.3, 0.8])
def test_a_jump_of_the_loss_beyond_its_noise_that_stays_is_told_within_a_window(spread: float) -> None:
    rise = 1.3 * math.exp(3.5 * spread)
    for seed in range(5):
        losses = noisy(lambda at: rise if at >= 200 else 1.0, spread, 230, seed)
        fired = fires_at(losses)
        assert fired and 212 <= fired[0] <= 225
        assert not fires_at([*losses[:210], *losses[100:200]])  # ten high losses and back again


def test_a_loss_that_rises_slowly_is_told_and_a_small_rise_without_noise_is_not() -> None:
    assert fires_at(1.0 + 0.003 * max(at - 100, 0) for at in range(400))
    assert not fires_at(1.0 + 0.0005 * max(at - 100, 0) for at in range(400))  # 15 %
    assert not fires_at([3.0 - 0.1 * at for at in range(80)])  # below zero too
    assert not fires_at([0.0] * 200)


def test_the_probability_of_a_rise_by_chance_is_that_of_all_orders() -> None:
    orders = [[8 - place for place in places] for places in itertools.combinations(range(9), 4)]  # of recent losses
    higher = [sum(loss > other for loss in o for other in set(range(9)) - set(o)) for o in orders]
    for order, pairs in zip(orders, higher, strict=True):
        expected = sum(other >= pairs for other in higher) / len(orders)
        assert rank_p(order, [loss for loss in range(9) if loss not in order]) == pytest.approx(expected)
    assert rank_p([2.0] * RECENT, [1.0] * BLOCK) == pytest.approx(1 / math.comb(BLOCK + RECENT, RECENT))
    assert rank_p([1.0] * RECENT, [1.0] * BLOCK) == 1.0


class Chain(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.vision, self.bridge, self.text = (nn.Linear(4, 4).to(dtype) for _ in range(3))
        self.root = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.text(self.bridge(self.root(self.vision(x)))).float().square().mean()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 1e5), (torch.bfloat16, 1e38)])
def test_the_first_module_and_the_path_of_an_overflow_are_told(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(0)
    model = Chain(dtype)
    with torch.no_grad():
        model.bridge.weight.fill_(60_000 if dtype == torch.float16 else 3e38)
        model.vision.weight.fill_(size**0.2)
    with tracing(model) as trace:
        model(torch.ones(2, 4, dtype=dtype))
    assert (trace.origin, trace.because) == ("bridge", "forward")
    assert trace.what == f"Inf in {str(dtype).removeprefix('torch.')}"
    assert trace.path == ["text"]


def test_a_bad_weight_and_a_bad_input_are_told_apart() -> None:
    model = Chain(torch.float32)
    with tracing(model) as trace:
        model(torch.full((2, 4), math.inf))
    assert (trace.origin, trace.because) == ("vision", "inputs")
    with torch.no_grad():
        model.text.weight[0, 0] = math.nan
    with tracing(model) as trace:
        model(torch.ones(2, 4))
    assert (trace.origin, trace.because) == ("text", "weights")


class Root(nn.Module):
    """sqrt, whose gradient at 0 is infinite while its value is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 0).abs().sqrt() + x


def test_an_overflow_of_the_backward_is_told_with_the_module_it_began_in() -> None:
    model = Chain(torch.float32)
    model.root = Root()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.text.weight.detach().clone()
    with attach(model, modalities={"vision": "vision", "text": "text"}, interval=100) as health:
        model(torch.ones(2, 4)).backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    (found,) = [r for r in health.readings if r.monitor == "overflow"]
    assert found.of == "root" and found.detail["because"] == "backward"
    assert str(found.detail["path"]).startswith("root > vision")
    assert before is not None and len(gradients) == 6


def test_a_limit_or_direction_can_be_chosen_and_unknown_monitors_are_named() -> None:
    rules = chosen_rules({"jed": 0.3}, {"jed": "above"})
    assert (rules["jed"].limit, rules["jed"].fires) == (0.3, "above") and RULES["jed"].limit == 0.15
    with pytest.raises(ValueError, match="no monitor 'jedd'"):
        chosen_rules({"jedd": 1.0})
