"""Step time of one parallel configuration with equal pipeline cuts, split into named parts; no search.

Layers are priced once per (tp, cp, ep, microbatch size); pipeline, data parallelism and optimizer are closed forms on
the sums of each stage. The parts of a `StepEstimate` sum to its step time.
"""

import math
from dataclasses import dataclass

import numpy as np

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.collectives import all_reduce_s, gather_s, group_of, message_s
from mmplan.cost_models.counts import op_parameters
from mmplan.cost_models.expert_ops import GroupedLinear
from mmplan.cost_models.host_offload import copied_seconds
from mmplan.cost_models.layer import Layer
from mmplan.cost_models.layer_time import layer_seconds, optimizer_seconds
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.ops import op_trainable
from mmplan.cost_models.shard import Shard
from mmplan.cost_models.stragglers import straggler_share
from mmplan.cost_models.time_rules import PARTS, PHASES, Rules, scenario_rules
from mmplan.planner.degrees import Degrees
from mmplan.planner.stage_split import block_units, chunk_ends
from mmplan.scenario.scenario import Scenario

STEP_PARTS = (*PARTS, "bubble", "p2p", "dp", "optimizer", "step", "stragglers")

_RECOMPUTE = PHASES.index("recompute")
_BOUNDARY_BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEstimate:
    """Seconds of one optimizer step: `parts` in the order of `STEP_PARTS`, of the stage that bounds the pipeline."""

    step_s: float
    parts: tuple[float, ...]
    stage_s: tuple[float, ...]  # forward and backward of one microbatch on each stage

    def named(self) -> dict[str, float]:
        return dict(zip(STEP_PARTS, self.parts, strict=True))


def estimate_step(scenario: Scenario, degrees: Degrees) -> StepEstimate:
    """Step time of one configuration.

    Raises:
        CostModelError: fewer blocks than pipeline chunks, or a type the device has no units for.
    """
    return StepEstimator(scenario).estimate(degrees)


@dataclass(frozen=True, slots=True)
class _Stages:
    """What the closed forms need of the stages of one cut; `bound` is the slowest stage."""

    stage_s: tuple[float, ...]
    bound_parts: tuple[float, ...]
    bound_s: float
    forward_s: float
    dgrad_s: float
    wgrad_s: float
    backward_s: float
    dense: tuple[float, ...]  # parameters per rank of each stage: trained ones outside experts
    experts: tuple[float, ...]
    gathered: float  # all parameters of the bound stage
    hop_bytes: float


class StepEstimator:
    """Estimates many configurations of one scenario; prices are kept between calls."""

    def __init__(self, scenario: Scenario, rules: Rules | None = None) -> None:
        self.scenario = scenario
        self.rules = rules or scenario_rules(scenario)
        self._layers = build_graph(scenario).layers()
        self._units = block_units(self._layers)
        self._kinds = _distinct(self._layers)
        self._prices: dict[tuple[Shard, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._stages: dict[tuple[Shard, int, int, int], _Stages] = {}

    def with_rules(self, rules: Rules) -> "StepEstimator":
        """The same scenario under other rules."""
        other = object.__new__(StepEstimator)
        other.scenario, other.rules = self.scenario, rules
        other._layers, other._units, other._kinds = self._layers, self._units, self._kinds
        other._prices, other._stages = {}, {}
        return other

    def estimate(self, degrees: Degrees) -> StepEstimate:
        """Step time of one configuration."""
        rules, m = self.rules, degrees.microbatches
        stages = self._stages_of(degrees)
        parts = [m * seconds for seconds in stages.bound_parts]
        bubble = _bubble_s(degrees, stages)
        p2p = self._p2p_s(degrees, stages)
        dp, optimizer = self._finish_s(degrees, stages)
        parts += [bubble, p2p, dp, optimizer, rules.stack.step_s + rules.stack.microbatch_s * (m + degrees.pp - 1)]
        parts.append(straggler_share(math.ceil(degrees.devices / rules.devices_per_node)) * sum(parts))
        return StepEstimate(step_s=sum(parts), parts=tuple(parts), stage_s=stages.stage_s)

    def _stages_of(self, degrees: Degrees) -> _Stages:
        shard = Shard(tp=degrees.tp, ep=degrees.ep, etp=degrees.etp if degrees.ep > 1 else None, cp=degrees.cp)
        key = (shard, degrees.microbatch_size, degrees.pp, degrees.vp)
        if key not in self._stages:
            self._stages[key] = self._summed(*key)
        return self._stages[key]

    def _summed(self, shard: Shard, microbatch_size: int, pp: int, vp: int) -> _Stages:
        seconds, parameters, hop_bytes = self._priced(shard, microbatch_size)
        ends = np.array(chunk_ends(len(self._units) - 2, pp * vp))
        totals = seconds[ends[1:]] - seconds[ends[:-1]]  # [chunk, phase, part]
        counts = parameters[ends[1:]] - parameters[ends[:-1]]
        stage = totals.reshape(vp, pp, *totals.shape[1:]).sum(axis=0)
        count = counts.reshape(vp, pp, 3).sum(axis=0)
        technique = self.rules.technique
        if technique.recompute_layers is not None:
            blocks = max(1, (len(self._units) - 2) // pp)
            stage[:, _RECOMPUTE] *= min(1.0, technique.recompute_layers / blocks)
        stage_s = stage.sum(axis=(1, 2))
        bound = int(stage_s.argmax())
        phases = stage[bound].sum(axis=1)
        return _Stages(
            stage_s=tuple(stage_s.tolist()),
            bound_parts=tuple(stage[bound].sum(axis=0).tolist()),
            bound_s=float(stage_s[bound]),
            forward_s=float(phases[0]),
            dgrad_s=float(phases[1] + phases[3]),
            wgrad_s=float(phases[2]),
            backward_s=float(phases[1:].sum()),
            dense=tuple(count[:, 0].tolist()),
            experts=tuple(count[:, 1].tolist()),
            gathered=float(count[bound, 2]),
            hop_bytes=float(hop_bytes[ends[1:-1] - 1].max()) if pp > 1 else 0.0,
        )

    def _priced(self, shard: Shard, microbatch_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Prefix sums over units of seconds [phase, part] and parameters [dense, expert, all], and the bytes of each
        unit's output."""
        key = (shard, microbatch_size)
        if key not in self._prices:
            loads = mean_loads(self.scenario, microbatch_size)
            firsts = {kind: self._layers[self._kinds.index(kind)] for kind in set(self._kinds)}
            price = {k: layer_seconds(self.rules, layer, loads[layer.module], shard) for k, layer in firsts.items()}
            count = {k: np.array(_parameters(layer, shard)) for k, layer in firsts.items()}
            seconds = np.zeros((len(self._units) + 1, len(PHASES), len(PARTS)))
            parameters = np.zeros((len(self._units) + 1, 3))
            hop_bytes = np.zeros(len(self._units))
            for index, unit in enumerate(self._units):  # the first and the last may be empty
                kinds = [self._kinds[position] for position in unit]
                seconds[index + 1] = seconds[index] + sum(price[kind] for kind in kinds)
                parameters[index + 1] = parameters[index] + sum(count[kind] for kind in kinds)
                last = self._layers[unit[-1] if unit else 0]
                hop_bytes[index] = last.output.elements(loads[last.module], shard) * _BOUNDARY_BYTES_PER_ELEMENT
            self._prices[key] = seconds, parameters, hop_bytes
        return self._prices[key]

    def _p2p_s(self, degrees: Degrees, stages: _Stages) -> float:
        """Sends of activations and gradients between stages: once per microbatch, chunk and direction where they are
        not hidden, and along the whole pipeline while it fills and drains.

        With tensor parallelism every rank sends its share, gathered again in the node (arXiv 2104.04473, section 4.1).
        """
        if degrees.pp == 1:
            return 0.0
        rules, distance = self.rules, degrees.tp * degrees.cp * degrees.dp
        crosses = distance * degrees.pp > rules.devices_per_node
        share = stages.hop_bytes / degrees.tp
        hop = message_s(share, rules.network_link if crosses else rules.node_link)
        if degrees.tp > 1 and not rules.technique.sequence_parallel:
            group = group_of(degrees.tp, 1, rules.devices_per_node)
            hop += gather_s(stages.hop_bytes, group, rules.node_link, rules.network_link)
        steady = rules.stack.exposed_p2p * 2 * degrees.vp * degrees.microbatches
        return (steady + 2 * (degrees.pp - 1)) * hop

    def _finish_s(self, degrees: Degrees, stages: _Stages) -> tuple[float, float]:
        """(exposed data-parallel communication of a step, optimizer update)."""
        rules, technique = self.rules, self.rules.technique
        replicas = degrees.dp * degrees.cp
        dense, expert = max(stages.dense), max(stages.experts)
        expert_replicas = max(
            1, replicas * degrees.tp // (degrees.ep * (degrees.etp if degrees.ep > 1 else degrees.tp))
        )
        sharded = technique.sharding != "none"
        on_rank = dense / replicas + expert / expert_replicas if sharded else dense + expert
        optimizer = optimizer_seconds(rules, self.scenario.optimizer, on_rank)
        if technique.sharding in ("parameters", "gradients"):
            return self._sharded_s(degrees, stages), optimizer
        group = group_of(replicas, degrees.tp, rules.devices_per_node)
        stride = degrees.tp * degrees.ep if degrees.ep > 1 else degrees.tp
        expert_group = group_of(expert_replicas, stride, rules.devices_per_node)
        links = rules.node_link, rules.network_link
        total = 0.0
        for count, ranks in ((dense, group), (expert, expert_group)):
            if technique.sharding == "optimizer":
                total += gather_s(count * rules.gradient_bytes, ranks, *links)
                total += gather_s(count * self._gathered_bytes(), ranks, *links)
            else:
                total += all_reduce_s(count * rules.gradient_bytes, ranks, *links)
        if not technique.overlap_dp:
            return total, optimizer
        hidden = min((1 - rules.stack.exposed_dp) * total, stages.bound_s)
        return total - hidden, optimizer

    def _gathered_bytes(self) -> int:
        """Bytes per parameter of a gather after the update."""
        in_fp8 = self.rules.technique.fp8 != "none" and self.rules.stack.fp8_gather
        return 1 if in_fp8 else self.rules.element_bytes

    def _sharded_s(self, degrees: Degrees, stages: _Stages) -> float:
        """What FSDP adds (arXiv 2304.11277, section 3): with `parameters` weights are gathered for forward and again
        for backward, and gradients reduced, every microbatch; with `gradients` weights are gathered once a step.

        A layer takes max(computation, communication) and a part of the smaller one that does not overlap.
        """
        rules, m = self.rules, degrees.microbatches
        group = group_of(degrees.dp * degrees.cp, degrees.tp, rules.devices_per_node)
        links = rules.node_link, rules.network_link
        brought, taken = copied_seconds(rules, stages.gathered / group.ranks, max(stages.dense) / group.ranks)
        gather = gather_s(stages.gathered * rules.element_bytes, group, *links) + brought
        reduce = gather_s(max(stages.dense) * rules.gradient_bytes, group, *links) + taken

        def extra(compute: float, communication: float) -> float:
            serial = rules.stack.fsdp_serial * min(compute, communication)
            return max(0.0, communication - compute) + serial

        if rules.technique.sharding == "parameters":
            return m * (extra(stages.forward_s, gather) + extra(stages.backward_s, gather + reduce))
        first = extra(stages.forward_s, gather)
        return first + m * extra(stages.backward_s, reduce)


def _bubble_s(degrees: Degrees, stages: _Stages) -> float:
    """Idle seconds of the bounding stage while the pipeline fills and drains.

    1F1B and GPipe: the other stages once; interleaving divides by the chunks (arXiv 2104.04473, section 2.2). Zero
    bubble (arXiv 2401.10241, section 2.3): ZB-H1 (F + B - W) per stage, ZB-H2 at twice the memory (F + B - 2 W), of
    which its heuristic and the optimizer post-validation leave 0.3 (fit, table 4).
    """
    others = sum(stages.stage_s) - stages.bound_s
    before = degrees.pp - 1
    f, b, w = stages.forward_s, stages.dgrad_s, stages.wgrad_s
    match degrees.schedule:
        case "interleaved":
            return others / degrees.vp
        case "zb-1p":
            return min(others, before * max(0.0, f + b - w))
        case "zb-2p" | "zb-v":
            return min(others, 0.3 * before * max(0.0, f + b - 2 * w))
        case _:
            return others


def _distinct(layers: tuple[Layer, ...]) -> tuple[int, ...]:
    """For each layer the number of the first layer that is equal in all that costs."""
    seen: dict[tuple[object, ...], int] = {}
    return tuple(
        seen.setdefault((layer.module, layer.kind, layer.ops, layer.grad_values), position)
        for position, layer in enumerate(layers)
    )


def _parameters(layer: Layer, shard: Shard) -> tuple[float, float, float]:
    """Parameters on a rank: trained outside experts, trained in experts, all."""
    dense = expert = total = 0.0
    for op in layer.ops:
        count = op_parameters(op, shard)
        total += count
        if op_trainable(op) and isinstance(op, GroupedLinear):
            expert += count
        elif op_trainable(op):
            dense += count
    return dense, expert, total
