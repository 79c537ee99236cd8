"""A device's numbers refined by a run: scales for classes of operators, a factor for each module, and the link.

Every compute of the recorded step is one residual, log(predicted / measured). Gauss-Newton in the logarithms of matrix
products, memory-bound work, launches and fused attention, and of one factor per module, with weak priors at their
present values so that what the run cannot tell apart stays where it is. The update's fraction follows from the STEP
actions alone, latency and bandwidth from the messages that were timed after the run.
"""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.calibration import Exchange, Timed, fit_link
from mmplan.cost_models.gemm import STREAM_FRACTION
from mmplan.cost_models.time_rules import Rules, scenario_rules
from mmplan.errors import InputError
from mmplan.planner.lower import stage_trained
from mmplan.planner.plan import Plan, load_plan
from mmplan.planner.step_loads import drawn_step_loads
from mmplan.runtime.measurement import Measurement, load_run, plan_hash
from mmplan.runtime.places import listed_places, one_process_each
from mmplan.runtime.run_check import require_consistent
from mmplan.scenario.catalogue import device_names
from mmplan.scenario.cluster import Device
from mmplan.scenario.origin import P90_DEVIATIONS, Origin
from mmplan.scenario.profile import Measured, Profile

_PLAIN = ("gemm_fraction", "memory_fraction", "launch_s")
# Standard deviations of logarithms: a factor of two either way for what an operator reaches; modules differ by less.
_PRIOR, _MODULE_PRIOR = 0.7, 0.25
_LEAST_NOISE = 0.03
_ROUNDS, _STEP, _LARGEST_MOVE, _STILL = 40, 0.02, 0.5, 1e-3
_LINK_SIZES = 2  # of messages, to tell latency from bandwidth

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def refined_profile(plan_file: Path | None, run_file: Path | None) -> Profile:
    """The profile that a run gives.

    Raises:
        InputError: one of the files is not named, is missing or does not fit the other.
    """
    if plan_file is None or run_file is None:
        raise InputError("refining needs both: mmplan calibrate --from run.json PLAN")
    run = load_run(run_file)
    require_consistent(run, run_file)
    return refine(load_plan(plan_file), run, run_file)


def refine(plan: Plan, run: Measurement, run_file: Path) -> Profile:
    """The profile of the plan's device as the run saw it.

    Raises:
        InputError: the run is of another plan, a rehearsal, or of a device that is not in the catalogue.
    """
    device = plan.scenario.cluster.pools[0].device
    if run.plan_hash != plan_hash(plan):
        raise InputError(f"this run is of plan {run.plan_hash}, the plan given is {plan_hash(plan)}", file=run_file)
    if run.rehearsed:
        raise InputError("a rehearsal sleeps, so it says nothing about the device", file=run_file)
    if device.name not in device_names():
        raise InputError(f"the plan's device '{device.name}' is not in the catalogue", file=run_file)
    computes = _Computes(plan, run)
    rules = scenario_rules(plan.scenario)
    at, deviations, residuals = _fit(computes, rules)
    misses = np.abs(np.expm1(residuals))
    found = [
        _measured(float(np.exp(x)), float(sigma), len(residuals), float(np.median(misses)))
        for x, sigma in zip(at, deviations, strict=True)
    ]
    names = _numbers(rules)
    refined = dict(zip(names, found, strict=False))
    modules = dict(zip(computes.modules, found[len(names) :], strict=True))
    update = _update_fraction(plan, run, rules)
    if update is not None:
        refined["update_fraction"] = update
    kept = _kept(device, device.origins)
    link = plan.scenario.cluster.pools[0].node_link
    before = {module.name: module.time_factor for module in plan.scenario.model.modules}
    return Profile(
        base=device.name,
        device=run.device,
        kind="cpu" if run.device == "cpu" else "cuda",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=False,
        software={"mmplan": run.mmplan_version, "torch": run.torch_version, "python": run.python_version},
        parameters={**kept, **refined},
        link=_link(plan, run) or _kept(link, link.origins),
        modules={name: _times(item, before[name]) for name, item in modules.items()},
        refined_by=f"{run_file.name} of plan {run.plan_hash}",
    )


class _Computes:
    """The computes of the recorded step: measured seconds, and predicted ones by module under any rules."""

    def __init__(self, plan: Plan, run: Measurement) -> None:
        self._plan, graph = plan, build_graph(plan.scenario)
        self._layers = [[graph.layer(layer) for layer in stage.layers] for stage in plan.stages]
        loads = drawn_step_loads(plan, run.recorded_step)
        timed = [item for item in run.timeline if item.action.kind in "FBIW" and item.end_s > item.start_s]
        replica_of = {rank.rank: rank.replica for rank in run.ranks}
        self._actions = [
            (item.action.stage, item.action.kind, loads[replica_of[item.rank]][item.action.microbatch])
            for item in timed
        ]
        self.measured_s = np.array([item.end_s - item.start_s for item in timed])
        self.modules = tuple(dict.fromkeys(layer.module for layers in self._layers for layer in layers))

    def predicted_s(self, rules: Rules) -> Matrix:
        """[compute, module]."""
        costs = AnalyticCostModel(self._plan.scenario, _everywhere(self._plan, rules))
        layouts = [self._plan.layout(stage) for stage in range(len(self._plan.stages))]
        parts = {"F": (costs.forward_s,), "B": (costs.dgrad_s, costs.wgrad_s), "I": (costs.dgrad_s,)}
        column = {module: index for index, module in enumerate(self.modules)}
        seconds = np.zeros((len(self._actions), len(self.modules)))
        for row, (stage, kind, loads) in enumerate(self._actions):
            for layer in self._layers[stage]:
                for part in parts.get(kind, (costs.wgrad_s,)):
                    seconds[row, column[layer.module]] += part(layer, loads[layer.module], layouts[stage])
        return seconds


def _numbers(rules: Rules) -> tuple[str, ...]:
    """Parameters of the device that are scaled."""
    kind = rules.technique.attention
    return (*_PLAIN, *((f"attention.{kind}",) if kind != "math" else ()))


def _fit(computes: _Computes, rules: Rules) -> tuple[Vector, Vector, Vector]:
    """(logarithms of the device's numbers and then of the modules' factors, their standard deviations, residuals)."""
    names, modules = _numbers(rules), len(computes.modules)
    attention = dict(rules.device.attention).get(rules.technique.attention, rules.device.attention_fraction)
    first = [attention if name not in _PLAIN else getattr(rules.device, name) for name in names]
    start = np.concatenate([np.log(first), np.zeros(modules)])
    most = np.log([np.inf if name == "launch_s" else 1.0 for name in names] + [np.inf] * modules)
    priced = computes.predicted_s(rules).sum(axis=1) > 0
    measured = np.log(computes.measured_s[priced])

    def by_module(at: Vector) -> Matrix:
        moved = replace(rules, device=_with(rules, at[: len(names)]))
        result: Matrix = computes.predicted_s(moved)[priced] * np.exp(at[len(names) :])
        return result

    sigmas = np.array([_PRIOR] * len(names) + [_MODULE_PRIOR] * modules)
    # From where the computes are right in the middle: what they are all off by must not pass for noise.
    off = float(np.median(np.log(by_module(start).sum(axis=1)) - measured))
    longer = np.array([-1.0 if name == "launch_s" else 1.0 for name in names] + [0.0] * modules)
    at, prior = np.minimum(start + off * longer, most), np.diag(sigmas**-2)
    for _ in range(_ROUNDS):
        parts = by_module(at)
        now = np.log(parts.sum(axis=1)) - measured
        moves = (_STEP * unit for unit in np.eye(len(names), len(at)))
        columns = [(now + measured - np.log(by_module(at - move).sum(axis=1))) / _STEP for move in moves]
        slopes = np.hstack([np.stack(columns, axis=1), parts / parts.sum(axis=1, keepdims=True)])
        noise = max(float(np.median(np.abs(now))), _LEAST_NOISE)
        weights = 1 / np.maximum(np.abs(now), noise)  # as least absolute deviations, but round near zero
        curvature = (slopes * weights[:, None]).T @ slopes / noise + prior
        move = -np.linalg.solve(curvature, (slopes * weights[:, None]).T @ now / noise + prior @ (at - start))
        before, at = at, np.minimum(at + np.clip(move, -_LARGEST_MOVE, _LARGEST_MOVE), most)
        if np.abs(at - before).max() < _STILL:
            break
    residuals = np.log(by_module(at).sum(axis=1)) - measured
    return at, np.sqrt(np.diag(np.linalg.inv(curvature))), residuals


def _everywhere(plan: Plan, rules: Rules) -> tuple[Rules, ...]:
    """For each pool, all of which have this device."""
    return (rules,) * len(plan.scenario.cluster.pools)


def _with(rules: Rules, at: Vector) -> Device:
    gemm, memory, launch_s, *attention = (float(value) for value in np.exp(at))
    device = replace(rules.device, gemm_fraction=gemm, memory_fraction=memory, launch_s=launch_s)
    if not attention:
        return device
    kinds = {**dict(device.attention), rules.technique.attention: attention[0]}
    return replace(device, attention=tuple(kinds.items()))


def _link(plan: Plan, run: Measurement) -> dict[str, Measured]:
    """Latency and bandwidth between ranks of one node; nothing where too few sizes were sent there."""
    cluster, places = plan.scenario.cluster, listed_places(one_process_each(plan) if run.rehearsed else plan)
    node = {place: cluster.node_of(rank) for rank, place in places.items()}
    near = [one for one in run.transfers if one.seconds > 0 and node[one.source] == node[one.target]]
    if len({one.bytes for one in near}) < _LINK_SIZES:
        return {}
    exchanges = [
        Exchange(collective=False, size=one.bytes, ranks=2, timed=Timed(seconds=one.seconds, rounds=(one.seconds,)))
        for one in near
    ]
    return fit_link(exchanges, cluster.pools[0].node_link)


def _update_fraction(plan: Plan, run: Measurement, rules: Rules) -> Measured | None:
    """Of the bandwidth, by the STEP actions of ranks that update something."""
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario, _everywhere(plan, rules))
    current = rules.device.update_fraction or STREAM_FRACTION
    stage_of = {rank.rank: rank.stage for rank in run.ranks}
    found = []
    for item in run.timeline:
        if item.action.kind != "STEP" or item.end_s <= item.start_s:
            continue
        stage = stage_of[item.rank]
        predicted_s = costs.update_s(stage_trained(plan, graph, stage), plan.layout(stage))
        if predicted_s > rules.device.launch_s:
            found.append(current * predicted_s / (item.end_s - item.start_s))
    if not found:
        return None
    values = sorted(min(1.0, value) for value in found)
    middle = values[len(values) // 2]
    residual = float(np.median([abs(middle / value - 1) for value in values]))
    return Measured(value=middle, p10=values[0], p90=values[-1], source="measured", n=len(values), residual=residual)


def _measured(value: float, sigma: float, n: int, residual: float) -> Measured:
    width = float(np.exp(P90_DEVIATIONS * sigma))
    return Measured(value=value, p10=value / width, p90=value * width, source="measured", n=n, residual=residual)


def _times(item: Measured, factor: float) -> Measured:
    return replace(item, value=item.value * factor, p10=item.p10 * factor, p90=item.p90 * factor)


def _kept(owner: object, origins: tuple[Origin, ...]) -> dict[str, Measured]:
    """What an earlier profile measured: it stays, though how often is no longer known."""
    kept = {}
    for origin in origins:
        if origin.kind == "measured":
            value = _value(owner, origin.parameter)
            kept[origin.parameter] = Measured(
                value=value, p10=value * origin.p10, p90=value * origin.p90, source="measured", n=0, residual=0.0
            )
    return kept


def _value(owner: object, parameter: str) -> float:
    if parameter.startswith("attention.") and isinstance(owner, Device):
        return dict(owner.attention)[parameter.removeprefix("attention.")]
    value: float = getattr(owner, parameter)
    return value
