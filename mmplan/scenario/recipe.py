"""How others ran a scenario's job: degrees and software of a published run, or of the user's present one."""

from dataclasses import dataclass

from mmplan.scenario.technique import Recompute, Sharding


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A published configuration of a scenario's job, to compare plans with; what is None is chosen as is best for it.

    `vp`: chunks of layers per pipeline rank, run as interleaved 1F1B (arXiv 2104.04473, section 2.2.2).
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
    sharding: Sharding | None = None
    recompute: Recompute | None = None
    spread: tuple[str, ...] | None = None
    technique: tuple[tuple[str, bool | int | str], ...] = ()  # fields of Technique by name, for `mmplan fit` alone
