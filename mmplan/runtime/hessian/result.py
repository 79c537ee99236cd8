"""What a measurement says: a value with its interval per layer and modality, the zones, and how stable they are.

A value is the mean over batches of the largest eigenvalue of each batch's loss. That is no less than the largest
eigenvalue of the mean loss (the largest eigenvalue is convex), so larger batches give smaller values. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from mmplan.runtime.hessian.settings import Settings
from mmplan.runtime.hessian.statistics import Interval, mean_interval, overlap, rank_correlation
from mmplan.runtime.hessian.values import Key, Value
from mmplan.scenario.scenario import Model
from mmplan.scenario.sensitivity import SCHEMA, Sensitivity, zone_runs
from mmplan.scenario.zone_rules import parse_rule

_DIGITS = 6  # significant ones in the file: more than the eigenvalues are known to


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerValue:
    """
    Attributes:
        value: mean largest eigenvalue over `batches` batches; from `low` to `high` its 95 % interval, None for one.
        least: mean smallest eigenvalue, as far as it was found on the way to the largest.
        residual: the worst of any batch, as a fraction of its eigenvalue.
        iterations: the most of any batch.
        converged: in all batches; where not, the value is too small.
        difference: see `differences.py`; None where it was not looked at.
        trace: mean estimate with the ends of its interval; None where it was not asked for.
    """

    layer: str
    modality: str
    value: float
    low: float | None
    high: float | None
    batches: int
    least: float
    residual: float
    iterations: int
    converged: bool
    trace: Interval | None
    difference: float | None
    parameters: int
    frozen: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """
    Attributes:
        zones: runs of neighbouring sensitive layers, each with its short name.
        rank_correlation: modality -> Spearman's between the seeds' values of its layers, the mean over pairs of seeds;
            None with one seed or below three layers.
        zone_overlap: sensitive layers of all seeds over those of any; None with one seed.
        losses: modality -> mean loss of its branch.
        missing: layers of which no batch had a modality.
        source: where it comes from, as the file has it.
    """

    values: tuple[LayerValue, ...]
    zones: tuple[tuple[str, tuple[str, ...]], ...]
    rank_correlation: Mapping[str, float | None]
    zone_overlap: float | None
    losses: Mapping[str, float]
    missing: tuple[str, ...]
    rule: str
    source: Mapping[str, Any]

    def sensitive(self) -> set[str]:
        return {layer for _, layers in self.zones for layer in layers}


def measured(
    known: Mapping[Key, Value],
    settings: Settings,
    model: Model,
    sizes: Mapping[str, int],
    frozen: frozenset[str],
    source: Mapping[str, Any],
) -> Measured:
    """Summarise the values.

    Args:
        sizes: layer -> parameters, in the order of the graph.
    """
    rows: dict[tuple[str, str], list[Value]] = {}
    for key, value in sorted(known.items()):
        rows.setdefault((key.layer, key.modality), []).append(value)
    modalities = list(dict.fromkeys(key.modality for key in known))
    values = tuple(
        _layer_value(layer, modality, rows[layer, modality], size, layer in frozen)
        for layer, size in sizes.items()
        for modality in modalities
        if (layer, modality) in rows
    )
    by_seed = [_means(known, seed, settings) for seed in range(settings.seeds)]
    rule = parse_rule(settings.rule)
    whole = Sensitivity(values=_nested(values), rule=rule)
    seeds_sensitive = [Sensitivity(values=means, rule=rule).sensitive() for means in by_seed]
    correlations = {modality: _agreement([means.get(modality, {}) for means in by_seed]) for modality in modalities}
    losses = {
        modality: float(np.mean([value.loss for key, value in known.items() if key.modality == modality]))
        for modality in modalities
    }
    return Measured(
        values=values,
        zones=tuple(zone_runs(whole.sensitive(), model)),
        rank_correlation=correlations,
        zone_overlap=overlap(seeds_sensitive),
        losses=losses,
        missing=tuple(layer for layer in sizes if not any(value.layer == layer for value in values)),
        rule=settings.rule,
        source=source,
    )


def sensitivity_document(found: Measured) -> dict[str, Any]:
    """The sensitivity file."""
    layers: dict[str, dict[str, float]] = {}
    details: dict[str, dict[str, Any]] = {}
    for one in found.values:
        layers.setdefault(one.layer, {})[one.modality] = _digits(one.value)
        details.setdefault(one.layer, {"parameters": one.parameters, "frozen": one.frozen})[one.modality] = {
            "low": _rounded(one.low),
            "high": _rounded(one.high),
            "batches": one.batches,
            "least": _rounded(one.least),
            "residual": _rounded(one.residual),
            "iterations": one.iterations,
            "converged": one.converged,
            "difference": _rounded(one.difference),
            **({} if one.trace is None else {"trace": [_rounded(number) for number in one.trace]}),
        }
    stability = {
        "rank_correlation": {name: _rounded(value) for name, value in found.rank_correlation.items()},
        "zone_overlap": _rounded(found.zone_overlap),
        "losses": {name: _rounded(value) for name, value in found.losses.items()},
    }
    return {
        "schema": SCHEMA,
        "rule": found.rule,
        "layers": layers,
        "source": {**found.source, **stability},
        "details": details,
    }


def _layer_value(layer: str, modality: str, values: Sequence[Value], parameters: int, frozen: bool) -> LayerValue:
    mean, low, high = mean_interval([value.largest for value in values])
    traces = [value.trace for value in values if value.trace is not None]
    return LayerValue(
        layer=layer,
        modality=modality,
        value=mean,
        low=low,
        high=high,
        batches=len(values),
        least=float(np.mean([value.least for value in values])),
        residual=max(value.residual / abs(value.largest) if value.largest else 0.0 for value in values),
        iterations=max(value.iterations for value in values),
        converged=all(value.converged for value in values),
        trace=mean_interval(traces) if traces else None,
        difference=next((value.difference for value in values if value.difference is not None), None),
        parameters=parameters,
        frozen=frozen,
    )


def _nested(values: Sequence[LayerValue]) -> dict[str, dict[str, float]]:
    """Modality -> layer -> value."""
    nested: dict[str, dict[str, float]] = {}
    for one in values:
        nested.setdefault(one.modality, {})[one.layer] = one.value
    return nested


def _means(known: Mapping[Key, Value], seed: int, settings: Settings) -> dict[str, dict[str, float]]:
    """Modality -> layer -> mean over the batches of one seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for key, value in known.items():
        if key.batch // settings.batches == seed:
            found.setdefault(key.modality, {}).setdefault(key.layer, []).append(value.largest)
    return {m: {layer: float(np.mean(row)) for layer, row in layers.items()} for m, layers in found.items()}


def _agreement(means: Sequence[Mapping[str, float]]) -> float | None:
    pairs = [rank_correlation(a, b) for a, b in combinations(means, 2)]
    known = [value for value in pairs if value is not None]
    return float(np.mean(known)) if known else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else _digits(value)


def _digits(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
