"""`ModalityAwarePolicy`: prices have changed; is another plan worth the switch?

Both plans are timed in simulation under the new prices. The switch costs seconds once and saves some in every step, so
it pays after `break_even_steps`. What a search cannot prove (its gap) is no reason to move.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.new_prices import forward_s
from mmplan.planner.plan import Plan, scenario_hash
from mmplan.planner.repeated import Limits
from mmplan.planner.simulate import simulate
from mmplan.planner.switch_cost import SwitchCost, switch_cost
from mmplan.scenario.document import counted
from mmplan.scenario.scenario import ModelModule, Scenario
from mmplan.units import format_bytes, format_seconds

_ZERO = {"optimizer": "ZeRO-1", "gradients": "ZeRO-2", "parameters": "FSDP"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleChange:
    """One module: seconds of its forward for a microbatch of the old plan at old and new prices, and how each plan
    splits it."""

    module: str
    modality: str
    before_s: float
    now_s: float
    old_strategy: str
    new_strategy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Replan:
    """`saved_s` per step; `break_even_steps` is None where nothing is saved."""

    plan: Plan
    planned_step_s: float
    old_step_s: float
    new_step_s: float
    saved_s: float
    switch: SwitchCost
    break_even_steps: int | None
    advice: Literal["stay", "switch"]
    reason: str
    modules: tuple[ModuleChange, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModalityAwarePolicy:
    """`steps`: those left in the training, None when unknown. `restart_s`: to stop, save and start again."""

    limits: Limits = field(default_factory=Limits)
    restart_s: float = 0.0
    steps: int | None = None

    def propose(self, plan: Plan, scenario: Scenario) -> Replan:
        """The best plan at new prices beside the present one.

        Args:
            scenario: the plan's own under new prices, see `new_prices.py`.

        Raises:
            InfeasibleError, NoPlanFoundError: as `optimize`.
        """
        new = self.limits.solve(scenario).plan
        here = replace(plan, scenario=scenario, scenario_hash=scenario_hash(scenario))
        before_s, old_s, new_s = (_step_s(one) for one in (plan, here, new))
        saved_s, cost = old_s - new_s, switch_cost(plan, new, self.restart_s)
        steps = math.ceil(cost.seconds / saved_s) if saved_s > 0 else None
        advice, reason = self._advice(old_s, saved_s, cost, steps)
        return Replan(
            plan=new,
            planned_step_s=before_s,
            old_step_s=old_s,
            new_step_s=new_s,
            saved_s=saved_s,
            switch=cost,
            break_even_steps=steps,
            advice=advice,
            reason=reason,
            modules=tuple(_change(module, plan, here, new) for module in plan.scenario.model.modules),
        )

    def _advice(
        self, old_s: float, saved_s: float, cost: SwitchCost, break_even: int | None
    ) -> tuple[Literal["stay", "switch"], str]:
        if break_even is None:
            return "stay", "no plan found is faster than the present one at the new prices"
        share = saved_s / old_s
        if share <= self.limits.gap:
            return (
                "stay",
                f"a new plan saves {share:.1%} of a step, no more than the {self.limits.gap:.1%} left unproven",
            )
        pays = (
            f"{format_seconds(saved_s)} ({share:.1%}) saved per step; moving {format_bytes(cost.moved_bytes)} costs "
            f"{format_seconds(cost.seconds)}, won back in {counted(break_even, 'step')}"
        )
        if self.steps is None:
            return "switch", pays
        if self.steps <= break_even:
            return "stay", f"{pays}, and {self.steps:,} are left"
        won_s = self.steps * saved_s - cost.seconds
        return "switch", f"{pays}; over the {self.steps:,} left it wins {format_seconds(won_s)}"


def _step_s(plan: Plan) -> float:
    return simulate(plan, build_graph(plan.scenario), AnalyticCostModel(plan.scenario)).step_time_s


def _change(module: ModelModule, plan: Plan, here: Plan, new: Plan) -> ModuleChange:
    return ModuleChange(
        module=module.name,
        modality=module.modality,
        before_s=forward_s(plan, (module.name,)),
        now_s=forward_s(here, (module.name,)),
        old_strategy=strategy_of(plan, module),
        new_strategy=strategy_of(new, module),
    )


def strategy_of(plan: Plan, module: ModelModule) -> str:
    """`TP 4 + EP 8 + FSDP over 16`: how a plan splits a module."""
    parts = []
    mesh = next((one for one in plan.meshes if module.name in one.modules), None)
    own, spread, patches = (
        mesh or plan.base,
        mesh.spread if mesh else plan.spread,
        mesh.patches if mesh else plan.patches,
    )
    replicas, dp = own.dp * own.cp, own.dp
    if module.name in patches:
        parts.append(f"patches over {own.width}")
    elif module.name in spread:
        parts.append(f"samples over {own.width}")
    elif own.tp > 1:
        parts.append(f"TP {own.tp}")
    if plan.cp > 1 and module.kind == "language_model":
        parts.append(f"CP {plan.cp}")
    if plan.ep > 1 and module.transformer is not None and module.transformer.moe is not None:
        parts.append(f"EP {plan.ep}")
    if replicas > 1 and plan.sharding != "none":
        parts.append(f"{_ZERO[plan.sharding]} over {replicas}")
    elif dp > 1:
        parts.append(f"DP {dp}")
    stages = {plan.row(s) for s, stage in enumerate(plan.stages) if any(_of(name, module) for name in stage.layers)}
    if len(stages) > 1:
        parts.append(f"{len(stages)} stages")
    return " + ".join(parts) or "one rank"


def _of(layer: str, module: ModelModule) -> bool:
    return layer.rpartition(".")[0] == module.name
