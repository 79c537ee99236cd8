"""Shadow prices of no-split zones: by how much a step would be shorter if a zone were not there.

The scenario is solved again without each zone, and once without any. Every plan with a zone is one without it, so a
price is never negative. What the gaps of the two searches leave open stands beside it as a proven range.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.errors import NoPlanFoundError
from mmplan.planner.plan import Certificate
from mmplan.planner.repeated import Limits
from mmplan.scenario.asked import Zone
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.zones import under_zones

ALL = "all zones"


@dataclass(frozen=True, kw_only=True, slots=True)
class ZonePrice:
    """Seconds of a step that a zone costs; None where no plan without it was found in time.

    `price_s`: of the plans found. The price of the optima is proven to lie from `least_s` to `most_s`.
    """

    zone: str
    layers: int
    forbid: tuple[str, ...]
    without_s: float | None
    price_s: float | None
    least_s: float | None
    most_s: float | None


def zone_prices(scenario: Scenario, certificate: Certificate, limits: Limits) -> tuple[ZonePrice, ...]:
    """The price of each zone, and of all together where there are several.

    Args:
        certificate: of the plan that respects all zones.
    """
    zones = scenario.constraints.zones
    cases = [(zone.name, [zone], [other for other in zones if other is not zone]) for zone in zones]
    if len(zones) > 1:
        cases.append((ALL, list(zones), []))
    found = []
    for name, gone, left in cases:
        free = under_zones(scenario, left)
        try:
            result = limits.solve(free)
        except NoPlanFoundError:
            found.append(_unknown(name, gone))
            continue
        found.append(_price(name, gone, certificate, result.plan.certificate))
    return tuple(found)


def _price(name: str, gone: Sequence[Zone], kept: Certificate, free: Certificate) -> ZonePrice:
    """The optimum with the zone lies between `kept`'s bound and objective, the one without between `free`'s."""
    without_s = min(kept.objective_s, free.objective_s)
    return ZonePrice(
        zone=name,
        layers=_layers(gone),
        forbid=gone[0].forbid,
        without_s=without_s,
        price_s=kept.objective_s - without_s,
        least_s=max(0.0, kept.bound_s - without_s),
        most_s=max(0.0, kept.objective_s - free.bound_s),
    )


def _unknown(name: str, gone: Sequence[Zone]) -> ZonePrice:
    nothing = dict.fromkeys(("without_s", "price_s", "least_s", "most_s"))
    return ZonePrice(zone=name, layers=_layers(gone), forbid=gone[0].forbid, **nothing)


def _layers(zones: Sequence[Zone]) -> int:
    return len({layer for zone in zones for layer in zone.layers})
