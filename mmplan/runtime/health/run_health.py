"""Health of a run of `mmplan execute`: losses, where in its stages a number was none, and what its ranks see in sampled
steps (`rank_taps.py`), as readings.

Not read there are `robustness`, which would run the pipeline again with noise, and `shared_conflict`: a parameter that
modalities share lies on one stage, or is none.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

import mmplan
from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.runtime.finite import Unsound, order
from mmplan.runtime.health import collapse, key_values, loss, overflow, staleness, statistics, variance
from mmplan.runtime.health.dispersion import PooledDispersion
from mmplan.runtime.health.drift import EmbeddingDrift, standard_error
from mmplan.runtime.health.judge import Judge, Value
from mmplan.runtime.health.key_values import Spread
from mmplan.runtime.health.loss import LossWatch
from mmplan.runtime.health.rank_taps import SCALED, variance_silence
from mmplan.runtime.health.readings import write_header, write_readings
from mmplan.runtime.health.run_readings import feature_timing
from mmplan.runtime.health.seen import Seen
from mmplan.runtime.health.settings import Settings
from mmplan.runtime.places import place_of


class RunHealth:
    """Writes one file, on rank 0; `modalities`: of stages.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(
        self, path: Path, plan: Plan, modalities: Mapping[int, str], settings: Settings, *, one_clock: bool
    ) -> None:
        self._plan, self._modalities, self._settings, self._one_clock = plan, modalities, settings, one_clock
        self._judge, self._losses = Judge(settings.rules, 0), LossWatch()
        self._dispersion = PooledDispersion()
        self._drifts = {name: EmbeddingDrift(learns=True) for name in settings.embeddings or settings.branches}
        try:
            self._file = path.open("w")
        except OSError as error:
            raise InputError(f"cannot write: {error.strerror}", file=path) from error
        versions = {"mmplan_version": mmplan.__version__, "torch_version": torch.__version__}
        silent = {
            "robustness": "it would run the whole pipeline again with noise on the image embeddings",
            "shared_conflict": "each parameter of a run is used by one modality, or lies on one stage",
        }
        if "fp16" in plan.scenario.precisions:
            silent["gradient_attenuation"] = SCALED
        if variance_silence(plan):
            silent["gradient_variance"] = variance_silence(plan)
        asked = {"interval": settings.interval, "modalities": dict(settings.modalities), "silent": silent}
        write_header(self._file, {**versions, "rank": 0, **asked})

    def take(
        self,
        step: int,
        losses: Mapping[str, float],
        unsound: Sequence[Unsound | None],
        seen: Sequence[Seen | None],
    ) -> None:
        """Take a step before it is judged, which may end the run.

        Args:
            losses: by module, as they are.
            unsound: what each rank first saw that was no number.
            seen: what each rank saw, None where the step was not sampled.
        """
        values = [*self._overflow(unsound), *self._loss(losses)]
        ranks = {rank: one for rank, one in enumerate(seen) if one is not None}
        if ranks and not any(unsound):
            values += self._sampled(step, ranks)
        write_readings(self._file, [self._judge.reading(step, value) for value in values])

    def close(self) -> None:
        self._file.close()

    def _overflow(self, unsound: Sequence[Unsound | None]) -> list[Value]:
        """The first in the order of computing; the path is where the other ranks saw it."""
        seen = sorted(((order(one), rank, one) for rank, one in enumerate(unsound) if one), key=lambda item: item[:2])
        if not seen:
            return []
        _, rank, first = seen[0]
        detail: dict[str, float | str | None] = {
            "modality": self._modalities.get(first.stage, ""),
            "because": "backward" if first.microbatch < 0 else "forward",
            "path": " > ".join(f"{one.what} (rank {at}, stage {one.stage})" for _, at, one in seen),
            "rank": float(rank),
        }
        if first.microbatch >= 0:
            detail["microbatch"] = float(first.microbatch)
        return [Value(overflow.RULE.monitor, first.what, float(len(seen)), detail)]

    def _loss(self, losses: Mapping[str, float]) -> list[Value]:
        if not losses:
            return []
        total = sum(losses.values())
        if not math.isfinite(total):
            return [Value(loss.RULE.monitor, "loss", math.nan, {"loss": total})]
        rise = self._losses.update(total)
        return [] if rise is None else [rise.value(total)]

    def _sampled(self, step: int, ranks: Mapping[int, Seen]) -> Iterator[Value]:
        yield from _headroom(ranks)
        yield from self._alignment(step, ranks)
        yield from self._shares(ranks)
        yield from _attention(ranks, self._settings)
        yield from self._variance(ranks)
        yield from self._key_values(ranks)
        for modality in self._settings.branches:
            lags = [one.lags[modality] for one in ranks.values() if modality in one.lags]
            if lags:
                yield Value(staleness.STALE.monitor, modality, float(max(lags)))
        timeline = [item for one in ranks.values() for item in one.timeline]
        asked_s = [asked for one in ranks.values() for asked in one.asked_s]
        first = {rank: place for rank in ranks if (place := place_of(self._plan, rank)).shard == 0}
        yield from feature_timing(
            self._plan,
            timeline,
            asked_s,
            {rank: place.replica for rank, place in first.items()},
            alone_s={},
            one_clock=self._one_clock,
        )

    def _alignment(self, step: int, ranks: Mapping[int, Seen]) -> Iterator[Value]:
        """Drift of all embeddings; JED and CMRC where the job says which modules give one for each sample."""
        whole: dict[str, torch.Tensor] = {}
        for name, drift_of in self._drifts.items():
            parts = [one.embeddings[name] for one in ranks.values() if name in one.embeddings]
            if not parts:
                continue
            total = torch.tensor([part.total for part in parts], dtype=torch.float64).sum(0)
            mean = total / sum(part.count for part in parts)
            error = 0.0
            if all(part.rows is not None for part in parts):
                whole[name] = torch.tensor([row for part in parts for row in part.rows or ()])
                error = standard_error(whole[name])
            yield from statistics.drift_value(name, drift_of, mean, step, self._settings.interval, error)
        if len(whole) > 1:
            yield from statistics.alignment_values(whole, self._dispersion)

    def _shares(self, ranks: Mapping[int, Seen]) -> Iterator[Value]:
        if "fp16" in self._plan.scenario.precisions:
            return
        places = {"branches": tuple(self._settings.branches)}
        places |= dict.fromkeys(self._settings.cross_attention, ("query", "key"))
        for place, sides in places.items():
            told = [one.flows[place] for one in ranks.values() if place in one.flows]
            squares = {side: sum(flows.get(side, 0.0) for flows in told) for side in sides}
            if len(sides) > 1 and all(any(side in flows for flows in told) for side in sides):
                yield from statistics.share_values(place, squares, {})

    def _variance(self, ranks: Mapping[int, Seen]) -> Iterator[Value]:
        """Of what each microbatch of each replica adds."""
        count = self._plan.dp * self._plan.cp * self._plan.microbatches
        squares = [one.squares for one in ranks.values() if one.squares is not None]
        if len(squares) < len(ranks) or count < 2:
            return
        total_square = sum(one.total_square for one in ranks.values())
        value = variance.contribution_variance(sum(squares), total_square, count)
        mean_square = total_square / count**2
        relative = value / mean_square if mean_square > 0 else None
        yield Value(variance.RULE.monitor, "gradient", value, {"contributions": float(count), "relative": relative})

    def _key_values(self, ranks: Mapping[int, Seen]) -> Iterator[Value]:
        """The largest divergence of a rank's heads, or of a part of all heads, from all of them."""
        parts: dict[str, dict[str, Spread]] = {}
        for rank, one in ranks.items():
            for name, part in one.keys.items():
                of, _, index = name.rpartition("/")
                place = f"{place_of(self._plan, rank).shard}/{index}"
                known = parts.setdefault(of, {})
                known[place] = known[place] + part if place in known else part
        for of, by_place in parts.items():
            spreads = list(by_place.values())
            total = sum(spreads[1:], spreads[0])
            yield Value(key_values.RULE.monitor, of, max(key_values.divergence(part, total) for part in spreads))


def _headroom(ranks: Mapping[int, Seen]) -> Iterator[Value]:
    found = [(*one.headroom, rank) for rank, one in ranks.items() if one.headroom is not None]
    if found:
        most, layer, rank = max(found)
        yield Value(overflow.HEADROOM.monitor, layer, most, {"rank": float(rank)})


def _attention(ranks: Mapping[int, Seen], settings: Settings) -> Iterator[Value]:
    """Of the last cross-attention that any rank has."""
    seen = [one for one in ranks.values() if one.ratios and one.attention_at in settings.cross_attention]
    if not seen:
        return
    last = max((one.attention_at for one in seen), key=settings.cross_attention.index)
    own = [one for one in seen if one.attention_at == last]
    ratios = [value for one in own for value in one.ratios]
    left = median(value for one in own for value in one.effective_ranks)
    holds = left < collapse.FEWEST_DIRECTIONS
    yield Value(collapse.RULE.monitor, last, median(ratios), {"effective_rank": left}, holds=holds)
