"""Which kind of device the first stages get, where optimizer states lie, whether gradients are compressed and products
are in FP8: every order of the pools and every allowed technique, the best result with what all of them prove.

Gradients as they are belong to every search: where a message costs more than it saves, the closed form of compressed
ones is no lower bound for stages of which a part may not be compressed, but then that of the others is.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

from mmplan.planner.objective import Objective, Scale
from mmplan.planner.plan import scenario_hash
from mmplan.planner.quantise import ROUNDING_GAP, seconds
from mmplan.planner.result import OptimizeResult, RunnerUp
from mmplan.scenario.scenario import Scenario
from mmplan.units import format_seconds

IN_HOST_MEMORY: dict[str, str] = {
    "none": "",
    "optimizer": "optimizer state",
    "parameters": "weights, gradients and optimizer state",
    "activations": "activations of blocks",
    "optimizer+activations": "optimizer state and activations of blocks",
}


def in_pool_orders(scenario: Scenario) -> Iterator[Scenario]:
    """The scenario with its pools in every order that differs, its own first."""
    for pools in dict.fromkeys(permutations(scenario.cluster.pools)):
        yield replace(scenario, cluster=replace(scenario.cluster, pools=pools))


def with_techniques(scenarios: Iterable[Scenario]) -> Iterator[Scenario]:
    """Each scenario with its optimizer states where the constraints allow, products in FP8 as they allow, and gradients
    compressed as they allow or not at all; where the technique offloads or has FP8, as it says, and where it compresses
    as they allow, so they are."""
    for scenario in scenarios:
        technique = scenario.technique
        places = scenario.constraints.offload if technique.offload == "none" else (technique.offload,)
        allowed = scenario.constraints.compression
        compresses = technique.compression != "none" and technique.compression in allowed
        compressions = dict.fromkeys(allowed if compresses else ("none", *allowed))
        formats = scenario.constraints.fp8 if technique.fp8 == "none" else (technique.fp8,)
        for compression, fp8, place in product(compressions, formats, places):
            chosen = replace(technique, offload=place, compression=compression, fp8=fp8)
            yield replace(scenario, technique=chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """No plan of one order and technique has a lower value, whether one was found or not."""

    value: int
    scale: Scale

    def step_s(self, ranks: int) -> float:
        """A better plan on so many ranks would take at least so long."""
        return seconds(self.scale.step_below_on(ranks, self.value))


def best_order(
    results: Sequence[OptimizeResult], floors: Sequence[Floor], objective: Objective, gap: float
) -> OptimizeResult:
    """The best result; its bound holds for all orders, those that the limit left without a plan among them, and the
    others' plans are among its runner-ups."""
    best = min(results, key=lambda result: _value(result, objective))
    plan = best.plan
    bound_s = min(best.bound_s, *(floor.step_s(plan.rank_count) for floor in floors))
    objective_s = plan.certificate.objective_s
    found_gap = (objective_s - bound_s) / objective_s if objective_s > 0 else 0.0
    proved = found_gap <= gap + ROUNDING_GAP
    certificate = replace(
        plan.certificate,
        bound_s=bound_s,
        gap=found_gap,
        status="optimal" if proved else "feasible",
        wall_s=max(result.wall_s for result in results),  # each is counted from the start of all of them
    )
    others = [_as_runner_up(result, best) for result in results if result is not best]
    return replace(
        best,
        plan=replace(plan, certificate=certificate, scenario_hash=scenario_hash(plan.scenario)),
        bound_s=bound_s,
        gap=found_gap,
        status=certificate.status,
        wall_s=certificate.wall_s,
        considered=replace(
            best.considered,
            **{
                name: sum(getattr(result.considered, name) for result in results)
                for name in ("enumerated", "out_of_memory", "bounded_away", "solved", "infeasible")
            },
        ),
        runner_ups=(*others, *best.runner_ups),
    )


def _value(result: OptimizeResult, objective: Objective) -> tuple[float, float]:
    devices, step_s = result.plan.rank_count, result.plan.certificate.objective_s
    if objective.name == "device-time":
        return devices * step_s, step_s
    return (float(devices), step_s) if objective.name == "devices" else (step_s, step_s)


def _as_runner_up(result: OptimizeResult, best: OptimizeResult) -> RunnerUp:
    """The best plan of another order."""
    plan, winner_s = result.plan, best.plan.certificate.objective_s
    more_s = plan.certificate.objective_s - winner_s
    names = ", then ".join(pool.device.name for pool in plan.scenario.cluster.pools)
    if plan.scenario.technique.offload != best.plan.scenario.technique.offload:
        names = f"{IN_HOST_MEMORY[plan.scenario.technique.offload] or 'nothing'} in host memory"
    if plan.scenario.technique.compression != best.plan.scenario.technique.compression:
        compression = plan.scenario.technique.compression
        names = "gradients as they are" if compression == "none" else f"gradients compressed by {compression}"
    if plan.scenario.technique.fp8 != best.plan.scenario.technique.fp8:
        fp8 = plan.scenario.technique.fp8
        names = "no FP8" if fp8 == "none" else f"FP8 ({fp8})"
    return RunnerUp(
        configuration=result.configuration,
        objective_s=plan.certificate.objective_s,
        repeat_more_s=result.time.repeat_s - best.time.repeat_s,
        fill_more_s=result.time.critical_path_s - best.time.critical_path_s,
        finish_more_s=result.time.finish_s - best.time.finish_s,
        reason=f"with {names}: {format_seconds(abs(more_s))} {'slower' if more_s >= 0 else 'faster, on more devices'}",
    )
