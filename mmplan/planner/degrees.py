"""One parallel configuration of a whole job: the numbers that people write on a launch command."""

from dataclasses import dataclass
from typing import Literal, get_args

ScheduleKind = Literal["1f1b", "gpipe", "interleaved", "zb-1p", "zb-2p", "zb-v"]
SCHEDULE_KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """World size = tp * cp * pp * dp; ep divides dp * cp (experts are spread over ranks that share no batch shard).

    Attributes:
        tp, cp, pp, dp: tensor, context, pipeline and data parallel degrees.
        vp: chunks of layers per rank (virtual stages of `interleaved`; 1 otherwise).
        ep, etp: expert parallel degree and tensor parallel degree inside an expert.
        microbatch_size: sequences per microbatch and replica.
        microbatches: per replica and optimizer step.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    microbatch_size: int = 1
    microbatches: int = 1
    schedule: ScheduleKind = "1f1b"

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name != "schedule" and value < 1:
                raise ValueError(f"{name}={value}: degrees start at 1")
        if self.vp > 1 and self.schedule not in ("interleaved", "zb-v"):
            raise ValueError(f"vp={self.vp} needs the schedule 'interleaved', found '{self.schedule}'")
        if self.schedule not in SCHEDULE_KINDS:
            raise ValueError(f"unknown schedule '{self.schedule}'; known: {', '.join(SCHEDULE_KINDS)}")

    @property
    def devices(self) -> int:
        """Devices of the whole job."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.microbatch_size * self.microbatches * self.dp
