"""How others ran a scenario's job: degrees and software of a published run, or of the user's present one."""

from dataclasses import dataclass

from mmplan.scenario.asked import OwnRanks
from mmplan.scenario.schedule_names import ScheduleName
from mmplan.scenario.technique import Recompute, Sharding

# Fields of `Technique` that plans have as choices of their own, so they price them; others `mmplan fit` prices alone.
PLANNED = ("sharding", "recompute", "offload", "fp8", "sequence_parallel", "context_parallel")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A published configuration of a scenario's job, to compare plans with; what is None is chosen as is best for it.

    `vp`: chunks of layers per pipeline rank, run as interleaved 1F1B (arXiv 2104.04473, section 2.2.2) where `schedule`
    names no other. `modules`: those with ranks of their own, behind the ranks of all others, and their degrees.
    """

    name: str
    source: str
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None  # ranks that share one expert; None: as is best
    vp: int = 1
    dp: int | None = None  # None: as many replicas as the cluster has devices for
    microbatch: int | None = None
    schedule: ScheduleName | None = None  # None: 1F1B, interleaved with several chunks
    sharding: Sharding | None = None
    recompute: Recompute | None = None
    spread: tuple[str, ...] | None = None
    modules: tuple[OwnRanks, ...] = ()
    technique: tuple[tuple[str, bool | int | str], ...] = ()  # fields of Technique by name

    @property
    def unpriced(self) -> tuple[tuple[str, bool | int | str], ...]:
        """What of the technique plans do not price."""
        return tuple((name, value) for name, value in self.technique if name not in PLANNED)
