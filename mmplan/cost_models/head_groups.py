"""Which heads each tensor-parallel rank has: queries that share a key head stay with it, or with copies of it.

Up to one rank per key head each has whole groups, as many as the fullest, filled up with zeros. With more ranks a key
head lies on several neighbours, each with some of its queries (Megatron-LM and vLLM repeat key heads so).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Numbers of query and of key heads; where keys do not divide queries, heads are split as if each stood alone."""

    queries: int
    keys: int

    def copies(self, tp: int) -> int:
        """Neighbouring ranks that hold the same key head."""
        if self.queries % self.keys:
            return 1
        ranks = max(1, tp // self.keys)
        return -(-self._per_key // -(-self._per_key // ranks))

    def on_rank(self, heads: int, tp: int) -> int:
        """How many of so many heads, all queries or all keys, there is room for on each rank."""
        copies = self.copies(tp)
        if self.queries % self.keys:
            return -(-heads // tp)
        if copies == 1:
            return -(-self.keys // tp) * (heads // self.keys)
        return 1 if heads == self.keys else -(-self._per_key // copies)

    def part(self, heads: int, tp: int, rank: int) -> tuple[int, int]:
        """First of the heads that a rank has, and the one behind its last; what is left of its room is zero."""
        copies, each = self.copies(tp), self.on_rank(heads, tp)
        group, place = divmod(rank, copies)
        if copies == 1:
            return min(heads, rank * each), min(heads, (rank + 1) * each)
        if group >= self.keys:
            return heads, heads
        if heads == self.keys:
            return group, group + 1
        first = group * self._per_key
        return first + place * each, first + min((place + 1) * each, self._per_key)

    def has_copies(self, heads: int, tp: int) -> bool:
        """Whether ranks hold copies of these heads, as of keys."""
        return heads == self.keys and self.copies(tp) > 1

    @property
    def _per_key(self) -> int:
        return self.queries // self.keys
