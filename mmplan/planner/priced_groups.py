"""What every planner of a scenario starts from: its layers, priced, in groups that no cut may separate."""

from dataclasses import dataclass

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.contract import GroupGraph, contract
from mmplan.planner.pricing import Prices
from mmplan.scenario.scenario import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedGroups:
    """`prices` remembers what was asked, so it is shared by all who plan one scenario."""

    prices: Prices
    groups: GroupGraph

    def under(self, scenario: Scenario) -> "PricedGroups":
        """The same layers on another cluster of like devices, with another batch or other constraints (not zones)."""
        return PricedGroups(prices=self.prices.under(scenario, AnalyticCostModel(scenario)), groups=self.groups)


def priced_groups(scenario: Scenario) -> PricedGroups:
    """The finest groups that the constraints allow."""
    graph = build_graph(scenario)
    prices = Prices(scenario, graph, AnalyticCostModel(scenario))
    return PricedGroups(prices=prices, groups=contract(graph, scenario.constraints.no_split))
