"""How many microbatches a stage holds at once under the rules that stages are cut by.

1F1B holds as many as the stage has stages behind it on the longest path, itself included (Narayanan et al., SC 2021,
section 2.2.1); GPipe holds all (Huang et al., NeurIPS 2019); interleaved 1F1B what its order holds, chunk by chunk. Any
other schedule of a plan is made after the cut, within the memory that is there.
"""

from functools import cache

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


def encoded_in_flight(microbatches: int, alive: IntArray | int, batch_factor: int) -> IntArray:
    """Microbatches of layers that run `batch_factor` at once, of stages that hold `alive` of the others.

    Those in whose group one of the `alive` is, the last of which is the first of its group.
    """
    groups = 1 - (1 - np.asarray(alive, dtype=np.int64)) // batch_factor
    return np.minimum(microbatches, batch_factor * groups)


def stage_depth(deepest_behind: int, batch_factor: int) -> int:
    """Of a stage with layers that run `batch_factor` microbatches at once (1: none has), by the depth of the deepest of
    those that it feeds (0: it feeds none).

    Such a stage works as many microbatches ahead of 1F1B, so that those behind it have something to do meanwhile: with
    its group of backwards and then one of forwards to run it would else keep them waiting in every group.
    """
    return 1 + deepest_behind + (batch_factor if deepest_behind and batch_factor > 1 else 0)


@cache
def held_by_chunks(ranks: int, chunks: int, microbatches: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """Microbatches of each chunk that a rank holds at once under interleaved 1F1B: at any moment at most as many as at
    one of these moments, in every chunk.

    A rank runs 2 (p - rank - 1) + (v - 1) p forwards and then, in turn, one more and a backward (Narayanan et al., SC
    2021, section 2.2.2; `looped.interleaved`). Microbatches pass a chunk in groups of p, so that moments repeat after
    p v of them.
    """
    period, total = ranks * chunks, microbatches * chunks
    forwards = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1, total)
    alive = [0] * chunks
    for index in range(forwards):
        alive[index % period // ranks] += 1
    moments = {tuple(alive)}
    for index in range(forwards, min(total, forwards + period)):
        done = index - forwards
        alive[chunks - 1 - done % period // ranks] -= 1
        alive[index % period // ranks] += 1
        moments.add(tuple(alive))
    most = [one for one in moments if not any(one != other and _covers(other, one) for other in moments)]
    return tuple(sorted(most))


def _covers(more: tuple[int, ...], less: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(more, less, strict=True))
