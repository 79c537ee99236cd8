"""What the data does to a plan: step times of every composition of its microbatches, and the advice."""

from dataclasses import dataclass, replace
from pathlib import Path

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.errors import InputError
from mmplan.planner.advice import Advice, advise
from mmplan.planner.composition import COMPOSITIONS
from mmplan.planner.plan import Plan, load_plan, save_plan, scenario_hash
from mmplan.planner.step_times import StepTimes, step_times
from mmplan.scenario.scenario import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class DataStudy:
    """Without a plan there are no times, and microbatches are single samples."""

    plan: Plan | None
    times: tuple[StepTimes, ...]
    advice: Advice | None

    @property
    def microbatch_size(self) -> int:
        return 1 if self.plan is None else self.plan.microbatch_size

    @property
    def replicas(self) -> int:
        return 1 if self.plan is None else self.plan.dp


def study_data(scenario: Scenario, plan_file: Path | None, steps: int) -> DataStudy:
    """Draw `steps` steps and time them under each composition.

    Raises:
        InputError: the plan is of another scenario, or is no plan.
    """
    if plan_file is None:
        return DataStudy(plan=None, times=(), advice=None)
    plan = load_plan(plan_file)
    if plan.scenario_hash != scenario_hash(scenario):
        raise InputError(f"a plan of scenario {plan.scenario.name}, or of another version of it", file=plan_file)
    graph, costs = build_graph(scenario), AnalyticCostModel(scenario)
    times = step_times(plan, graph, costs, steps=steps, compositions=COMPOSITIONS)
    return DataStudy(plan=plan, times=times, advice=advise(times))


def save_advised_plan(study: DataStudy, path: Path) -> None:
    """The plan with the composition that is advised.

    Raises:
        InputError: there is no plan.
    """
    if study.plan is None or study.advice is None:
        raise InputError("a plan is needed to write one: mmplan data SCENARIO PLAN -o FILE")
    save_plan(replace(study.plan, composition=study.advice.composition), path)
