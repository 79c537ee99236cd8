"""Step times of a plan over the data: many steps drawn, composed and priced at once by the array clock.

Exactly what `simulate` says of each step, without its timeline. The program is lowered once with every tensor; where a
microbatch lacks one, its receive is shut: no one waits for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmplan.cost_models.cost_model import CostModel
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layout import Trained
from mmplan.cost_models.load import Loads
from mmplan.cost_models.loads import sample_loads
from mmplan.cost_models.planned_memory import planned_kept_bytes, planned_state_bytes
from mmplan.planner.columns import RECV, REDUCE, SEND, W
from mmplan.planner.composition import SampleTimes, StepComposition, imbalance, step_composition
from mmplan.planner.durations import made_whole_s, replicas_per_node
from mmplan.planner.lower import plan_pipeline, stage_trained
from mmplan.planner.memory_over_time import memory_events, peak_bytes
from mmplan.planner.place import place
from mmplan.planner.plan import Composition, Plan
from mmplan.planner.prediction import Prediction
from mmplan.planner.simulate import simulate
from mmplan.planner.stage_graph import StageGraph, build_stage_graph
from mmplan.planner.step_loads import split_samples
from mmplan.planner.ties import tie_bytes, tie_near, tie_seconds, tied_tables
from mmplan.planner.waves import Waves, gated_waves, node_ends
from mmplan.planner.working import working_bytes
from mmplan.scenario.scenario import Sample

Floats = NDArray[np.float64]

_CELLS = 4_000_000  # durations priced at once: 32 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Simulated seconds of every drawn step; `imbalance`: by modality the largest microbatch over the mean one, on
    average over the steps; `peak_memory_bytes`: of the fullest rank in the fullest step; `fits`: no rank ever passed
    the capacity that the plan gives it."""

    composition: Composition
    step_s: tuple[float, ...]
    imbalance: dict[str, float]
    peak_memory_bytes: int
    fits: bool

    @property
    def mean_s(self) -> float:
        return float(np.mean(self.step_s))

    @property
    def error_s(self) -> float:
        """Standard error of the mean."""
        return float(np.std(self.step_s, ddof=1) / np.sqrt(len(self.step_s))) if len(self.step_s) > 1 else 0.0

    def quantile_s(self, fraction: float) -> float:
        return float(np.quantile(self.step_s, fraction))


def step_times(
    plan: Plan, graph: ComputationGraph, costs: CostModel, *, steps: int, compositions: Sequence[Composition]
) -> tuple[StepTimes, ...]:
    """Steps 0 to `steps` - 1 of the data under each composition."""
    uneven = plan.meshes or plan.prefetch or plan.batch_factor > 1
    clock = _SimulatedSteps(plan, graph, costs) if uneven else _StepClock(plan, graph, costs)
    times = SampleTimes(plan, graph, costs)
    results = []
    for composition in compositions:
        drawn = [step_composition(plan, step, composition, times) for step in range(steps)]
        ratios: dict[str, list[float]] = {}
        for one in drawn:
            for modality, ratio in imbalance(one, times).items():
                ratios.setdefault(modality, []).append(ratio)
        means = {modality: float(np.mean(values)) for modality, values in ratios.items()}
        step_s, peaks = clock.seconds(drawn), clock.peak_bytes(drawn)
        results.append(
            StepTimes(
                composition=composition,
                step_s=tuple(step_s.tolist()),
                imbalance=means,
                peak_memory_bytes=int(peaks.max()),
                fits=bool((peaks <= clock.capacity_bytes).all()),
            )
        )
    return tuple(results)


class _Finish(NamedTuple):
    """Whether a pipeline rank reduces gradients, and the seconds of its reductions, and of its update with gathers."""

    reduces: bool
    reduce_s: float
    update_s: float


_FINISH = _Finish._fields[1:]


class _SimulatedSteps:
    """The steps of a plan with meshes of their own, or with layers that run several microbatches at once or a step
    ahead, simulated one by one; what is made ahead is as much as what is read."""

    def __init__(self, plan: Plan, graph: ComputationGraph, costs: CostModel) -> None:
        self._plan, self._graph, self._costs = plan, graph, costs
        self._known: dict[int, tuple[StepComposition, Prediction]] = {}  # by id; the step is held so that it stays its
        self.capacity_bytes = np.zeros(0, dtype=np.int64)

    def seconds(self, drawn: Sequence[StepComposition]) -> Floats:
        """`[steps]`."""
        return np.array([self._simulated(one).step_time_s for one in drawn])

    def peak_bytes(self, drawn: Sequence[StepComposition]) -> NDArray[np.int64]:
        """`[steps, ranks]`, as `simulate` counts it."""
        steps = [self._simulated(one) for one in drawn]
        self.capacity_bytes = np.array([self._plan.stages[rank.stage].capacity_bytes for rank in steps[0].ranks])
        return np.array([[rank.peak_memory_bytes for rank in step.ranks] for step in steps])

    def _simulated(self, one: StepComposition) -> Prediction:
        if id(one) not in self._known:
            parts = split_samples(self._plan, one.samples)
            loads = [[sample_loads(self._plan.scenario, samples) for samples in part] for part in parts]
            self._known[id(one)] = one, simulate(self._plan, self._graph, self._costs, loads)
        return self._known[id(one)][1]


class _StepClock:
    """The plan's program as waves, and the prices of microbatches met so far."""

    def __init__(self, plan: Plan, graph: ComputationGraph, costs: CostModel) -> None:
        self._plan, self._graph, self._costs = plan, graph, costs
        self._stages: StageGraph = build_stage_graph([stage.layers for stage in plan.stages], graph)
        pipeline = plan_pipeline(plan, graph)
        sizes = np.ones((1, plan.microbatches, len(pipeline.transfers)), dtype=np.int64)
        self._columns = place(pipeline, sizes).columns
        self._waves: Waves = gated_waves(self._columns)
        self._layers = [[graph.layer(layer) for layer in stage.layers] for stage in plan.stages]
        self._layouts = [plan.layout(stage) for stage in range(len(plan.stages))]
        self._rows: dict[tuple[Sample, ...], int] = {}
        self._prices: list[Floats] = []  # [stage, F B I W]
        self._sizes: list[list[int]] = []  # bytes of each cut
        self._kept: list[list[int]] = []  # of each stage
        self._finish_s, self._ties = self._finish(), self._tied()
        self._events = memory_events(self._columns)
        owner = pipeline.schedule.rank_of_stage()
        rows = range(len(self._columns.ranks))
        held = [[stage for stage in range(len(plan.stages)) if owner[stage] == row] for row in rows]
        self.capacity_bytes = np.array([min(plan.stages[stage].capacity_bytes for stage in stages) for stages in held])
        self._static_bytes = np.array([self._static(row, stages) for row, stages in enumerate(held)])

    def seconds(self, drawn: Sequence[StepComposition]) -> Floats:
        """`[steps]`."""
        rows = np.array([[[self._row(group) for group in row] for row in one.samples] for one in drawn])
        steps, dp, m = rows.shape
        flat = rows.reshape(steps * dp, m)
        width = max(1, _CELLS // max(self._columns.size, 1))
        ends_s = np.concatenate([self._ends(flat[begin : begin + width]) for begin in range(0, len(flat), width)])
        # Replicas meet in the reduction; a stage without one goes on alone.
        by_rank = ends_s.reshape(steps, dp, -1)
        reduces = np.array([finish.reduces for finish in self._finish_s])
        reduce_s, update_s = (np.array([getattr(one, name) for one in self._finish_s]) for name in _FINISH)
        last_s = np.where(reduces, by_rank.max(axis=1, keepdims=True), by_rank) + reduce_s
        for holders, tied_s in self._ties:  # pipeline ranks that hold the same matrix meet
            last_s[..., holders] = last_s[..., holders].max(axis=2, keepdims=True) + tied_s
        result: Floats = (last_s + update_s).max(axis=(1, 2))
        return result

    def peak_bytes(self, drawn: Sequence[StepComposition]) -> NDArray[np.int64]:
        """`[steps * replicas, pipeline ranks]`, as `simulate` counts it."""
        rows = np.array([[self._row(group) for group in row] for one in drawn for row in one.samples])
        kept = np.array(self._kept, dtype=np.int64)[rows]  # [draws, microbatch, stage]
        peaks = peak_bytes(self._events, kept.transpose(2, 1, 0)[None], len(self._columns.ranks))
        result: NDArray[np.int64] = peaks.T + self._static_bytes
        return result

    def _static(self, row: int, stages: Sequence[int]) -> int:
        scenario, layouts = self._plan.scenario, self._layouts
        state = sum(planned_state_bytes(la, scenario, layouts[stage]) for stage in stages for la in self._layers[stage])
        at_work = working_bytes(self._plan, self._graph)[self._plan.row(stages[0])]
        return scenario.cluster.pool_of(int(self._columns.ranks[row])).device.reserved_bytes + state + at_work

    def _row(self, samples: tuple[Sample, ...]) -> int:
        """Number of a microbatch's prices; the order of its samples does not matter."""
        key = tuple(sorted(samples, key=lambda s: (s.text_tokens, s.images, s.audio_s, s.speech_tokens)))
        if key not in self._rows:
            loads = sample_loads(self._plan.scenario, key)
            self._rows[key] = len(self._prices)
            self._prices.append(self._price(loads))
            scenario, layouts = self._plan.scenario, self._layouts
            self._kept.append(
                [
                    sum(planned_kept_bytes(la, loads[la.module], scenario, layout) for la in layers)
                    for layers, layout in zip(self._layers, layouts, strict=True)
                ]
            )
            sent_bytes = layouts[0].sent_bytes
            self._sizes.append([sent_bytes(cut.edge, self._graph, loads, scenario) for cut in self._stages.cuts])
        return self._rows[key]

    def _price(self, loads: Loads) -> Floats:
        costs = self._costs
        result = np.zeros((len(self._layers), 4))
        for stage, (layers, layout) in enumerate(zip(self._layers, self._layouts, strict=True)):
            for layer in layers:
                load = loads[layer.module]
                dgrad_s, wgrad_s = costs.dgrad_s(layer, load, layout), costs.wgrad_s(layer, load, layout)
                result[stage] += (costs.forward_s(layer, load, layout), dgrad_s + wgrad_s, dgrad_s, wgrad_s)
        return result

    def _ends(self, rows: NDArray[np.int64]) -> Floats:
        """`[draws, pipeline ranks]`: end of each rank's last compute."""
        columns = self._columns
        durations_s = np.zeros((columns.size, len(rows)))
        (computes,) = np.nonzero(columns.kind <= W)
        prices = np.stack(self._prices)
        of_action = rows.T[columns.microbatch[computes]]  # [computes, draws]
        durations_s[computes] = prices[of_action, columns.stage[computes, None], columns.kind[computes, None]]
        sizes = np.array(self._sizes, dtype=np.int64).reshape(len(self._sizes), -1)
        known: dict[tuple[int, bool], float] = {}
        layout = self._layouts[0]
        node_of = self._plan.scenario.cluster.node_of
        own = columns.ranks[columns.row]
        for action in np.nonzero((columns.kind == SEND) | (columns.kind == RECV))[0].tolist():
            moved = sizes[rows[:, columns.microbatch[action]], columns.tensor[action] // 2]
            if columns.kind[action] == RECV:
                durations_s[action] = np.where(moved > 0, 0.0, -np.inf)
                continue
            near = node_of(int(own[action])) == node_of(int(columns.peer[action]))
            tensor = columns.tensors[columns.tensor[action]]
            distinct, place_ = np.unique(moved, return_inverse=True)
            for size in distinct.tolist():
                if (size, near) not in known:
                    known[size, near] = self._costs.transfer_s(size, near) if size else 0.0
            durations_s[action] = np.array([known[size, near] for size in distinct.tolist()])[place_]
            if layout.spread:
                made = [made_whole_s(layout, self._graph, self._costs, tensor, size) for size in distinct.tolist()]
                durations_s[action] += np.array(made)[place_]
        ends_s = node_ends(self._waves, durations_s)
        lasts = [computes[columns.row[computes] == row].max() for row in range(len(columns.ranks))]
        result: Floats = ends_s[self._waves.node[lasts]].T
        return result

    def _tied(self) -> list[tuple[list[int], float]]:
        """Of each sum over stages the pipeline ranks, and its seconds."""
        found, plan, graph = [], self._plan, self._graph
        for tied in tied_tables(plan, graph):
            rows, near = list(tied.rows(plan)), tie_near(plan, tied.stages, 0)
            found.append((rows, tie_seconds(self._costs, tie_bytes(plan, graph, tied), len(rows), near)))
        return found

    def _finish(self) -> list[_Finish]:
        """Of each pipeline rank."""
        plan, columns = self._plan, self._columns
        result = []
        for row in range(len(columns.ranks)):
            span = slice(int(columns.first[row]), int(columns.first[row + 1]))
            stages = sorted({int(s) for s, k in zip(columns.stage[span], columns.kind[span], strict=True) if k <= W})
            summed = set(columns.stage[span][columns.kind[span] == REDUCE].tolist())
            seconds, reduced = 0.0, False
            trained = [stage_trained(plan, self._graph, stage) for stage in stages]
            update_s = self._costs.update_s(sum(trained, Trained()), self._layouts[stages[0]])
            for stage, counts in zip(stages, trained, strict=True):
                if stage in summed:
                    ranks = counts, self._layouts[stage], replicas_per_node(plan, stage)
                    gather_s = 0.0 if plan.sharding == "none" else self._costs.gather_s(*ranks)
                    seconds, update_s = seconds + self._costs.reduce_s(*ranks) - gather_s, update_s + gather_s
                    reduced = True
            result.append(_Finish(reduced, seconds, update_s))
        return result
