"""What every planner of a scenario starts from: its layers, priced, in groups that no cut may separate."""

from dataclasses import dataclass

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.contract import GroupGraph, coarsen, contract
from mmplan.planner.pricing import Prices
from mmplan.planner.upsets import Upsets, enumerate_upsets
from mmplan.scenario.scenario import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedGroups:
    """`prices` remembers what was asked, so it is shared by all who plan one scenario."""

    prices: Prices
    groups: GroupGraph


def priced_groups(scenario: Scenario) -> PricedGroups:
    """The finest groups that the constraints allow."""
    graph = build_graph(scenario)
    prices = Prices(scenario, graph, AnalyticCostModel(scenario))
    return PricedGroups(prices=prices, groups=contract(graph, scenario.constraints.no_split))


def coarse_enough(priced: PricedGroups) -> tuple[GroupGraph, Upsets]:
    """Neighbours merged until the dynamic program can list all upsets; the groups themselves where it can at once."""
    groups = priced.groups
    upsets = enumerate_upsets(len(groups.groups), groups.pairs)
    while upsets is None:
        groups = coarsen(priced.prices.graph, groups)
        upsets = enumerate_upsets(len(groups.groups), groups.pairs)
    return groups, upsets
