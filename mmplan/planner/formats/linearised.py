"""A plan as a target can run it: changed step by step, every change told and priced by the simulator.

A target that has no word for a part of a plan runs another one instead. That other plan is made here, whole, with the
same cost model: what a change costs is the difference of two simulated mean steps, and whether it fits is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from mmplan.planner.schedules.reschedule import with_family
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
    return simulate(plan, build_graph(plan.scenario), AnalyticCostModel(plan.scenario)).step_time_s


def repriced(
    plan: Plan,
    *,
    stages: Sequence[Sequence[str]] | None = None,
    levels: Sequence[RecomputeLevel] | None = None,
    scenario: Scenario | None = None,
    **degrees: Any,
) -> Plan:
    """The plan with other stages, recomputation, scenario or degrees (fields of `Configuration`), every number anew.

    One stage per pipeline rank runs 1F1B. Where the plan has several per rank, they are laid round the ranks and run
    interleaved.

    Raises:
        CheckError: interleaving is not for these stages.
    """
    scenario = scenario or plan.scenario
    cut = stages or [stage.layers for stage in plan.stages]
    if levels is None and stages is None:
        levels = [stage.recompute for stage in plan.stages]
    names = ("dp", "tp", "cp", "ep", "etp", "sharding", "spread", "microbatch_size", "microbatches", "meshes")
    known: dict[str, Any] = {name: getattr(plan, name) for name in names} | degrees
    known["mesh_stages"] = tuple(
        sum(module_of(layers[0]) in mesh.modules for layers in cut) for mesh in known["meshes"]
    )
    configuration = Configuration(pp=len(cut), schedule="1f1b", **known)
    graph, costs = build_graph(scenario), AnalyticCostModel(scenario)
    prices = Prices(scenario, graph, costs)
    made = plan_from_cut(prices, configuration, cut, bound_s=0.0, status="given", wall_s=0.0, levels=levels)
    made = replace(made, composition=plan.composition)
    if not plan.placement or len(cut) == plan.pp:
        return made
    looped = replace(made, placement=tuple(stage % plan.pp for stage in range(len(cut))))
    choice = with_family(looped, "interleaved", graph, costs)
    if choice.plan is None:
        raise CheckError(f"{len(cut)} stages on {plan.pp} pipeline ranks cannot be interleaved: {choice.reason}")
    return choice.plan


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
