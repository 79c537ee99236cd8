"""Random small placement problems, and their optimum from the definition: every assignment of nodes to devices."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from mmplan.planner.partition.problem import PartitionProblem

MICROSECOND = 1e-6


def placement_problem(
    work_us: Sequence[float], edges: Sequence[tuple[int, int]], *, transfer_us: Sequence[float], **changes: object
) -> PartitionProblem:
    """Nodes ten times slower on a CPU, one byte each, plenty of memory, two accelerators and no CPU."""
    nodes = range(len(work_us))
    columns: dict[str, object] = {
        "accelerator_s": tuple(work * MICROSECOND for work in work_us),
        "cpu_s": tuple(10 * work * MICROSECOND for work in work_us),
        "size_bytes": (1.0,) * len(work_us),
        "transfer_s": tuple(transfer * MICROSECOND for transfer in transfer_us),
        "consumers": tuple(tuple(v for u, v in edges if u == node) for node in nodes),
        "order": tuple(edges),
        "colour": tuple(nodes),
        "accelerators": 2,
        "cpus": 0,
        "capacity_bytes": float(len(work_us)),
    }
    return PartitionProblem(**{**columns, **changes})  # type: ignore[arg-type]


def random_placement_problem(seed: int) -> PartitionProblem:
    """Up to 6 nodes on up to 3 devices; colours, memory, nodes that cost nothing, nodes of one device kind, and readers
    that the order says nothing about, as of a forward output in the backward pass.
    """
    random = np.random.default_rng(seed)
    nodes = int(random.integers(2, 7))
    density = random.uniform(0.2, 0.7)
    edges = [pair for pair in itertools.combinations(range(nodes), 2) if random.random() < density]
    readers = [*edges, *(tuple(random.integers(0, nodes, 2).tolist()) for _ in range(int(random.integers(0, 3))))]
    accelerators = int(random.integers(0, 4))
    cpus = int(random.integers(1 if accelerators == 0 else 0, 4 - accelerators)) if accelerators < 3 else 0
    free = random.random(nodes) < 0.3
    work = np.where(free, 0, random.integers(1, 20, nodes)) * MICROSECOND
    cpu = np.where(free, 0, random.integers(1, 60, nodes)) * MICROSECOND
    size = np.where(random.random(nodes) < 0.3, 0, random.integers(1, 10, nodes)).astype(float)
    barred = random.random(nodes) < 0.05
    work[barred], cpu[~barred & (random.random(nodes) < 0.05)] = math.inf, math.inf
    colour = np.arange(nodes)
    for _ in range(int(random.integers(0, 3))):
        first, second = random.integers(0, nodes, 2)
        colour[colour == colour[second]] = colour[first]
    return PartitionProblem(
        accelerator_s=tuple(work.tolist()),
        cpu_s=tuple(cpu.tolist()),
        size_bytes=tuple(size.tolist()),
        transfer_s=tuple((random.integers(0, 15, nodes) * MICROSECOND).tolist()),
        consumers=tuple(tuple(v for u, v in readers if u == node) for node in range(nodes)),
        order=tuple(edges),
        colour=tuple(colour.tolist()),
        accelerators=accelerators,
        cpus=cpus,
        capacity_bytes=float(random.integers(5, 40)),
    )


def brute_force_s(problem: PartitionProblem) -> float | None:
    """The least busiest load over all assignments of nodes to devices, None when none is allowed."""
    devices = range(problem.accelerators + problem.cpus)
    best = math.inf
    for device_of in itertools.product(devices, repeat=problem.nodes):
        if _pipelined(problem, device_of) and _together(problem, device_of):
            best = min(best, max(_load_s(problem, device_of, device) for device in devices))
    return None if math.isinf(best) else best


def _pipelined(problem: PartitionProblem, device_of: Sequence[int]) -> bool:
    """The devices have an order along which every edge leads forwards."""
    hops = {(device_of[u], device_of[v]) for u, v in problem.order if device_of[u] != device_of[v]}
    devices = set(device_of)
    return any(all(a.index(u) < a.index(v) for u, v in hops) for a in itertools.permutations(devices))


def _together(problem: PartitionProblem, device_of: Sequence[int]) -> bool:
    pairs = itertools.combinations(range(problem.nodes), 2)
    return all(problem.colour[u] != problem.colour[v] or device_of[u] == device_of[v] for u, v in pairs)


def _load_s(problem: PartitionProblem, device_of: Sequence[int], device: int) -> float:
    """Devices from `accelerators` on are CPUs; infinite where memory does not suffice."""
    mine = [node for node in range(problem.nodes) if device_of[node] == device]
    if device >= problem.accelerators:
        return sum(problem.cpu_s[node] for node in mine)
    if sum(problem.size_bytes[node] for node in mine) > problem.capacity_bytes:
        return math.inf
    load_s = sum(problem.accelerator_s[node] for node in mine)
    for node, consumers in enumerate(problem.consumers):
        inside = [holder in mine for holder in (node, *consumers)]
        load_s += problem.transfer_s[node] if any(inside) and not all(inside) else 0.0
    return load_s
