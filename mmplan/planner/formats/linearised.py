"""A plan as a target can run it: changed step by step, every change told and priced by the simulator.

A target that has no word for a part of a plan runs another one instead. That other plan is made here, whole, with the
same cost model: what a change costs is the difference of two simulated mean steps, and whether it fits is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.layout import RecomputeLevel
from mmplan.errors import CheckError
from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import plan_from_cut
from mmplan.planner.formats.exported import Loss
from mmplan.planner.plan import Plan, module_of
from mmplan.planner.pricing import Prices
from mmplan.planner.schedules.reschedule import with_orders
from mmplan.planner.simulate import simulate
from mmplan.scenario.scenario import Scenario
from mmplan.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The plan as the target runs it so far, its mean step (None: not simulated yet), and what the changes cost."""

    plan: Plan
    step_s: float | None = None
    losses: tuple[Loss, ...] = ()

    def changed(self, plan: Plan, sentence: str) -> "Draft":
        """The same with another plan; the price is what its step takes longer (a negative one: it is faster)."""
        before_s = mean_step_s(self.plan) if self.step_s is None else self.step_s
        after_s = mean_step_s(plan)
        loss = Loss(sentence=sentence, step_s=after_s - before_s)
        return Draft(plan=plan, step_s=after_s, losses=(*self.losses, loss))


def mean_step_s(plan: Plan) -> float:
    """Seconds of a step of mean microbatches."""
    prices = _prices(plan.scenario)
    return simulate(plan, prices.graph, prices.costs).step_time_s


@lru_cache(maxsize=8)  # an export changes its scenario two or three times
def _prices(scenario: Scenario) -> Prices:
    return Prices(scenario, build_graph(scenario), AnalyticCostModel(scenario))


def repriced(
    plan: Plan,
    *,
    stages: Sequence[Sequence[str]] | None = None,
    levels: Sequence[RecomputeLevel] | None = None,
    scenario: Scenario | None = None,
    **degrees: Any,
) -> Plan:
    """The plan with other stages, recomputation, scenario or degrees (fields of `Configuration`), every number anew.

    As many stages as before keep their pipeline ranks and orders; any other number has a rank each and runs 1F1B.

    Raises:
        CheckError: the plan's orders are not for these stages.
    """
    scenario = scenario or plan.scenario
    cut = stages or [stage.layers for stage in plan.stages]
    if levels is None and stages is None:
        levels = [stage.recompute for stage in plan.stages]
    names = (
        "dp",
        "tp",
        "cp",
        "ep",
        "etp",
        "sharding",
        "spread",
        "patches",
        "together",
        "batch_factor",
        "prefetch",
        "microbatch_size",
        "microbatches",
        "meshes",
    )
    known: dict[str, Any] = {name: getattr(plan, name) for name in (*names, "patches")} | degrees
    known["mesh_stages"] = tuple(
        sum(module_of(layers[0]) in mesh.modules for layers in cut) for mesh in known["meshes"]
    )
    configuration = Configuration(pp=len(cut), schedule="gpipe" if plan.schedule == "gpipe" else "1f1b", **known)
    prices = _prices(scenario)
    made = plan_from_cut(prices, configuration, cut, bound_s=0.0, status="given", wall_s=0.0, levels=levels)
    made = replace(made, composition=plan.composition)
    if len(cut) != len(plan.stages) or not plan.orders:
        return made
    made = replace(made, placement=plan.placement, schedule=plan.schedule, orders=plan.orders)
    return with_orders(made, prices.graph, prices.costs)


def each_alone(plan: Plan, target: str) -> Draft:
    """The plan with every module on one microbatch at a time, and on those of its own step."""
    draft = Draft(plan=plan)
    if plan.prefetch:
        sentence = f"{target} runs {' and '.join(plan.prefetch)} in the step that reads it instead of one before"
        draft = draft.changed(repriced(plan, prefetch=()), sentence)
    if plan.batch_factor == 1:
        return draft
    names = " and ".join(plan.together)
    sentence = f"{target} runs {names} on each microbatch alone instead of {plan.batch_factor} at once"
    return draft.changed(repriced(draft.plan, together=(), batch_factor=1), sentence)


def with_sequence_parallel(draft: Draft, why: str) -> Draft:
    """The plan with norms and residuals split over tp, where they are not."""
    scenario = draft.plan.scenario
    if draft.plan.tp == 1 or scenario.technique.sequence_parallel:
        return draft
    other = replace(scenario, technique=replace(scenario.technique, sequence_parallel=True))
    return draft.changed(repriced(draft.plan, scenario=other), why)


def recomputed_everywhere(draft: Draft, target: str) -> Draft:
    """All blocks of all stages where the plan recomputes any, else none."""
    levels = {stage.recompute for stage in draft.plan.stages}
    if levels <= {"none"} or levels == {"full"}:
        return draft
    made = repriced(draft.plan, levels=["full"] * len(draft.plan.stages))
    return draft.changed(made, f"{target} recomputes whole blocks everywhere or nowhere")


def require_fit(plan: Plan, target: str) -> None:
    """Refuse what a target's own way makes too large.

    Raises:
        CheckError: a stage needs more memory than its device has.
    """
    for index, stage in enumerate(plan.stages):
        if stage.memory_bytes > stage.capacity_bytes:
            raise CheckError(
                f"as {target} runs the plan, stage {index} needs {format_bytes(stage.memory_bytes)} of a device with "
                f"{format_bytes(stage.capacity_bytes)}"
            )
