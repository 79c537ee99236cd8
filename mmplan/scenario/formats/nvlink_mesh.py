"""What a graph of direct links between the devices of a node gives to groups of them.

NCCL runs collectives over rings through all devices of a group, each over links of its own: with c such rings that
share no link, each device sends over c links at a time. Rings are found one after the other, so there may be more: the
rate is a lower bound.
"""

from collections.abc import Mapping, Sequence

Counts = Mapping[tuple[int, int], int]  # links from one device to another, in both orders

_MOST_STEPS = 20_000  # of the search for a ring


def ring_links(counts: Counts, devices: Sequence[int]) -> int:
    """Links over which each of `devices` sends when as many rings as are found go through all of them; 0: none does."""
    if len(devices) == 2:
        return counts[devices[0], devices[1]]
    left = {pair: counts[pair] for pair in counts if pair[0] in devices and pair[1] in devices}
    rings = 0
    while ring := _ring(left, devices):
        hops = list(zip(ring, [*ring[1:], ring[0]], strict=True))
        for pair in hops:
            left[pair] -= 1
        rings += 1
        back = [(second, first) for first, second in hops]
        if all(left[pair] > 0 for pair in back):  # a link carries as much each way
            for pair in back:
                left[pair] -= 1
            rings += 1
    return rings


def spread(counts: Counts, size: int) -> tuple[int, int]:
    """Links of a device in rings of all `size` devices, and over how many shares they are spread: a group of n
    neighbours has at least (n - 1) shares. (0, 1) where some group of neighbours, such as 0 and 1, has no ring.
    """
    whole = ring_links(counts, range(size))
    groups = [range(first, first + width) for width in _widths(size) for first in range(0, size - width + 1, width)]
    found = [(len(group), ring_links(counts, group)) for group in groups]
    if not whole or any(links == 0 for _, links in found):
        return 0, 1
    return whole, max([1, *(-(-(width - 1) * whole // links) for width, links in found)])


def islands(counts: Counts, size: int) -> list[list[int]]:
    """Devices that links join, directly or through others, in their order."""
    found: list[list[int]] = []
    seen: set[int] = set()
    for start in range(size):
        if start in seen:
            continue
        group, edge = {start}, [start]
        while edge:
            device = edge.pop()
            more = [other for other in range(size) if other not in group and counts.get((device, other), 0) > 0]
            group.update(more)
            edge += more
        seen |= group
        found.append(sorted(group))
    return found


def _widths(size: int) -> list[int]:
    return [width for width in (2, 4, 8, 16, 32, 64) if width < size and size % width == 0]


def _ring(left: Mapping[tuple[int, int], int], devices: Sequence[int]) -> list[int]:
    """A ring through all devices over links that are left, the most plentiful first; empty where none is found."""
    path = [devices[0]]
    steps = 0

    def choices() -> list[int]:
        here = path[-1]
        open_ = [other for other in devices if other not in path and left.get((here, other), 0) > 0]
        return sorted(open_, key=lambda other: left[here, other])

    stack = [choices()]
    while stack and steps < _MOST_STEPS:
        steps += 1
        if len(path) == len(devices) and left.get((path[-1], path[0]), 0) > 0:
            return path
        if not stack[-1]:
            stack.pop()
            path.pop()
            continue
        path.append(stack[-1].pop())
        stack.append(choices())
    return []
