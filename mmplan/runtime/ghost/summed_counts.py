"""What a layer was seen to cost, summed over recordings, and the same of a rank that shares it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mmplan.runtime.ghost.counting import Count
from mmplan.scenario.recorded import BackwardSum, FusedAttention, Kept, KindOnRank, Product, ProductOnRank, RecordedKind

Kinds = dict[tuple[object, ...], int]


@dataclass(slots=True, eq=False)
class _Amounts:
    """Of whole layers, or on a rank."""

    moved: int = 0
    kept: Kept = field(default_factory=Kept)
    kept_frozen: Kept = field(default_factory=Kept)
    kept_first: Kept = field(default_factory=Kept)

    def add(self, count: Count) -> None:
        self.moved += count.moved
        self.kept = _both(self.kept, count.kept)
        self.kept_frozen = _both(self.kept_frozen, count.kept_frozen)
        self.kept_first = _both(self.kept_first, count.kept_first)


@dataclass(slots=True, eq=False)
class _OnRank:
    amounts: _Amounts = field(default_factory=_Amounts)
    shared: bool = False  # some call was
    forward_sums: dict[int, int] = field(default_factory=dict)  # by their place in a pass
    backward_sums: dict[tuple[object, ...], BackwardSum] = field(default_factory=dict)

    def add(self, counts: Sequence[Count]) -> None:
        forward = [numbers for count in counts for numbers in count.forward_sums]
        for place, numbers in enumerate(forward):
            self.forward_sums[place] = self.forward_sums.get(place, 0) + numbers
        seen: Kinds = {}
        for one in (one for count in counts for one in count.backward_sums):
            key = _key((one.reads,), seen)
            before = self.backward_sums.get(key)
            self.backward_sums[key] = one if before is None else replace(one, numbers=before.numbers + one.numbers)


@dataclass(slots=True, eq=False)
class SummedCounts:
    """Of one layer, over all recordings.

    Attributes:
        output: numbers of its outputs that others read; `reads`: of the outputs of other layers.
    """

    output: int = 0
    reads: dict[str, int] = field(default_factory=dict)
    _whole: _Amounts = field(default_factory=_Amounts)
    _kernels: int = 0
    _products: dict[tuple[object, ...], Product] = field(default_factory=dict)
    _attentions: dict[tuple[object, ...], FusedAttention] = field(default_factory=dict)
    _on_ranks: dict[int, _OnRank] = field(default_factory=dict)

    def add(self, counts: Sequence[Count], degrees: Sequence[int]) -> None:
        """What one recording saw of it. Products of one shape stay as many as one pass has.

        Args:
            degrees: of tensor parallelism, that were counted.
        """
        seen: Kinds = {}
        for count in counts:
            self._whole.add(count)
            for index in range(len(count.products)):
                self._add_product(_with_parts(count, index), seen)
            for index in range(len(count.attentions)):
                self._add_attention(_with_heads(count, index), seen)
        self._kernels = max(self._kernels, sum(count.kernels for count in counts))
        for tp in degrees:
            on_rank = self._on_ranks.setdefault(tp, _OnRank())
            on_rank.shared |= any(tp in count.on_ranks for count in counts)
            own = [count.on_ranks.get(tp, count) for count in counts]
            for count in own:
                on_rank.amounts.add(count)
            on_rank.add(own)

    def _add_product(self, product: Product, seen: Kinds) -> None:
        parts = tuple(replace(part, rows=0) for part in product.on_ranks)
        key = _key((replace(product, rows=0, on_ranks=parts),), seen)
        before = self._products.get(key)
        if before is not None:
            pairs = zip(before.on_ranks, product.on_ranks, strict=True)
            summed = tuple(replace(part, rows=other.rows + part.rows) for other, part in pairs)
            product = replace(product, rows=before.rows + product.rows, on_ranks=summed)
        self._products[key] = product

    def _add_attention(self, one: FusedAttention, seen: Kinds) -> None:
        form = replace(one, rows=0, pairs=0)
        key = _key((form,), seen)
        before = self._attentions.get(key, form)
        self._attentions[key] = replace(one, rows=before.rows + one.rows, pairs=before.pairs + one.pairs)

    def kind(self, *, parameters: int, trained: int, away: Mapping[int, tuple[int, int]]) -> RecordedKind:
        """Args: away: by the degree of tensor parallelism, parameters and trained ones that a rank has not."""
        return RecordedKind(
            parameters=parameters,
            trained=trained,
            products=tuple(self._products.values()),
            attentions=tuple(self._attentions.values()),
            moved=self._whole.moved,
            kernels=self._kernels,
            output=self.output,
            kept=self._whole.kept,
            kept_frozen=self._whole.kept_frozen,
            kept_first=self._whole.kept_first,
            on_ranks=tuple(
                KindOnRank(
                    tp=tp,
                    parameters=parameters - away[tp][0],
                    trained=trained - away[tp][1],
                    moved=one.amounts.moved,
                    kept=one.amounts.kept,
                    kept_frozen=one.amounts.kept_frozen,
                    kept_first=one.amounts.kept_first,
                    forward_sums=tuple(one.forward_sums.values()),
                    backward_sums=tuple(one.backward_sums.values()),
                )
                for tp, one in self._on_ranks.items()
                if one.shared
            ),
        )


def _key(form: tuple[object, ...], seen: Kinds) -> tuple[object, ...]:
    """Of this form the next in a pass."""
    seen[form] = seen.get(form, -1) + 1
    return (*form, seen[form])


def _with_parts(count: Count, index: int) -> Product:
    """A product with what of it a rank computes, where that is not all."""
    whole, own = count.products[index], ((tp, on_rank.products[index]) for tp, on_rank in count.on_ranks.items())
    parts = tuple(
        ProductOnRank(tp=tp, rows=part.rows, inner=part.inner, outer=part.outer, groups=part.groups) for tp, part in own
    )
    return replace(whole, on_ranks=tuple(part for part in parts if _sizes(part) != _sizes(whole)))


def _sizes(product: Product | ProductOnRank) -> tuple[int, int, int, int]:
    return product.rows, product.inner, product.outer, product.groups


def _with_heads(count: Count, index: int) -> FusedAttention:
    whole, heads = count.attentions[index], ((tp, own.attentions[index].heads) for tp, own in count.on_ranks.items())
    return replace(whole, on_ranks=tuple((tp, count) for tp, count in heads if count != whole.heads))


def _both(a: Kept, b: Kept) -> Kept:
    return Kept(numbers=a.numbers + b.numbers, other_bytes=a.other_bytes + b.other_bytes)
