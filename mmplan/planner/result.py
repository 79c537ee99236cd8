"""What a search hands back, and what it says while it works."""

from dataclasses import dataclass

from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import StepTime
from mmplan.planner.fewer_devices import FewerDevices
from mmplan.planner.plan import Plan, Status


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """State of a running search; `objective_s` and `gap` are None until a plan is found."""

    objective_s: float | None
    bound_s: float
    gap: float | None
    wall_s: float
    enumerated: int
    solved: int
    doing: str  # the configuration just solved, or what comes before the first


@dataclass(frozen=True, kw_only=True, slots=True)
class Considered:
    """What became of the configurations: `enumerated` = out_of_memory + bounded_away + solved.

    `out_of_memory`: excluded by the memory relaxation; `bounded_away`: not solved, their lower bound is too high or the
    search ended first; `infeasible` of the solved ones fit no cut into memory. `in_chunks` of the enumerated ones have
    several chunks of layers per rank. `unread`: orders of pools and techniques whose configurations the limit left
    unlisted; they count with what their matrix products take at least.
    """

    enumerated: int
    out_of_memory: int
    bounded_away: int
    solved: int
    infeasible: int
    in_chunks: int = 0
    unread: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerUp:
    """Another configuration and why it loses, in one sentence.

    `objective_s`: its step time with its best cut; None when no cut fits into memory. Each `*_more_s` is a term of its
    step time minus the winner's: repeating the busiest stage, the critical path that fills and drains the pipeline,
    and gradient reduction with the update.
    """

    configuration: Configuration
    objective_s: float | None
    repeat_more_s: float
    fill_more_s: float
    finish_more_s: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizeResult:
    """The best plan by the `objective` of that name, with its certificate; `bound_s` holds over the whole search space.
    `configuration` and `time` are those of the cut."""

    plan: Plan
    configuration: Configuration
    time: StepTime
    bound_s: float
    gap: float
    status: Status
    wall_s: float
    considered: Considered
    runner_ups: tuple[RunnerUp, ...]
    proofs: tuple[str, ...]  # methods that proved that the plan's configuration has no cut better by more than the gap
    objective: str = "step-time"
    fewer: FewerDevices | None = None  # where devices were minimised
