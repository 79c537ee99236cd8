"""Which kind of device the first stages get, where optimizer states lie, whether gradients are compressed, products are
in FP8 and rows split over tp: every order of the pools and every allowed technique, the best result with what all of
them prove.

Gradients as they are belong to every search: where a message costs more than it saves, the closed form of compressed
ones is no lower bound for stages of which a part may not be compressed, but then that of the others is.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

import numpy as np

from mmplan.planner.by_devices import StepsByDevices
from mmplan.planner.objective import Objective, Scale, scale_of
from mmplan.planner.plan import ChunkCertificate, Plan, scenario_hash
from mmplan.planner.quantise import ROUNDING_GAP, seconds
from mmplan.planner.result import Considered, OptimizeResult, RunnerUp
from mmplan.planner.rivals import Candidate
from mmplan.scenario.cluster import Pool
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.technique import Technique
from mmplan.units import format_seconds

IN_HOST_MEMORY: dict[str, str] = {
    "none": "",
    "optimizer": "optimizer state",
    "parameters": "weights, gradients and optimizer state",
    "activations": "activations of blocks",
    "optimizer+activations": "optimizer state and activations of blocks",
}


def in_pool_orders(scenario: Scenario, *, priced: bool = False) -> Iterator[Scenario]:
    """The scenario with its pools in every order that differs, its own first; where `priced`, by prices too."""
    orders: dict[tuple[Pool, ...], tuple[Pool, ...]] = {}
    for pools in permutations(scenario.cluster.pools):
        orders.setdefault(pools if priced else tuple(replace(pool, price_per_hour=None) for pool in pools), pools)
    for pools in orders.values():
        yield replace(scenario, cluster=replace(scenario.cluster, pools=pools))


def with_techniques(scenarios: Iterable[Scenario]) -> Iterator[Scenario]:
    """Each scenario with its optimizer states where the constraints allow, products in FP8 as they allow, and gradients
    compressed as they allow or not at all; where the technique offloads or has FP8, as it says, and where it compresses
    as they allow, so they are. Sequence parallelism is as they allow, or as the technique says."""
    for scenario in scenarios:
        technique = scenario.technique
        places = scenario.constraints.offload if technique.offload == "none" else (technique.offload,)
        allowed = scenario.constraints.compression
        compresses = technique.compression != "none" and technique.compression in allowed
        compressions = dict.fromkeys(allowed if compresses else ("none", *allowed))
        formats = scenario.constraints.fp8 if technique.fp8 == "none" else (technique.fp8,)
        splits = scenario.constraints.sequence_parallel or (technique.sequence_parallel,)
        for compression, fp8, place, split in product(compressions, formats, places, splits):
            chosen = replace(technique, offload=place, compression=compression, fp8=fp8, sequence_parallel=split)
            yield replace(scenario, technique=chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What became of one order of the pools and one technique: no plan of it has a lower value than `floor`, under any
    schedule and with any number of chunks per rank than `any_order`; `best` is None where none was found, `considered`
    where the limit came before its configurations were listed. `any_schedule`: by number of devices no step is below
    these, under any schedule; `steps`: the same of the closed form (see `fewer_devices`)."""

    scenario: Scenario
    floor: int
    any_order: int
    any_schedule: tuple[StepsByDevices, ...] = ()
    steps: StepsByDevices | None = None
    best: Candidate | None = None
    considered: Considered | None = None


def of_all_orders(best: OptimizeResult, orders: Sequence[Order], objective: Objective, gap: float) -> OptimizeResult:
    """The best order's result with a bound that holds for all of them, those that the limit left without a plan among
    them; the others' best plans are among its runner-ups."""
    plan = best.plan
    least_ns, any_order_ns = (
        _scale(objective, plan).step_below_of(best.configuration, least)
        for least in (min(one.floor for one in orders), min(one.any_order for one in orders))
    )
    bound_s = min(best.bound_s, seconds(least_ns))
    objective_s = plan.certificate.objective_s
    found_gap = (objective_s - bound_s) / objective_s if objective_s > 0 else 0.0
    proved = found_gap <= gap + ROUNDING_GAP
    certificate = replace(
        plan.certificate,
        bound_s=bound_s,
        gap=found_gap,
        status="optimal" if proved else "feasible",
    )
    others = [
        _as_runner_up(order.scenario, order.best, best, objective)
        for order in orders
        if order.best is not None and order.scenario != plan.scenario and not _splits_in_name(order, plan)
    ]
    read = [one.considered for one in orders if one.considered is not None]
    return replace(
        best,
        plan=replace(
            plan,
            certificate=certificate,
            chunk_certificate=_under_any_schedule(plan, seconds(any_order_ns)),
            scenario_hash=scenario_hash(plan.scenario),
        ),
        bound_s=bound_s,
        gap=found_gap,
        status=certificate.status,
        wall_s=certificate.wall_s,
        considered=replace(
            best.considered,
            **{
                name: sum(getattr(one, name) for one in read)
                for name in ("enumerated", "out_of_memory", "bounded_away", "solved", "infeasible", "in_chunks")
            },
            unread=len(orders) - len(read),
        ),
        runner_ups=(*others, *best.runner_ups),
    )


def _scale(objective: Objective, plan: Plan) -> Scale:
    """That of the plan's order of pools."""
    return scale_of(objective, plan.scenario.cluster, np.zeros(0, dtype=np.int64))


def _under_any_schedule(plan: Plan, least_s: float) -> ChunkCertificate | None:
    """The bound of any schedule over all orders."""
    proof = plan.chunk_certificate
    if proof is None:
        return None
    bound_s = min(proof.bound_s, least_s)
    return replace(proof, bound_s=bound_s, gap=(proof.step_s - bound_s) / proof.step_s if proof.step_s > 0 else 0.0)


def _as_runner_up(scenario: Scenario, one: Candidate, best: OptimizeResult, objective: Objective) -> RunnerUp:
    """The best plan of another order."""
    more_s = one.time.objective_s - best.plan.certificate.objective_s
    names = " and ".join(_other_techniques(scenario.technique, best.plan.scenario.technique))
    names = names or ", then ".join(_pool_name(pool, objective) for pool in scenario.cluster.pools)
    faster = "faster, at a higher cost" if objective.name == "cost" else "faster, on more devices"
    return RunnerUp(
        configuration=one.configuration,
        objective_s=one.time.objective_s,
        repeat_more_s=one.time.repeat_s - best.time.repeat_s,
        fill_more_s=one.time.critical_path_s - best.time.critical_path_s,
        finish_more_s=one.time.finish_s - best.time.finish_s,
        reason=f"with {names}: {format_seconds(abs(more_s))} {'slower' if more_s >= 0 else faster}",
    )


def _other_techniques(technique: Technique, best: Technique) -> Iterator[str]:
    if technique.offload != best.offload:
        yield f"{IN_HOST_MEMORY[technique.offload] or 'nothing'} in host memory"
    if technique.compression != best.compression:
        none = technique.compression == "none"
        yield "gradients as they are" if none else f"gradients compressed by {technique.compression}"
    if technique.fp8 != best.fp8:
        yield "no FP8" if technique.fp8 == "none" else f"FP8 ({technique.fp8})"
    if technique.sequence_parallel != best.sequence_parallel:
        yield "sequence parallelism" if technique.sequence_parallel else "no sequence parallelism"


def _splits_in_name(order: Order, best: Plan) -> bool:
    """Whether an order's plan differs from plans like the best one by rows that nothing splits: it is one of those,
    too."""
    splits, best_splits = (one.technique.sequence_parallel for one in (order.scenario, best.scenario))
    return splits and not best_splits and order.best is not None and order.best.configuration.tp == 1


def _pool_name(pool: Pool, objective: Objective) -> str:
    """The device, with its price where that is minimised: pools may differ in it alone."""
    return f"{pool.device.name} at {pool.price_per_hour:g}" if objective.name == "cost" else pool.device.name
