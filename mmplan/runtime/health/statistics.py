"""What a sampled step shows, over the right ranks; every rank of a group calls these in the same order."""

from collections.abc import Iterator, Mapping
from statistics import median

import torch
from torch import Tensor, nn

from mmplan.runtime.health import attenuation, collapse, conflict, dispersion, drift, key_values, retrieval, staleness
from mmplan.runtime.health.dispersion import PooledDispersion, moments
from mmplan.runtime.health.drift import EmbeddingDrift
from mmplan.runtime.health.groups import each, largest, summed
from mmplan.runtime.health.judge import Value
from mmplan.runtime.health.key_values import Spread
from mmplan.runtime.health.placed import square_sum
from mmplan.runtime.health.places import by_modality
from mmplan.runtime.health.readings import BEGAN
from mmplan.runtime.health.settings import Settings
from mmplan.runtime.health.shared_uses import SharedUses
from mmplan.runtime.health.taps import Taps


def alignment(
    taps: Taps, settings: Settings, drifts: dict[str, EmbeddingDrift], pooled: PooledDispersion, step: int
) -> Iterator[Value]:
    """JED, CMRC and drift of the embeddings of all replicas; a replica or stage may have some of them only."""
    groups = settings.groups
    own = {name: torch.cat(rows).cpu() for name, rows in taps.embeddings.items()}
    parts = [part for row in each(each(own, groups.stages), groups.replicas) for part in row]
    whole = {
        name: torch.cat([part[name] for part in parts if name in part])
        for name in settings.embeddings
        if any(name in part for part in parts)
    }
    for name, drift_of in drifts.items():
        if name in whole:
            mean, error = whole[name].double().mean(0), drift.standard_error(whole[name])
            yield from drift_value(name, drift_of, mean, step, settings.interval, error)
    if len(whole) > 1:
        yield from alignment_values(whole, pooled)


def attention(taps: Taps, settings: Settings) -> Iterator[Value]:
    """Median ratio over the matrices of all passes, heads and replicas."""
    if not settings.cross_attention:
        return
    own: tuple[list[float], list[float]] = [], []
    for matrices in taps.attention:
        own[0].extend(collapse.spectral_ratio(matrices).tolist())
        own[1].extend(collapse.effective_rank(matrices).tolist())
    groups = settings.groups
    parts = [part for row in each(each(own, groups.shards), groups.replicas) for part in row]
    ratios, ranks = ([value for part in parts for value in part[place]] for place in (0, 1))
    if ratios:
        left = median(ranks)
        yield Value(
            collapse.RULE.monitor,
            settings.cross_attention[-1],
            median(ratios),
            {"effective_rank": left},
            "stage",
            holds=left < collapse.FEWEST_DIRECTIONS,
        )


def gradient_shares(model: nn.Module, taps: Taps, settings: Settings) -> Iterator[Value]:
    """Shares at the outputs of the branches and at the key side of each cross-attention. The query side is told and not
    judged: it is reached through the softmax alone, which passes little on once attention has become sharp. Norms of
    the gradients of all parameters of each modality are told with the branches."""
    groups = settings.groups
    norms = {f"norm of {modality}": norm for modality, norm in gradient_norms(model, settings).items()}
    places = {"branches": tuple(settings.branches)} | dict.fromkeys(settings.cross_attention, ("query", "key"))
    for place, sides in places.items():
        found = taps.flows.get(place, {})
        squares = [float(found.get(side, 0.0)) for side in sides]
        for group in (groups.replicas, groups.stages):
            squares = summed(squares, group)
        if len(sides) > 1 and (groups.stages is not None or not set(found) < set(sides)):
            yield from share_values(place, dict(zip(sides, squares, strict=True)), norms)


def share_values(place: str, squares: Mapping[str, float], norms: Mapping[str, float]) -> Iterator[Value]:
    """Of squared gradients by side; none where no gradient came at all."""
    if not sum(squares.values()) > 0:
        return
    parts = attenuation.shares({side: square**0.5 for side, square in squares.items()})
    told: dict[str, float | str | None] = {**parts, **norms} if place == "branches" else {**parts}
    for side in parts if place == "branches" else ("key",):
        yield Value(attenuation.RULE.monitor, f"{place}: {side}", parts[side] * len(parts) / 2, told)


def alignment_values(whole: Mapping[str, Tensor], pooled: PooledDispersion) -> Iterator[Value]:
    """JED and CMRC of the first two embeddings, each [n, d]."""
    image, text = tuple(whole)[:2]
    dispersion_of = pooled.update(moments(whole[image]), moments(whole[text]))
    if dispersion_of is not None:
        yield Value(dispersion.RULE.monitor, f"{image}+{text}", dispersion_of)
    if whole[image].shape == whole[text].shape:
        scores = retrieval.similarity(whole[image], whole[text])
        value = retrieval.cmrc(scores)
        if value is not None:
            found_first = retrieval.recalls(scores)
            detail: dict[str, float | str | None] = {
                "image_to_text_recall": found_first[0],
                "text_to_image_recall": found_first[1],
                "pairs": float(len(scores)),
            }
            holds = retrieval.one_sided(scores)
            yield Value(retrieval.RULE.monitor, f"{image}+{text}", value, detail, holds=holds)


def drift_value(
    name: str, drift_of: EmbeddingDrift, mean: Tensor, step: int, interval: int, error: float = 0.0
) -> Iterator[Value]:
    """`error`: the mean's standard error, 0 where it is not known."""
    found = drift_of.update(mean)
    if found is not None:
        began = float(step - interval * found.readings_ago)
        detail: dict[str, float | str | None] = {"distance": found.distance, "standard_error": error, BEGAN: began}
        yield Value(drift.RULE.monitor, name, found.statistic, detail, holds=found.distance >= error)


def conflicts(uses: SharedUses) -> Iterator[Value]:
    for parameter, found in uses.conflicts():
        detail: dict[str, float | str | None] = {
            "stronger": found.stronger,
            "weaker": found.weaker,
            "norm_ratio": found.norm_ratio,
        }
        yield Value(conflict.RULE.monitor, parameter, found.cosine, detail, "stage")


def key_value_shift(taps: Taps, settings: Settings) -> Iterator[Value]:
    """Of ranks that share the heads, or of the parts that `head_shards` ranks would have."""
    group = settings.groups.shards
    aligned: dict[str, Spread] = {}
    worst: dict[str, float] = {}
    for modality in settings.keys:
        own = taps.spreads.get(modality, [Spread(0.0, 0.0, 0.0)] * settings.head_shards)
        parts = [Spread(*summed(list(part), settings.groups.replicas)) for part in own]
        if not all(part.numbers for part in parts):  # alike on all ranks of the stage
            continue
        total = sum(parts[1:], parts[0])
        aligned[modality] = Spread(*summed(list(total), group))
        worst[modality] = largest([max(key_values.divergence(part, aligned[modality]) for part in parts)], group)[0]
    names = list(aligned)
    for modality, shift in worst.items():
        others = [key_values.divergence(aligned[modality], aligned[other]) for other in names if other != modality]
        detail: dict[str, float | str | None] = {"to_other_modality": max(others)} if others else {}
        yield Value(key_values.RULE.monitor, modality, shift, detail, "stage")


def stale(taps: Taps) -> Iterator[Value]:
    for modality, lag in taps.lags.items():
        yield Value(staleness.STALE.monitor, modality, float(lag), known="rank")


def gradient_norms(model: nn.Module, settings: Settings) -> dict[str, float]:
    """Norm of the gradient of each modality's parameters, over the stages of the pipeline."""
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and not p.grad.is_sparse}
    groups = by_modality(named, settings.places)
    squares = [float(square_sum([_tensor(named[name]) for name in names])) for names in groups.values()]
    squares = summed(squares, settings.groups.stages)
    return {modality: square**0.5 for modality, square in zip(groups, squares, strict=True)}


def _tensor(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient
