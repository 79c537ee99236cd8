"""One scenario at many points: each is planned on its own, and one that cannot be planned is a row with the reason."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from mmplan.errors import InputError, MmplanError
from mmplan.planner.plan import Plan
from mmplan.planner.repeated import Limits
from mmplan.scenario.document import Document
from mmplan.scenario.load import scenario_of
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.variations import varied


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Values by key, and the scenario they make, or why they make none."""

    values: dict[str, Any]
    scenario: Scenario | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SolvedPoint:
    """A point with its plan, or the reason why it has none. `devices`: of its cluster, None where it has none."""

    values: dict[str, Any]
    devices: int | None
    plan: Plan | None
    reason: str = ""


def read_points(document: Document, combinations: Sequence[Mapping[str, Any]]) -> tuple[Point, ...]:
    """The scenario of every combination.

    Raises:
        InputError: none of them is a scenario; says what is wrong with the first.
    """
    found, errors = [], []
    for values in combinations:
        try:
            found.append(Point(values=dict(values), scenario=scenario_of(varied(document, values))))
        except MmplanError as error:
            errors.append(error)
            found.append(Point(values=dict(values), scenario=None, reason=str(error)))
    if len(errors) == len(found):
        raise errors[0] if errors else InputError("a sweep needs at least one point")
    return tuple(found)


def solve_points(points: Sequence[Point], limits: Limits) -> Iterator[SolvedPoint]:
    """The points in their order, each when it is done; ends early, without the point at work, when `stop` says so."""
    for point in points:
        if limits.stop():
            return
        solved = _solved(point, limits)
        if limits.stop() and (solved.plan is None or solved.plan.certificate.status != "optimal"):
            return
        yield solved


def _solved(point: Point, limits: Limits) -> SolvedPoint:
    if point.scenario is None:
        return SolvedPoint(values=point.values, devices=None, plan=None, reason=point.reason)
    devices = point.scenario.cluster.device_count
    try:
        plan = limits.solve(point.scenario).plan
    except MmplanError as error:
        return SolvedPoint(values=point.values, devices=devices, plan=None, reason=str(error))
    return SolvedPoint(values=point.values, devices=devices, plan=plan)


@contextmanager
def interruptible(limits: Limits) -> Iterator[Limits]:
    """Limits whose `stop` is also true after the first Ctrl-C, which then ends nothing else; a second one ends all."""
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    def stop() -> bool:
        if not pressed:  # again and again: OR-Tools leaves the system's own handler behind, which ends the process
            signal.signal(signal.SIGINT, press)
        return pressed or limits.stop()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield replace(limits, stop=stop)
    finally:
        signal.signal(signal.SIGINT, before)
