"""How many microbatches a stage holds at once under the two rules that stages are cut by.

1F1B holds as many as the stage has stages behind it on the longest path, itself included (Narayanan et al., SC 2021,
section 2.2.1); GPipe holds all (Huang et al., NeurIPS 2019). Any other schedule of a plan is made after the cut, within
the memory that is there.
"""

import numpy as np
import numpy.typing as npt

from mmplan.scenario.schedule_names import ScheduleName

IntArray = npt.NDArray[np.int64]


def in_flight(name: ScheduleName, microbatches: int, depth: int) -> int:
    """Microbatches whose activations a stage at `depth` stages from the end of the pipeline holds at once."""
    return min(microbatches, depth) if name == "1f1b" else microbatches


def in_flight_counts(name: ScheduleName, microbatches: IntArray | int, depths: IntArray | int) -> IntArray:
    """`in_flight` of many stages at once."""
    if name == "1f1b":
        return np.minimum(microbatches, depths, dtype=np.int64)
    return np.broadcast_to(np.asarray(microbatches, dtype=np.int64), np.broadcast(microbatches, depths).shape)
