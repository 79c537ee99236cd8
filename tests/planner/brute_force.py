"""All acyclic partitions of a small DAG into stages, and their value written down once more from the definition."""

from collections.abc import Iterator
from functools import cache

import numpy as np

from mmplan.planner.cut_problem import CutEdge, CutProblem


def partitions(items: int, blocks: int) -> Iterator[list[int]]:
    """Restricted growth strings: every partition of `items` into exactly `blocks` blocks once."""

    def grow(prefix: list[int], used: int) -> Iterator[list[int]]:
        if blocks - used > items - len(prefix):
            return
        if len(prefix) == items:
            yield prefix
            return
        for block in range(min(used + 1, blocks)):
            yield from grow([*prefix, block], max(used, block + 1))

    return grow([], 0)


def partition_value(problem: CutProblem, block_of: list[int]) -> int | None:
    """J by recursion over the quotient, None when it is cyclic or a stage does not fit."""
    follows: dict[int, list[tuple[int, int]]] = {block: [] for block in range(problem.stages)}
    for edge in problem.edges:
        source, target = block_of[edge.producer], block_of[edge.consumer]
        if source != target:
            follows[source].append((target, edge.lag_ns))
    inside = [[g for g in range(problem.groups) if block_of[g] == block] for block in range(problem.stages)]
    work = [sum(problem.work_ns[g] for g in groups) for groups in inside]
    on_path: set[int] = set()

    @cache
    def tail_and_depth(block: int) -> tuple[int, int]:
        if block in on_path:
            raise RecursionError
        on_path.add(block)
        below = [(lag + tail_and_depth(target)[0], tail_and_depth(target)[1]) for target, lag in follows[block]]
        on_path.discard(block)
        return (
            work[block] + max((tail for tail, _ in below), default=0),
            1 + max((depth for _, depth in below), default=0),
        )

    try:
        ends = [tail_and_depth(block) for block in range(problem.stages)]
    except RecursionError:
        return None
    finish = 0
    for groups, (_, depth) in zip(inside, ends, strict=True):
        alive = min(problem.microbatches, depth) if problem.schedule == "1f1b" else problem.microbatches
        memory = sum(problem.state_bytes[g] + alive * problem.kept_bytes[g] for g in groups)
        if memory > problem.capacity_bytes:
            return None
        fixed = problem.finish_fixed_ns * any(problem.trainable[g] for g in groups)
        finish = max(finish, fixed + sum(problem.finish_ns[g] for g in groups))
    return (problem.microbatches - 1) * max(work) + max(tail for tail, _ in ends) + finish


def brute_force(problem: CutProblem) -> int | None:
    """Least J over all partitions, None when none is feasible."""
    values = (partition_value(problem, block_of) for block_of in partitions(problem.groups, problem.stages))
    return min((value for value in values if value is not None), default=None)


def random_problem(seed: int) -> CutProblem:
    """A DAG of at most 9 groups: one to three branches into a trunk, sometimes a second sink and skip edges."""
    random = np.random.default_rng(seed)
    groups = int(random.integers(3, 10))
    trunk = int(random.integers(1, max(2, groups // 2)))
    edges: set[tuple[int, int]] = set()
    first_of_trunk = groups - trunk
    edges.update((g, g + 1) for g in range(first_of_trunk, groups - 1))
    branches = int(random.integers(1, 4))
    starts = sorted({0, *(int(s) for s in random.integers(0, max(1, first_of_trunk), branches - 1))})
    for start, stop in zip(starts, [*starts[1:], first_of_trunk], strict=True):
        edges.update((g, g + 1) for g in range(start, stop - 1))
        if stop > start:
            edges.add((stop - 1, int(random.integers(first_of_trunk, groups))))
    if groups > 4 and random.random() < 0.3:  # a second sink
        edges = {(u, v) for u, v in edges if v != groups - 1} | {(int(random.integers(0, groups - 1)), groups - 1)}
    for _ in range(int(random.integers(0, 3))):
        u, v = sorted(int(g) for g in random.choice(groups, 2, replace=False))
        edges.add((u, v))
    alike = random.random() < 0.4
    sizes = {
        name: (random.integers(low, high, groups) if not alike else np.repeat(random.integers(low, high), groups))
        for name, low, high in (("work", 1, 30), ("state", 1, 20), ("kept", 0, 12), ("finish", 0, 15))
    }
    trainable = random.random(groups) < 0.7
    one_lag, lag_ns = random.random() < 0.3, int(random.integers(0, 8))
    stages = int(random.integers(1, min(groups, 5) + 1))
    schedule = "1f1b" if random.random() < 0.7 else "gpipe"
    microbatches = int(random.integers(1, 7))
    mean = (sizes["state"].sum() + 0.5 * min(stages, microbatches) * sizes["kept"].sum()) / stages
    return CutProblem(
        work_ns=tuple(int(v) for v in sizes["work"]),
        state_bytes=tuple(int(v) for v in sizes["state"]),
        kept_bytes=tuple(int(v) for v in sizes["kept"]),
        finish_ns=tuple(int(v) for v in sizes["finish"] * trainable),
        trainable=tuple(bool(v) for v in trainable),
        edges=tuple(
            CutEdge(producer=u, consumer=v, lag_ns=lag_ns if one_lag else int(random.integers(0, 8)))
            for u, v in sorted(edges)
        ),
        finish_fixed_ns=int(random.integers(0, 5)),
        capacity_bytes=int(mean * random.uniform(1.0, 3.0)) + 1,
        stages=stages,
        microbatches=microbatches,
        schedule=schedule,
    )
