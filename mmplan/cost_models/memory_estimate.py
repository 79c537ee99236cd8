"""A rank's memory as named parts, and the verdict on it.

Three numbers are told apart: `allocated` (bytes of live tensors, torch.cuda.max_memory_allocated), `reserved`
(with what the caching allocator holds but cannot use, max_memory_reserved) and `device` (with context and
communication buffers, what nvidia-smi shows and what has to fit).
"""

from dataclasses import dataclass
from typing import Literal

from mmplan.units import format_bytes

Level = Literal["allocated", "reserved", "device"]
VerdictKind = Literal["fits", "tight", "OOM"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPart:
    """One term of the sum: `why` shows its formula with numbers; `level` is the lowest number that includes it."""

    name: str
    bytes: int
    why: str
    level: Level = "allocated"


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A point of the run at which memory may peak: training step, optimizer update, load."""

    name: str
    parts: tuple[MemoryPart, ...]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeTensor:
    """One of the largest single tensors of a rank."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """`fits` leaves the headroom free, `tight` only what is physically there, `OOM` not even that.

    `decides` names the part that first crosses the limit when parts are added in order (states, gathered parameters,
    activations, the rest); in a fit it is the largest part.
    """

    kind: VerdictKind
    decides: str
    sentence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Memory of one rank of a stage at each moment that can be its peak; `parts` are those of the highest."""

    stage: int
    moments: tuple[Moment, ...]
    host_parts: tuple[MemoryPart, ...]
    largest: tuple[LargeTensor, ...]
    limit_bytes: int
    headroom: float

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def parts(self) -> tuple[MemoryPart, ...]:
        return self.peak.parts

    @property
    def allocated_bytes(self) -> int:
        """Highest sum of live tensors over the moments."""
        return max(_sum(moment, ("allocated",)) for moment in self.moments)

    @property
    def reserved_bytes(self) -> int:
        return max(_sum(moment, ("allocated", "reserved")) for moment in self.moments)

    @property
    def device_bytes(self) -> int:
        """What has to fit: the number that the verdict compares with the device's memory."""
        return self.peak.bytes

    def part_bytes(self, name: str) -> int:
        """Bytes of the part of that name at the peak; 0 when there is none."""
        return sum(part.bytes for part in self.parts if part.name == name)

    @property
    def verdict(self) -> Verdict:
        usable = self.limit_bytes * (1 - self.headroom)
        total, limit = self.device_bytes, self.limit_bytes
        if total <= usable:
            largest = max(self.parts, key=lambda part: part.bytes)
            sentence = f"{format_bytes(total)} of {format_bytes(limit)} with {self.headroom:.0%} to stay free"
            return Verdict(kind="fits", decides=largest.name, sentence=sentence)
        if total <= limit:
            decides, terms = _crossing(self.parts, usable)
            sentence = (
                f"{terms} = {format_bytes(total)}: inside {format_bytes(limit)}, but less than {self.headroom:.0%} free"
            )
            return Verdict(kind="tight", decides=decides, sentence=sentence)
        decides, terms = _crossing(self.parts, limit)
        return Verdict(kind="OOM", decides=decides, sentence=f"{terms} = {format_bytes(total)} > {format_bytes(limit)}")


def _sum(moment: Moment, levels: tuple[Level, ...]) -> int:
    return sum(part.bytes for part in moment.parts if part.level in levels)


def _crossing(parts: tuple[MemoryPart, ...], limit: float) -> tuple[str, str]:
    """Name of the part with which the running sum first exceeds `limit`, and the sum as text.

    Where several state parts are needed to cross, the largest of them decides.
    """
    running, decides = 0, parts[-1].name
    for index, part in enumerate(parts):
        running += part.bytes
        if running > limit:
            states = [other for other in parts[: index + 1] if other.name in STATE_PARTS]
            is_state = part.name in STATE_PARTS and bool(states)
            decides = max(states, key=lambda other: other.bytes).name if is_state else part.name
            break
    shown = [part for part in parts if part.bytes >= 0.005 * sum(p.bytes for p in parts)]
    return decides, " + ".join(f"{part.name} {format_bytes(part.bytes)}" for part in shown)


STATE_PARTS = ("weights", "gradients", "optimizer state", "FP8 weights", "context and NCCL")  # there all the time
