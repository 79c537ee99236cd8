"""What the loop of `optimize` has learned so far: the best plan, what is open, and so what no plan can be below."""

from dataclasses import dataclass, field

from mmplan.planner.bounds import NEVER
from mmplan.planner.by_devices import StepsByDevices, least_by_devices
from mmplan.planner.configuration import Configuration
from mmplan.planner.fewer_devices import steps_by_devices
from mmplan.planner.frontier import Frontier
from mmplan.planner.mesh_frontier import MeshFrontier
from mmplan.planner.objective import Scale
from mmplan.planner.quantise import lowered_ns, seconds
from mmplan.planner.result import Considered
from mmplan.planner.rivals import Candidate
from mmplan.planner.space import Answer, Space


@dataclass(slots=True)
class Part:
    """Configurations of one mesh that are proved apart from others, and the least bound of those solved."""

    frontier: Frontier
    unproved: int = NEVER
    within_gap: int = 0  # solved although the gap was proven already

    def floor_value(self) -> int:
        """None of them has a lower value."""
        return min(self.unproved, self.frontier.known_value())


@dataclass(slots=True)
class Search:
    """Values are of the objective; `last` is the configuration solved last."""

    parts: tuple[Part, ...]  # with one chunk per rank, with several; none where the constraints want meshes
    scale: Scale
    meshes: tuple[MeshFrontier, ...]  # of the others
    incumbent: Candidate | None = None
    solved: int = 0
    last: Configuration | None = None
    unproved: int = NEVER  # least bound of what was solved on meshes of their own
    exhausted: bool = False  # some configuration without a cut was not solved to the end
    answers: dict[int, Answer] = field(default_factory=dict)
    meshed: dict[Configuration, Candidate] = field(default_factory=dict)  # of modules on meshes of their own
    unfit: int = 0  # of those, without any cut

    def target(self, tolerance: float) -> int:
        """The value that a better plan must be below; NEVER without an incumbent."""
        best = self.incumbent
        if best is None:
            return NEVER
        return self.scale.value_of(best.configuration, lowered_ns(best.step_ns, tolerance))

    def least_value(self) -> int:
        """No plan that was not looked at has a lower value."""
        shared = [part.frontier.known_value() for part in self.parts]
        return min([*shared, *(frontier.known_value() for frontier in self.meshes)], default=NEVER)

    def floor_value(self) -> int:
        """No plan has a lower value."""
        return min(self.unproved, self.least_value(), *(part.unproved for part in self.parts))

    def any_order_value(self, space: Space) -> int:
        """No plan has a lower value under any schedule, with any number of chunks per rank."""
        shared = (space.any_order_value,) if self.parts else ()
        return min([*shared, *(frontier.any_order_value for frontier in self.meshes)], default=NEVER)

    def any_schedule_by_devices(self, space: Space) -> tuple[StepsByDevices, ...]:
        """By number of devices, the least step of any schedule; one or several parts of the search."""
        shared = least_by_devices(space.configurations.ranks, space.first.any_order_ns)
        parts = (shared,) if self.parts else ()
        return *parts, *(frontier.any_order_by_devices for frontier in self.meshes)

    def steps_by_devices(self, space: Space) -> StepsByDevices | None:
        """See `fewer_devices`; None where modules with ranks of their own were searched, too."""
        shared = self.parts != () and not self.meshes
        return steps_by_devices(space, self.answers) if shared else None

    def bound_s(self, of: Candidate) -> float:
        """No plan is better than one of this configuration with such a step."""
        step_ns = self.scale.step_below_of(of.configuration, self.floor_value())
        return min(seconds(step_ns), of.time.objective_s)

    def met(self, space: Space) -> int:
        """Configurations whose modules share one mesh, and those with meshes of their own that were looked at."""
        shared = len(space.configurations) if self.parts else 0
        return shared + sum(frontier.tally.met for frontier in self.meshes)

    def considered(self, space: Space) -> Considered:
        excluded = int((space.bounds_ns == NEVER).sum()) if self.parts else 0
        excluded += sum(frontier.tally.out_of_memory for frontier in self.meshes)
        met = self.met(space)
        return Considered(
            enumerated=met,
            out_of_memory=excluded,
            bounded_away=met - excluded - self.solved,
            solved=self.solved,
            infeasible=self.unfit + sum(answer.unfit for answer in self.answers.values()),
            in_chunks=int((space.configurations.vp > 1).sum()) if self.parts else 0,
        )
