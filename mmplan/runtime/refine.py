"""A device's numbers refined by a run: one scale for matrix products, one for memory-bound work, one for launches.

Every compute of the recorded step is one residual, log(predicted / measured). Gauss-Newton in the logarithms of the
three numbers, with a weak prior at their present values so that what the run cannot tell apart stays where it is. The
update's fraction follows from the STEP actions alone.
"""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.gemm import STREAM_FRACTION
from mmplan.cost_models.time_rules import Rules, scenario_rules
from mmplan.errors import InputError
from mmplan.planner.lower import stage_trained
from mmplan.planner.plan import Plan, load_plan
from mmplan.planner.step_loads import drawn_step_loads
from mmplan.runtime.measurement import Measurement, load_run, plan_hash
from mmplan.runtime.run_check import require_consistent
from mmplan.scenario.catalogue import device_names
from mmplan.scenario.cluster import Device
from mmplan.scenario.origin import P90_DEVIATIONS, Origin
from mmplan.scenario.profile import Measured, Profile

SCALED = ("gemm_fraction", "memory_fraction", "launch_s")
_PRIOR = 0.7  # standard deviation of the logarithm: a factor of two either way
_LEAST_NOISE = 0.03
_ROUNDS, _STEP, _LARGEST_MOVE = 8, 0.02, 0.5

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]


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
    refined = {
        name: _measured(float(np.exp(x)), float(sigma), len(residuals), float(np.median(misses)))
        for name, x, sigma in zip(SCALED, at, deviations, strict=True)
    }
    update = _update_fraction(plan, run, rules)
    if update is not None:
        refined["update_fraction"] = update
    kept = _kept(device, device.origins)
    link = plan.scenario.cluster.pools[0].node_link
    return Profile(
        base=device.name,
        device=run.device,
        kind="cpu" if run.device == "cpu" else "cuda",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=False,
        software={"mmplan": run.mmplan_version, "torch": run.torch_version, "python": run.python_version},
        parameters={**kept, **refined},
        link=_kept(link, link.origins),
        refined_by=f"{run_file.name} of plan {run.plan_hash}",
    )


class _Computes:
    """The computes of the recorded step: measured seconds, and predicted ones under any rules."""

    def __init__(self, plan: Plan, run: Measurement) -> None:
        self._plan, graph = plan, build_graph(plan.scenario)
        self._layers = [[graph.layer(layer) for layer in stage.layers] for stage in plan.stages]
        loads = drawn_step_loads(plan, run.recorded_step)
        timed = [item for item in run.timeline if item.action.kind in "FBIW" and item.end_s > item.start_s]
        of_rank = {rank.rank: rank for rank in run.ranks}
        self._actions = []
        for item in timed:
            rank = of_rank[item.rank]
            self._actions.append((rank.stage, item.action.kind, loads[rank.replica][item.action.microbatch]))
        self.measured_s = np.array([item.end_s - item.start_s for item in timed])

    def predicted_s(self, rules: Rules) -> Vector:
        costs = AnalyticCostModel(self._plan.scenario, _everywhere(self._plan, rules))
        layouts = [self._plan.layout(stage) for stage in range(len(self._plan.stages))]
        parts = {"F": (costs.forward_s,), "B": (costs.dgrad_s, costs.wgrad_s), "I": (costs.dgrad_s,)}
        sums = [
            sum(
                part(layer, loads[layer.module], layouts[stage])
                for layer in self._layers[stage]
                for part in parts.get(kind, (costs.wgrad_s,))
            )
            for stage, kind, loads in self._actions
        ]
        return np.array(sums)


def _fit(computes: _Computes, rules: Rules) -> tuple[Vector, Vector, Vector]:
    """(logarithms of the three numbers, their standard deviations, residuals)."""
    start = np.log([getattr(rules.device, name) for name in SCALED])
    most = np.log([1.0, 1.0, np.inf])
    priced = computes.predicted_s(rules) > 0
    measured = np.log(computes.measured_s[priced])

    def residuals(at: Vector) -> Vector:
        moved = replace(rules, device=_with(rules.device, at))
        result: Vector = np.log(computes.predicted_s(moved)[priced]) - measured
        return result

    at, prior = start.copy(), np.diag(np.full(3, _PRIOR**-2))
    for _ in range(_ROUNDS):
        now = residuals(at)
        columns = [(now - residuals(at - _STEP * unit)) / _STEP for unit in np.eye(3)]
        slopes = np.stack(columns, axis=1)
        noise = max(float(np.median(np.abs(now))), _LEAST_NOISE)
        weights = 1 / np.maximum(np.abs(now), noise)  # as least absolute deviations, but round near zero
        curvature = (slopes * weights[:, None]).T @ slopes / noise + prior
        move = -np.linalg.solve(curvature, (slopes * weights[:, None]).T @ now / noise + prior @ (at - start))
        at = np.minimum(at + np.clip(move, -_LARGEST_MOVE, _LARGEST_MOVE), most)
    return at, np.sqrt(np.diag(np.linalg.inv(curvature))), residuals(at)


def _everywhere(plan: Plan, rules: Rules) -> tuple[Rules, ...]:
    """For each pool, all of which have this device."""
    return (rules,) * len(plan.scenario.cluster.pools)


def _with(device: Device, at: Vector) -> Device:
    gemm, memory, launch_s = (float(value) for value in np.exp(at))
    return replace(device, gemm_fraction=gemm, memory_fraction=memory, launch_s=launch_s)


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
