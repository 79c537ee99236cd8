"""The downsets of a DAG of groups: the sets that the first k stages of some placement can hold together.

A downset holds, with a group, everything that leads to it. A placement is a chain of downsets from the empty one to
all groups. Any subfamily of all downsets gives an upper bound; all of them give the optimum.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from mmplan.planner.upsets import BoolArray


def list_downsets(groups: int, edges: Sequence[tuple[int, int]], limit: int) -> BoolArray | None:
    """[downsets, groups] members of all downsets, fewest first, or None when there are more than `limit`."""
    before, after = _neighbours(groups, edges)
    sources = [group for group in range(groups) if not before[group]]
    seen = {0: sources}
    queue = [0]
    for downset in queue:
        ready = seen[downset]
        for group in ready:
            larger = downset | 1 << group
            if larger not in seen:
                if len(seen) >= limit:
                    return None
                freed = [follower for follower in after[group] if before[follower] & ~larger == 0]
                seen[larger] = [other for other in ready if other != group] + freed
                queue.append(larger)
        seen[downset] = []
    queue.sort(key=lambda downset: (downset.bit_count(), downset))
    return _members(queue, groups)


def list_prefixes(groups: int, edges: Sequence[tuple[int, int]], keys: Sequence[Sequence[int]]) -> BoolArray:
    """Members of the downsets met along some topological orders: each order takes the ready group of least key."""
    before, after = _neighbours(groups, edges)
    found = {0}
    for key in keys:
        downset = 0
        ready = [(key[group], group) for group in range(groups) if not before[group]]
        ready.sort()
        while ready:
            _, group = heappop(ready)
            downset |= 1 << group
            found.add(downset)
            for follower in after[group]:
                if before[follower] & ~downset == 0:
                    heappush(ready, (key[follower], follower))
    return _members(sorted(found, key=lambda downset: (downset.bit_count(), downset)), groups)


def topological_keys(groups: int, edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Keys of three orders: by index, and two that finish one branch before the next, from the sources or the sinks.

    Groups are numbered in a topological order.
    """
    turned = [(groups - 1 - consumer, groups - 1 - producer) for producer, consumer in edges]
    from_sources, from_sinks = _finish_order(groups, edges), _finish_order(groups, turned)
    return [list(range(groups)), [-place for place in from_sources], from_sinks[::-1]]


def _finish_order(groups: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """When depth-first search leaves each group; groups are in topological order."""
    _, after = _neighbours(groups, edges)
    place = [-1] * groups
    left = 0
    for root in range(groups):
        stack = [root]
        while stack:
            group = stack[-1]
            fresh = [follower for follower in after[group] if place[follower] < 0]
            if place[group] >= 0 or not fresh:
                stack.pop()
                if place[group] < 0:
                    place[group], left = left, left + 1
            else:
                stack.append(fresh[0])
    return place


def _neighbours(groups: int, edges: Sequence[tuple[int, int]]) -> tuple[list[int], list[list[int]]]:
    """Bit set of the groups before each, list of those after each."""
    before = [0] * groups
    after: list[list[int]] = [[] for _ in range(groups)]
    for producer, consumer in edges:
        before[consumer] |= 1 << producer
        after[producer].append(consumer)
    return before, after


def _members(downsets: Sequence[int], groups: int) -> BoolArray:
    width = groups // 8 + 1
    packed = np.frombuffer(b"".join(downset.to_bytes(width, "little") for downset in downsets), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(-1, width), axis=1, count=groups, bitorder="little")
    return bits.astype(np.bool_)
