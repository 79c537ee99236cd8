"""What is proved of fewer devices than those of a plan that was to have the fewest, and how near they come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmplan.planner.by_devices import StepsByDevices, least_by_devices, least_within
from mmplan.planner.first_bounds import NEVER
from mmplan.planner.objective import Objective, devices_scale
from mmplan.planner.quantise import seconds
from mmplan.planner.space import Answer, Space


@dataclass(frozen=True, kw_only=True, slots=True)
class FewerDevices:
    """No plan on fewer than `least` devices has a step within the deadline, by the closed form.

    On fewer than the plan's devices no step is shorter than `step_bound_s`; None where nothing fits into their memory,
    or where modules with ranks of their own were searched, of which this is not known.
    """

    deadline_s: float
    least: int
    step_bound_s: float | None
    fits: bool = True  # something may fit into the memory of fewer devices


def steps_by_devices(space: Space, answers: Mapping[int, Answer]) -> StepsByDevices:
    """By number of devices, the least step that is not excluded, NEVER where memory is not enough; of modules that
    share one mesh."""
    step_ns = space.bounds_ns.copy()
    for index, answer in answers.items():
        step_ns[index] = max(int(step_ns[index]), answer.bound_ns)
    return least_by_devices(space.configurations.ranks, step_ns)


def fewer_devices(
    objective: Objective, devices: int, floors: Sequence[int], found: Sequence[StepsByDevices | None]
) -> FewerDevices | None:
    """What all orders of pools and techniques prove together; None where devices were not counted.

    Args:
        devices: of the plan.
        floors: no plan of one order has a lower value.
        found: of each order; None where modules with ranks of their own were searched, too.
    """
    if objective.deadline_s is None:
        return None
    least = min(devices, min(floors) // devices_scale(objective.deadline_s).per_rank)
    known = [steps for steps in found if steps is not None]
    if len(known) < len(found):
        return FewerDevices(deadline_s=objective.deadline_s, least=least, step_bound_s=None)
    step_ns = least_within(known, devices - 1)
    return FewerDevices(
        deadline_s=objective.deadline_s,
        least=least,
        step_bound_s=None if step_ns == NEVER else seconds(step_ns),
        fits=step_ns != NEVER,
    )
