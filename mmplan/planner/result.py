"""What a search hands back, and what it says while it works."""

from dataclasses import dataclass
from typing import Literal

from mmplan.planner.configuration import Configuration
from mmplan.planner.plan import Plan, Status


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """State of a running search; `objective_s` is None until a plan is found."""

    objective_s: float | None
    bound_s: float
    gap: float | None
    wall_s: float
    enumerated: int
    solved: int
    configuration: str  # the one worked on


@dataclass(frozen=True, kw_only=True, slots=True)
class Considered:
    """Configurations listed; of them excluded by bound alone (time or memory), and solved to the end."""

    enumerated: int
    out_of_memory: int  # by the relaxation
    bounded_away: int
    solved: int
    infeasible: int  # of the solved ones: no cut fits into memory


Term = Literal["bottleneck", "fill", "finish", "memory", "bound"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerUp:
    """Another configuration and why it loses.

    `objective_s` is its best step time, a lower bound of it when `solved` is false, None when nothing fits. Each `*_more_s`
    is its term of the step time minus the winner's: the busiest stage's repetitions, the critical path of one
    microbatch (fill and drain), gradient reduction and update.
    """

    configuration: Configuration
    objective_s: float | None
    solved: bool
    bottleneck_more_s: float
    fill_more_s: float
    finish_more_s: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizeResult:
    """The best plan with its certificate; `bound_s` holds over the whole search space."""

    plan: Plan
    bound_s: float
    gap: float
    status: Status
    wall_s: float
    considered: Considered
    runner_ups: tuple[RunnerUp, ...]
    proofs: tuple[str, ...]  # the methods that proved the plan's own cut optimal
