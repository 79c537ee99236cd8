"""What a constraint brings that has to be asked for: scenarios planned without and with it, a CSV row of each."""

import argparse
import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from measured import ROOT, write_rows

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.result import OptimizeResult
from mmplan.planner.search import optimize
from mmplan.planner.simulate import simulate
from mmplan.scenario.scenario import Scenario

GAP, LIMIT_S = 0.01, 60.0


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and seconds of its mean step in simulation."""

    result: OptimizeResult
    step_s: float


def planned(scenario: Scenario) -> Planned:
    """To a gap of 1 %."""
    result = optimize(scenario, gap=GAP, time_limit_s=LIMIT_S)
    costs = AnalyticCostModel(result.plan.scenario)
    return Planned(result, simulate(result.plan, build_graph(scenario), costs).step_time_s)


def write_asked(name: str, about: str, scenarios: Sequence[str], row: Callable[[str], dict[str, object]]) -> None:
    """Rows of `benchmarks/NAME.csv` for the scenarios of the command line, new or in place of theirs."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("scenarios", nargs="*", default=scenarios)
    file = ROOT / "benchmarks" / f"{name}.csv"
    known: dict[str, dict[str, object]] = {}
    if file.exists():
        with file.open(newline="") as text:
            known = {one["scenario"]: dict(one) for one in csv.DictReader(text)}
    for scenario in parser.parse_args().scenarios:
        known[scenario] = row(scenario)
        print(known[scenario], flush=True)
        write_rows(file.name, list(known.values()))
