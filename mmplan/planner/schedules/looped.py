"""Families with several chunks per rank, chunk `c` of rank `r` being stage `c * p + r`.

Interleaved 1F1B (Narayanan et al., SC 2021, section 2.2.2; the order of Megatron-LM): microbatches pass a chunk in
groups of p, rank r runs 2 (p - r - 1) + (v - 1) p forwards first. It is the depth-first order of Lamy-Poirier (arXiv
2211.05953). A chunk need not follow the one before it, nor have a backward: the order, which no chain of chunks can
make wait for itself, then waits for less. On chains looped BFS is the breadth-first one: all microbatches pass a chunk
before the next chunk starts.
"""

from mmplan.planner.schedule import Compute, ComputeKind, Schedule
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem


def interleaved(problem: ScheduleProblem) -> Schedule | NotApplicable:
    chunks = _chunks(problem)
    if isinstance(chunks, NotApplicable):
        return chunks
    p, m = problem.ranks, problem.microbatches
    if m % p:
        return NotApplicable(f"{m} microbatches are no multiple of the {p} ranks")
    orders = []
    for rank in range(p):
        first = min(2 * (p - rank - 1) + (chunks - 1) * p, m * chunks)
        forward = [_step(problem, rank, "F", index, chunks) for index in range(m * chunks)]
        backward = [_step(problem, rank, "B", index, chunks) for index in range(m * chunks)]
        order = forward[:first]
        for early, late in zip(forward[first:], backward, strict=False):
            order += [early, late]
        order += backward[m * chunks - first :]
        orders.append(tuple(one for one in order if one.kind == "F" or problem.stages[one.stage].has_backward))
    return tuple(orders)


def looped_bfs(problem: ScheduleProblem) -> Schedule | NotApplicable:
    chunks = loop_chunks(problem)
    if isinstance(chunks, NotApplicable):
        return chunks
    orders = []
    for rank in range(problem.ranks):
        stages = problem.stages_of(rank)
        order = [Compute(stage, "F", k) for stage in stages for k in range(problem.microbatches)]
        order += [Compute(stage, "B", k) for stage in reversed(stages) for k in range(problem.microbatches)]
        orders.append(tuple(order))
    return tuple(orders)


def loop_chunks(problem: ScheduleProblem) -> int | NotApplicable:
    """Chunks per rank when stages form a chain that runs round the ranks."""
    chunks = _chunks(problem)
    return chunks if isinstance(chunks, NotApplicable) else _chain_with_backward(problem) or chunks


def _chunks(problem: ScheduleProblem) -> int | NotApplicable:
    """Chunks per rank where stages are laid round the ranks in their order."""
    chunks, rest = divmod(len(problem.stages), problem.ranks)
    placed = all(stage.rank == index % problem.ranks for index, stage in enumerate(problem.stages))
    if rest or chunks < 2 or not placed:
        return NotApplicable("it needs two or more chunks per rank, laid round the ranks")
    return chunks


def _chain_with_backward(problem: ScheduleProblem) -> NotApplicable | None:
    if not problem.is_chain():
        return NotApplicable("the stages are no chain")
    if not all(stage.has_backward for stage in problem.stages):
        return NotApplicable("some stage has no backward")
    return None


def _step(problem: ScheduleProblem, rank: int, kind: ComputeKind, index: int, chunks: int) -> Compute:
    """The `index`-th forward or backward of a rank: groups of p microbatches through one chunk after the other."""
    p = problem.ranks
    group, inside = divmod(index, p * chunks)
    chunk = inside // p if kind == "F" else chunks - 1 - inside // p
    return Compute(chunk * p + rank, kind, group * p + inside % p)
