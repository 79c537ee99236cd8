"""All acyclic partitions of a small DAG into stages, and all cuts into several chunks per rank, and their value written
down once more from the definition."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from mmplan.planner.cut_problem import CutEdge, CutProblem, CutTie, Level, StageKind
from mmplan.planner.problem import least_of


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
    """J by recursion over the quotient, None when it is cyclic or a stage does not fit or is of another mesh."""
    if any(problem.kind(block).mesh != mesh for block, mesh in zip(block_of, problem.mesh_of, strict=False)):
        return None
    chosen = stage_works(problem, block_of)
    if chosen is None:
        return None
    work, path = zip(*chosen, strict=True)
    follows = _follows(problem, block_of)
    finish = [0] * problem.stages
    for block in range(problem.stages):
        inside, kind = [g for g in range(problem.groups) if block_of[g] == block], problem.kind(block)
        finish[block] = kind.finish_fixed_ns * any(problem.trainable[g] for g in inside)
        finish[block] += sum(kind.finish_ns[g] for g in inside)
        finish[block] += sum(_alone(tie, tie.table in inside, tie.head in inside) for tie in problem.ties)

    @cache
    def tail(block: int) -> int:
        return path[block] + max((lag + tail(target) for target, lag in follows[block]), default=0)

    return (problem.microbatches - 1) * max(work) + max(map(tail, range(problem.stages))) + max(finish)


def _alone(tie: CutTie, table: bool, head: bool) -> int:
    """What a stage pays for its end of a tie."""
    if table == head:
        return 0
    return tie.sum_ns + (tie.copy_ns if head else 0)


def _follows(problem: CutProblem, block_of: list[int]) -> dict[int, list[tuple[int, int]]]:
    """(target, lag) of the tensors that leave each block."""
    follows: dict[int, list[tuple[int, int]]] = {block: [] for block in range(problem.stages)}
    for edge in problem.edges:
        source, target = block_of[edge.producer], block_of[edge.consumer]
        if source != target:
            follows[source].append((target, edge.lag_ns))
    return follows


def stage_works(problem: CutProblem, block_of: list[int]) -> list[tuple[int, int]] | None:
    """Work of each stage, and on a path, at the quickest level that fits; None when the quotient is cyclic or a stage
    does not fit."""
    follows, on_path = _follows(problem, block_of), set[int]()

    @cache
    def depth_of(block: int) -> int:
        if block in on_path:
            raise RecursionError
        on_path.add(block)
        below = [depth_of(target) for target, _ in follows[block]]
        on_path.discard(block)
        ahead = problem.batch_factor if below and block in encoding else 0
        return 1 + ahead + max(below, default=0)

    encoding = {block for block, encoded in zip(block_of, problem.encoded, strict=False) if encoded}

    try:
        depths = [depth_of(block) for block in range(problem.stages)]
    except RecursionError:
        return None
    work = []
    for block, depth in enumerate(depths):
        inside = [g for g in range(problem.groups) if block_of[g] == block]
        alive = min(problem.microbatches, depth) if problem.schedule == "1f1b" else problem.microbatches
        kind = problem.kind(block)
        states = min(
            sum((problem.choices[index].state_bytes or problem.state_bytes)[g] for g in inside) for index in kind.levels
        )
        k = problem.batch_factor
        whole = min(problem.microbatches, k * len({place // k for place in range(-alive + 1, 1)}))  # of groups of k
        fitting = [
            (sum(level.work_ns[g] for g in inside), sum((level.path_ns or level.work_ns)[g] for g in inside))
            for level in (problem.choices[index] for index in kind.levels)
            if level.working_bytes + states + _held_bytes(level, inside, alive, whole) <= kind.capacity_bytes
        ]
        if not fitting:
            return None
        work.append(min(fitting))
    return work


def _held_bytes(level: Level, inside: list[int], alive: int, whole: int) -> int:
    """Activations: `alive` microbatches, and `whole` ones of what runs several at once, which a group may hold beside
    other layers."""
    encoded = level.encoded_bytes or (0,) * len(level.kept_bytes)
    return sum(alive * (level.kept_bytes[g] - encoded[g]) + whole * encoded[g] for g in inside)


def brute_force(problem: CutProblem) -> int | None:
    """Least J over all partitions, None when none is feasible."""
    values = (partition_value(problem, block_of) for block_of in numbered(problem))
    return min((value for value in values if value is not None), default=None)


def numbered(problem: CutProblem) -> Iterator[list[int]]:
    """Every partition; where stages differ, with every numbering along the edges."""
    for block_of in partitions(problem.groups, problem.stages):
        if not problem.kinds:
            yield block_of
            continue
        for stage_of in permutations(range(problem.stages)):
            stages = [stage_of[block] for block in block_of]
            if all(stages[edge.producer] <= stages[edge.consumer] for edge in problem.edges):
                yield stages


def _random_levels(random: np.random.Generator, work: NDArray[np.int64], kept: NDArray[np.int64]) -> tuple[Level, ...]:
    """Of half of the problems: dropping nothing, and one or two ways to drop some or all, with something at work."""
    if random.random() < 0.5:
        return ()
    found = [Level(work_ns=tuple(work.tolist()), kept_bytes=tuple(kept.tolist()))]
    for name in ("half", "full")[: int(random.integers(1, 3))]:
        dropped = random.random(len(work)) < (0.5 if name == "half" else 1.0)
        more = np.where(dropped, work // 3, 0)
        less = np.where(dropped, kept // 4, kept)
        found.append(
            Level(
                name=name,
                work_ns=tuple((work + more).tolist()),
                kept_bytes=tuple(less.tolist()),
                working_bytes=int(random.integers(0, 8)),
            )
        )
    return tuple(found)


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
    levels = _random_levels(random, sizes["work"], sizes["kept"])
    capacity = int(mean * random.uniform(1.0, 3.0)) + 1
    kinds: tuple[StageKind, ...] = ()
    fixed_ns = int(random.integers(0, 5))
    if random.random() < 0.3:  # two kinds of devices, the second slower and with less memory
        levels = levels or (Level(work_ns=tuple(sizes["work"].tolist()), kept_bytes=tuple(sizes["kept"].tolist())),)
        slower = tuple(replace(level, work_ns=tuple(2 * work for work in level.work_ns)) for level in levels)
        own, others = tuple(range(len(levels))), tuple(range(len(levels), 2 * len(levels)))
        quick = tuple(int(v) for v in sizes["finish"] * trainable)
        slow = tuple(value + value // 2 for value in quick)
        kinds = (
            StageKind(levels=own, capacity_bytes=capacity, finish_ns=quick, finish_fixed_ns=fixed_ns),
            StageKind(levels=others, capacity_bytes=capacity - 2, finish_ns=slow, finish_fixed_ns=fixed_ns + 1),
        )
        levels = (*levels, *slower)
    return CutProblem(
        levels=levels,
        kinds=kinds,
        kind_of=tuple(int(random.integers(0, 2)) for _ in range(stages)) if kinds else (),
        work_ns=least_of([level.work_ns for level in levels]) if levels else tuple(int(v) for v in sizes["work"]),
        state_bytes=tuple(int(v) for v in sizes["state"]),
        kept_bytes=least_of([level.kept_bytes for level in levels]) if levels else tuple(int(v) for v in sizes["kept"]),
        finish_ns=tuple(int(v) for v in sizes["finish"] * trainable),
        trainable=tuple(bool(v) for v in trainable),
        edges=tuple(
            CutEdge(producer=u, consumer=v, lag_ns=lag_ns if one_lag else int(random.integers(0, 8)))
            for u, v in sorted(edges)
        ),
        finish_fixed_ns=fixed_ns,
        capacity_bytes=capacity,
        stages=stages,
        microbatches=microbatches,
        schedule=schedule,
        ties=_random_ties(np.random.default_rng((seed, 1)), groups),
    )


def _random_ties(random: np.random.Generator, groups: int) -> tuple[CutTie, ...]:
    """Of every third problem one or two matrices that two groups read."""
    found = []
    for _ in range(int(random.integers(1, 3)) if random.random() < 0.35 else 0):
        table, head = sorted(int(g) for g in random.choice(groups, 2, replace=False))
        sum_ns, copy_ns = (int(random.integers(0, 12)) for _ in range(2))
        found.append(CutTie(table=table, head=head, sum_ns=sum_ns, copy_ns=copy_ns))
    return tuple(found)


def encoding_problem(seed: int) -> CutProblem:
    """A random problem in which some groups, with all that feed them, run two or three microbatches at once."""
    random, problem = np.random.default_rng((seed, 1)), random_problem(seed)
    factor = int(random.choice([2, 3]))
    encoded = random.random(problem.groups) < 0.3
    for edge in sorted(problem.edges, key=lambda edge: -edge.consumer):
        encoded[edge.producer] |= encoded[edge.consumer]
    times = np.where(encoded, factor if problem.stages > 1 else 1, 1)
    levels = tuple(
        replace(
            level,
            path_ns=tuple((times * np.array(level.work_ns)).tolist()),
            encoded_bytes=tuple((encoded * np.array(level.kept_bytes)).tolist()),
        )
        for level in problem.choices
    )
    room = int(random.choice([1, 2, 3]))
    return replace(
        problem,
        levels=levels,
        encoded=tuple(encoded.tolist()),
        batch_factor=factor,
        microbatches=factor * int(random.integers(1, 5)),
        capacity_bytes=problem.capacity_bytes * room,
        kinds=tuple(replace(kind, capacity_bytes=kind.capacity_bytes * room) for kind in problem.kinds),
    )


def chunk_cuts(problem: CutProblem, chunks: int) -> Iterator[list[list[int]]]:
    """Every way to cut the groups, in their order, into so many chunks per rank."""
    count = problem.stages * chunks
    for inner in combinations(range(1, problem.groups), count - 1):
        yield [list(range(first, end)) for first, end in pairwise((0, *inner, problem.groups))]


def chunk_value(problem: CutProblem, cut: list[list[int]]) -> int | None:
    """J of interleaved 1F1B at the best level for all chunks, None where none fits: from the definition, with memory by
    a walk through each rank's order."""
    p, m = problem.stages, problem.microbatches
    chunks = len(cut) // p
    values = []
    for name in {level.name for level in problem.choices}:
        level_of = [
            next(problem.choices[index] for index in problem.kind(rank).levels if problem.choices[index].name == name)
            for rank in range(p)
        ]
        works = [sum(level_of[place % p].work_ns[g] for g in chunk) for place, chunk in enumerate(cut)]
        kept = [sum(level_of[place % p].kept_bytes[g] for g in chunk) for place, chunk in enumerate(cut)]
        finish = []
        for rank in range(p):
            inside, level, kind = [g for chunk in cut[rank::p] for g in chunk], level_of[rank], problem.kind(rank)
            states = sum((level.state_bytes or problem.state_bytes)[g] for g in inside)
            peak = _interleaved_peak(p, chunks, m, rank, kept[rank::p])
            if states + peak + level.working_bytes > kind.capacity_bytes:
                break
            fixed = kind.finish_fixed_ns * any(problem.trainable[g] for g in inside)
            tied = 0
            for tie in problem.ties:
                tied += tie.sum_ns * ((tie.table in inside) != (tie.head in inside))
                tied += tie.copy_ns * any(tie.head in chunk and tie.table not in chunk for chunk in cut[rank::p])
            finish.append(fixed + tied + sum(kind.finish_ns[g] for g in inside))
        if len(finish) < p:
            continue
        lags = 0
        for chunk in cut[1:]:
            crossing = [e.lag_ns for e in problem.edges if e.producer < chunk[0] <= e.consumer]
            lags += max(crossing, default=0)
        values.append((chunks * m + p - 1) * max(works) + lags + max(finish))
    return min(values, default=None)


def _interleaved_peak(p: int, chunks: int, m: int, rank: int, kept: list[int]) -> int:
    """Microbatches pass in groups of p; warm-up as in Megatron-LM's schedules.py, then a forward and a backward."""
    forwards = [chunk for group in range(m // p) for chunk in range(chunks) for _ in range(p)]
    backwards = [chunk for group in range(m // p) for chunk in reversed(range(chunks)) for _ in range(p)]
    held = peak = 0
    for place, chunk in enumerate(forwards):
        held += kept[chunk]
        peak = max(peak, held)
        if place >= (p - rank - 1) * 2 + (chunks - 1) * p:
            held -= kept[backwards.pop(0)]
    return peak
