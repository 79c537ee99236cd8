"""From a plan to its simulated step, with the graph and costs of the scenario inside the plan."""

from collections.abc import Mapping

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.check import require_structure
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import Prediction
from mmplan.planner.simulate import simulate
from mmplan.planner.step_loads import drawn_step_loads
from mmplan.report.summary import PlanSummary, summarise


def simulate_plan(plan: Plan, step: int | None = None) -> Prediction:
    """One optimizer step: of mean microbatches (`step` None), or of the samples that step draws from the data.

    Raises:
        CheckError: the plan's stages or degrees are not sound.
    """
    require_structure(plan)
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    return simulate(plan, graph, costs, None if step is None else drawn_step_loads(plan, step))


def compare(plans: Mapping[str, Plan]) -> tuple[PlanSummary, ...]:
    """Named plans side by side: the numbers of `mmplan compare`, in the order given."""
    return tuple(summarise(name, plan, simulate_plan(plan)) for name, plan in plans.items())
