"""Which samples of a step form which microbatch, and in which order: as drawn, reordered, or balanced.

Balanced: each sample is a point of seconds per pipeline stage; the largest go first, each to the microbatch whose
busiest stage is least full, then samples of the fullest microbatch are exchanged while that helps (LPT, Graham 1969, in
several dimensions). So encoders and language model are balanced together, each as far as it holds up the pipeline.
Targets rise over the first microbatches and fall over the last, since small ones there fill and drain the pipeline
sooner. Every rank finds the same, from the data alone: seconds are whole nanoseconds, whose sums are exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.loads import sample_loads
from mmplan.planner.plan import Composition, Plan
from mmplan.planner.quantise import floor_ns
from mmplan.scenario.samples import draw_samples
from mmplan.scenario.scenario import Sample

COMPOSITIONS: tuple[Composition, ...] = ("in order", "reorder", "balance")

Positions = tuple[tuple[tuple[int, ...], ...], ...]  # [replica][microbatch][sample]: position in the step's batch

_Loads = NDArray[np.float64]  # [samples or microbatches, stage or modality]

# Ramp and its foot: makespans 4 % below equal targets with 32 microbatches on 8 stages (six seeds of synthetic data,
# lognormal text, geometric images); a foot of 0.3 or ramps of 8 gain no more.
RAMP_MICROBATCHES = 4
RAMP_FOOT = 0.5
_EXCHANGES = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class StepComposition:
    """The samples of one optimizer step by microbatch; `indices` are their global ones."""

    samples: tuple[tuple[tuple[Sample, ...], ...], ...]
    indices: Positions


class SampleTimes:
    """Nanoseconds of a sample, forward and backward, by stage and by modality. Equal samples are priced once."""

    def __init__(self, plan: Plan, graph: ComputationGraph, costs: CostModel) -> None:
        self._plan, self._costs = plan, costs
        self._layers = [[graph.layer(layer) for layer in stage.layers] for stage in plan.stages]
        self.modalities = tuple(dict.fromkeys(layer.modality for layer in graph.layers()))
        self._known: dict[Sample, tuple[list[float], list[float]]] = {}

    def by_stage(self, samples: Sequence[Sample]) -> _Loads:
        """`[samples, stage]`, in ns."""
        return np.array([self._one(sample)[0] for sample in samples])

    def by_modality(self, samples: Sequence[Sample]) -> _Loads:
        """`[samples, modality]`, in ns."""
        return np.array([self._one(sample)[1] for sample in samples])

    def _one(self, sample: Sample) -> tuple[list[float], list[float]]:
        if sample not in self._known:
            loads = sample_loads(self._plan.scenario, [sample])
            stages, modalities = [0.0] * len(self._layers), dict.fromkeys(self.modalities, 0.0)
            for stage, layers in enumerate(self._layers):
                layout = self._plan.layout(stage)
                for layer in layers:
                    load = loads[layer.module]
                    layer_s = self._costs.forward_s(layer, load, layout) + self._costs.backward_s(layer, load, layout)
                    stages[stage] += floor_ns(layer_s)
                    modalities[layer.modality] += floor_ns(layer_s)
            self._known[sample] = (stages, list(modalities.values()))
        return self._known[sample]


def step_composition(plan: Plan, step: int, composition: Composition, times: SampleTimes | None) -> StepComposition:
    """The microbatches of optimizer step `step`; in order needs no `times`."""
    scenario = plan.scenario
    first = step * scenario.global_batch
    samples = draw_samples(scenario.data, scenario.seed, first, scenario.global_batch)
    priced = np.zeros((len(samples), 0)) if times is None else times.by_stage(samples)
    positions = compose(priced, plan.dp, plan.microbatches, composition)
    return StepComposition(
        samples=tuple(tuple(tuple(samples[i] for i in group) for group in row) for row in positions),
        indices=tuple(tuple(tuple(first + i for i in group) for group in row) for row in positions),
    )


def plan_step(plan: Plan, step: int) -> StepComposition:
    """The microbatches that a run of the plan has in optimizer step `step`."""
    if plan.composition == "in order":  # needs no prices, which some clusters have none of
        return step_composition(plan, step, "in order", None)
    times = SampleTimes(plan, build_graph(plan.scenario), AnalyticCostModel(plan.scenario))
    return step_composition(plan, step, plan.composition, times)


def compose(times: _Loads, dp: int, microbatches: int, composition: Composition) -> Positions:
    """Positions of samples by replica and microbatch.

    Args:
        times: `[samples, stage]`; the samples are a multiple of dp * microbatches.
    """
    in_order = np.arange(len(times)).reshape(dp, microbatches, -1)
    if composition == "in order":
        return _positions(in_order.tolist())
    loads = _normalised(times)
    if composition == "reorder":
        return _positions([_small_large_small(row.tolist(), loads) for row in in_order])
    targets = np.tile(ramp(microbatches), dp)
    bins = _balanced(loads, targets / targets.sum() * len(loads))
    rows = _dealt([bins[r * microbatches : (r + 1) * microbatches] for r in range(dp)], loads)
    return _positions([_small_large_small(row, loads) for row in rows])


def imbalance(step: StepComposition, times: SampleTimes) -> dict[str, float]:
    """By modality that occurs: the largest microbatch over the mean one."""
    totals = np.array([times.by_modality(group).sum(axis=0) for row in step.samples for group in row])
    return {
        modality: float(totals[:, column].max() / totals[:, column].mean())
        for column, modality in enumerate(times.modalities)
        if totals[:, column].sum() > 0
    }


def ramp(microbatches: int) -> NDArray[np.float64]:
    """Relative target of each microbatch: from the foot up, flat, and down again; flat for very few."""
    length = min(RAMP_MICROBATCHES, microbatches // 4)
    rise = RAMP_FOOT + (1 - RAMP_FOOT) * np.arange(length) / max(length, 1)
    return np.concatenate([rise, np.ones(microbatches - 2 * length), rise[::-1]])


def _positions(rows: Sequence[Sequence[Sequence[int]]]) -> Positions:
    return tuple(tuple(tuple(int(i) for i in group) for group in row) for row in rows)


def _normalised(times: _Loads) -> _Loads:
    """In units of a mean sample on the busiest stage."""
    result: _Loads = times / max(float(times.mean(axis=0).max()), 1.0)
    return result


def _dealt(rows: list[list[list[int]]], loads: _Loads) -> list[list[list[int]]]:
    """Microbatches of equal targets dealt to replicas anew, the largest to the one with least so far: no replica shall
    come late to the reduction."""
    totals = np.zeros((len(rows), loads.shape[1]))
    dealt: list[list[list[int]]] = [[] for _ in rows]
    for groups in zip(*rows, strict=True):
        sums = np.array([loads[group].sum(axis=0) for group in groups])
        poorest = np.argsort(totals.max(axis=1), kind="stable").tolist()
        for replica, index in zip(poorest, np.argsort(-sums.max(axis=1), kind="stable").tolist(), strict=True):
            dealt[replica].append(groups[index])
            totals[replica] += sums[index]
    return dealt


def _small_large_small(groups: list[list[int]], loads: _Loads) -> list[list[int]]:
    """The same microbatches, the smallest first and last."""
    sizes = [float(loads[group].sum(axis=0).max()) for group in groups]
    ascending = sorted(range(len(groups)), key=lambda index: (sizes[index], index))
    return [groups[index] for index in ascending[::2] + ascending[1::2][::-1]]


def _balanced(loads: _Loads, targets: NDArray[np.float64]) -> list[list[int]]:
    """Samples of each microbatch, ascending; none stays empty."""
    filled = np.zeros((len(targets), loads.shape[1]))
    bins: list[list[int]] = [[] for _ in targets]
    for place, sample in enumerate(np.argsort(-loads.max(axis=1), kind="stable").tolist()):
        fullness = ((filled + loads[sample]) / targets[:, None]).max(axis=1)
        empty = np.array([not group for group in bins])
        if len(loads) - place <= empty.sum():
            fullness[~empty] = np.inf
        chosen = int(fullness.argmin())
        bins[chosen].append(sample)
        filled[chosen] += loads[sample]
    _exchange(bins, filled, loads, targets)
    return [sorted(group) for group in bins]


def _exchange(bins: list[list[int]], filled: _Loads, loads: _Loads, targets: NDArray[np.float64]) -> None:
    """Swap a sample of the fullest microbatch with one elsewhere while the fuller of the two becomes less full."""
    owner = np.empty(len(loads), dtype=np.int64)
    for index, group in enumerate(bins):
        owner[group] = index
    for _ in range(_EXCHANGES):
        worst = int((filled / targets[:, None]).max(axis=1).argmax())
        before = float((filled[worst] / targets[worst]).max())
        own = np.array(bins[worst])
        change = loads[None, :, :] - loads[own][:, None, :]  # [own, other, stage]
        here = ((filled[worst] + change) / targets[worst]).max(axis=2)
        there = ((filled[owner][None] - change) / targets[owner][None, :, None]).max(axis=2)
        fuller = np.where(owner[None, :] == worst, np.inf, np.maximum(here, there))
        give, take = np.unravel_index(int(fuller.argmin()), fuller.shape)
        if fuller[give, take] >= before * (1 - 1e-9):
            return
        a, b = int(own[give]), int(take)
        other = int(owner[b])
        bins[worst][bins[worst].index(a)], bins[other][bins[other].index(b)] = b, a
        owner[a], owner[b] = other, worst
        filled[worst] += loads[b] - loads[a]
        filled[other] += loads[a] - loads[b]
