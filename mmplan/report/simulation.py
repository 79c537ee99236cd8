"""From a plan to its simulated step, with the graph and costs of the scenario inside the plan."""

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.loads import sample_loads
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import Prediction
from mmplan.planner.simulate import simulate
from mmplan.scenario.samples import microbatch_samples


def simulate_plan(plan: Plan, step: int | None = None) -> Prediction:
    """One optimizer step: of mean microbatches (`step` None), or of the samples that step draws from the data."""
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    if step is None:
        return simulate(plan, graph, costs)
    drawn = microbatch_samples(plan.scenario, dp=plan.dp, microbatch_size=plan.microbatch_size, step=step)
    loads = [[sample_loads(plan.scenario, samples) for samples in replica] for replica in drawn]
    return simulate(plan, graph, costs, loads)
