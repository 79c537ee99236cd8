"""Schedule families on a DAG of stages: in which order every stage computes its forwards and backwards.

1F1B (Narayanan et al., SC 2021, section 2.2.1) and GPipe (Huang et al., NeurIPS 2019) are defined on chains by how many
microbatches a stage admits before its first backward: the number of stages from it to the end. On a DAG that number is
`depths[s]`, the stages on the longest path from `s` to a sink, so that parallel branches fill the pipeline alike. A
stage without backward (frozen, nothing trained upstream) only has forwards and holds nothing for later.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mmplan.planner.plan import ScheduleName
from mmplan.planner.schedule import Compute, Schedule

IntArray = npt.NDArray[np.int64]


def build_schedule(
    name: ScheduleName, stage_count: int, microbatches: int, depths: Sequence[int], has_backward: Sequence[bool]
) -> Schedule:
    """The order of every stage.

    Args:
        depths: per stage, the number of stages on the longest path to a sink, itself included.
        has_backward: per stage, whether any of its layers has a backward.

    Raises:
        ValueError: lengths disagree, or a count is not positive.
    """
    if not len(depths) == len(has_backward) == stage_count:
        raise ValueError(f"{stage_count} stages, {len(depths)} depths, {len(has_backward)} backward flags")
    if microbatches < 1 or any(depth < 1 for depth in depths):
        raise ValueError(f"microbatches {microbatches} and depths {tuple(depths)} must be positive")
    return tuple(
        _stage_order(stage, microbatches, in_flight(name, microbatches, depths[stage]), has_backward[stage])
        for stage in range(stage_count)
    )


def in_flight(name: ScheduleName, microbatches: int, depth: int) -> int:
    """Microbatches whose activations a stage at `depth` stages from the end of the pipeline holds at once."""
    return min(microbatches, depth) if name == "1f1b" else microbatches


def in_flight_counts(name: ScheduleName, microbatches: IntArray | int, depths: IntArray | int) -> IntArray:
    """`in_flight` of many stages at once."""
    if name == "1f1b":
        return np.minimum(microbatches, depths, dtype=np.int64)
    return np.broadcast_to(np.asarray(microbatches, dtype=np.int64), np.broadcast(microbatches, depths).shape)


def _stage_order(stage: int, microbatches: int, admitted: int, has_backward: bool) -> tuple[Compute, ...]:
    """`admitted` forwards, then one backward and one forward in turn, then the remaining backwards."""
    if not has_backward:
        return tuple(Compute(stage, "F", microbatch) for microbatch in range(microbatches))
    order = [Compute(stage, "F", microbatch) for microbatch in range(admitted)]
    for microbatch in range(microbatches):
        order.append(Compute(stage, "B", microbatch))
        if admitted + microbatch < microbatches:
            order.append(Compute(stage, "F", admitted + microbatch))
    return tuple(order)
