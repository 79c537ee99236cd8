"""What a solver of the stage-cut problem answers."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CutResult:
    """What a solver knows: the best cut found (None: none below the cutoff), and that no cut is below `bound_ns`.

    `exhausted` tells that a budget was hit, so that the bound may lie below the best cut.
    """

    stage_of: tuple[int, ...] | None
    objective_ns: int | None
    bound_ns: int
    exhausted: bool
