"""Ring attention: parts that are joined, which rows see which, and ranks (as threads) that pass keys and values on."""

import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from queue import Queue

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmplan.runtime import block_attention, ring_attention
from mmplan.runtime.block_attention import Pair, Part, attend, attend_back, join
from mmplan.runtime.context import OwnRowsOf
from mmplan.runtime.row_pairs import pairs_under, pairs_with
from mmplan.runtime.tensor_sums import Peers, TensorRanks

HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def drawn(rows: int, heads: int, width: int = WIDTH, batch: int = 1) -> Tensor:
    return torch.randn(batch, rows, heads, width, requires_grad=True)


def whole(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("value_width", [WIDTH, 2 * WIDTH])
def test_parts_join_to_attention_over_all_keys(fused: bool, value_width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six queries: all see the first four keys, and each of the last six those up to its own place."""
    if not fused:
        monkeypatch.setattr(block_attention, "_is_fused", lambda *_: False)
    q, k, v = drawn(6, HEADS), drawn(10, KEY_HEADS), drawn(10, KEY_HEADS, value_width)
    pairs = (Pair(0, 6, 0, 4), Pair(0, 6, 4, 6, ahead=0))
    total, logs = torch.zeros(1, 6, HEADS, value_width), torch.full((1, HEADS, 6), -torch.inf)
    for pair in pairs:
        join(total, logs, attend(q.detach(), k.detach(), v.detach(), pair, WIDTH**-0.5), pair)
    expected = whole(q, k, v, torch.ones(6, 10, dtype=torch.bool).tril(4))
    assert torch.allclose(total, expected, atol=1e-6)
    gradient = torch.randn_like(total)
    expected.backward(gradient)
    products, found = (total * gradient).sum(3).transpose(1, 2), [torch.zeros_like(x) for x in (q, k, v)]
    for pair in pairs:
        own = attend_back(q, k, v, pair, WIDTH**-0.5, Part(total, logs), gradient, products)
        found[0] += own[0]
        pair.of_keys(found[1]).add_(own[1])
        pair.of_keys(found[2]).add_(own[2])
    for mine, x in zip(found, (q, k, v), strict=True):
        assert torch.allclose(mine.detach(), x.grad, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("fused", [True, False])
def test_pairs_alike_are_computed_at_once(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two causal sequences of three rows, from the second of eight rows on."""
    if not fused:
        monkeypatch.setattr(block_attention, "_is_fused", lambda *_: False)
    q, k, v = drawn(8, HEADS).detach(), drawn(8, KEY_HEADS).detach(), drawn(8, KEY_HEADS).detach()
    gradient, found = torch.randn(1, 8, HEADS, WIDTH), []
    for pairs in ((Pair(1, 3, 1, 3, ahead=0, count=2),), (Pair(1, 3, 1, 3, ahead=0), Pair(4, 3, 4, 3, ahead=0))):
        total, logs = torch.zeros(1, 8, HEADS, WIDTH), torch.full((1, HEADS, 8), -torch.inf)
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        for pair in pairs:
            join(total, logs, attend(q, k, v, pair, 0.3), pair)
        for pair in pairs:
            whole = Part(total, logs)
            own = attend_back(q, k, v, pair, 0.3, whole, gradient, (total * gradient).sum(3).transpose(1, 2))
            for one, part, rows in zip(grads, own, (pair.of_queries, pair.of_keys, pair.of_keys), strict=True):
                rows(one).add_(part)
        found.append([total, *grads])
    for together, apart in zip(*found, strict=True):
        assert torch.allclose(together, apart, atol=1e-6) and together.any()


def test_a_gpu_s_kernel_is_called_as_torch_declares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and types alone, as here is no GPU: what comes fits to be joined, and gradients have their shapes."""
    monkeypatch.setattr(block_attention, "can_use_flash_attention", lambda _: True)
    q = torch.empty(2, 6, HEADS, WIDTH, dtype=torch.bfloat16, device="meta")
    k = v = torch.empty(2, 6, KEY_HEADS, WIDTH, dtype=torch.bfloat16, device="meta")
    pair = Pair(1, 4, 1, 4, ahead=0)
    part = attend(q, k, v, pair, 0.25)
    assert (part.result.shape, part.logs.shape) == ((2, 4, HEADS, WIDTH), (2, HEADS, 4))
    assert part.logs.dtype == torch.float32 and len(part.state) == 2
    logs = torch.empty(2, HEADS, 6, device="meta")
    grads = attend_back(q, k, v, pair, 0.25, Part(q, logs, part.state), q, logs)
    assert [g.shape for g in grads] == [pair.of_queries(q).shape, pair.of_keys(k).shape, pair.of_keys(v).shape]


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize(("causal", "sliding"), [(True, None), (True, 3), (True, 1), (False, None)])
def test_pairs_show_what_the_mask_shows_and_nothing_twice(degree: int, causal: bool, sliding: int | None) -> None:
    lengths = (5, 1, 0, 9, 4)
    count = sum(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = sequence.unsqueeze(1) == sequence
    behind = torch.arange(count).unsqueeze(1) - torch.arange(count)
    if causal:
        mask = mask & (behind >= 0) & (behind < (sliding or count))
    shown = torch.zeros(count, count, dtype=torch.int64)
    ranks = [OwnRowsOf(count, degree, index) for index in range(degree)]
    for own in ranks:
        places = own.take(torch.arange(count), -1)
        for other in ranks:
            keys = other.take(torch.arange(count), -1)
            for pair in pairs_with(own, other, lengths, causal, sliding):
                seen = pair.seen(torch.device("cpu"))
                part = torch.ones(pair.queries, pair.keys, dtype=torch.int64) if seen is None else seen[0, 0].long()
                assert part.any(), "a pair of which nothing is seen is left out"
                rows = pair.of_queries(places[None]).reshape(pair.count, -1, 1)
                shown[rows, pair.of_keys(keys[None]).reshape(pair.count, 1, -1)] += part
    assert shown.equal(mask.long())


def test_windows_one_behind_the_other_are_one_pair() -> None:
    """Two ranks of two chunks of 12 rows, in windows of 4 and images of 6."""
    first, second = OwnRowsOf(48, 2, 0), OwnRowsOf(48, 2, 1)
    assert pairs_with(first, first, (4,) * 12, False, None) == (Pair(0, 4, 0, 4, count=6),)
    assert pairs_with(first, first, (6,) * 8, True, None) == (Pair(0, 6, 0, 6, ahead=0, count=4),)
    assert pairs_with(first, second, (4,) * 12, False, None) == ()


def test_ranks_of_a_causal_sequence_have_equal_work() -> None:
    """Of 8 chunks of 4 rows a rank's see 2 + 7 x 4 whole chunks less what lies above two diagonals, whichever it is."""
    ranks = [OwnRowsOf(32, 4, index) for index in range(4)]
    work = []
    for own in ranks:
        pairs = [pair for other in ranks for pair in pairs_with(own, other, (32,), True, None)]
        assert all(pair.is_whole or pair.is_triangle for pair in pairs)  # what flash kernels compute
        work.append(sum(pair.queries * pair.keys for pair in pairs))
    assert set(work) == {9 * 4 * 4}


class Ring:
    """Ranks as threads. `most`: blocks that came and were alive at once on a rank."""

    def __init__(self, degree: int) -> None:
        self.queues: list[Queue[list[Tensor]]] = [Queue() for _ in range(degree)]
        self.alive: dict[int, list[weakref.ref[Tensor]]] = {index: [] for index in range(degree)}
        self.most = 0

    def pass_on(self, parts: Sequence[Tensor], index: int) -> "Coming":
        self.queues[(index + 1) % len(self.queues)].put([part.clone() for part in parts])
        return Coming(self, index)


class Coming:
    def __init__(self, ring: Ring, index: int) -> None:
        self._ring, self._index = ring, index

    def there(self) -> tuple[Tensor, ...]:
        parts = self._ring.queues[self._index].get(timeout=20)
        alive = self._ring.alive[self._index]
        alive += [weakref.ref(part) for part in parts]
        self._ring.most = max(self._ring.most, sum(ref() is not None for ref in alive))
        return tuple(parts)


def images_and_text(rows: int) -> Tensor:
    """Causal but for images of rows 3 to 8 and 12 to 16, whose rows see each other; a second sample starts at row 2."""
    image = torch.zeros(rows, dtype=torch.int64)
    image[3:9], image[12:17] = 1, 2
    mask = torch.ones(rows, rows, dtype=torch.bool).tril() | ((image.unsqueeze(1) == image) & (image > 0))
    both = mask.repeat(2, 1, 1, 1)
    both[1, :, :, :2] = False
    both[1, :, :2] = False
    return both


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("kind", ["images", "scores", "padding"])
def test_ranks_that_pass_keys_on_have_outputs_and_gradients_of_one(
    degree: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 19
    q, k, v = (drawn(rows, heads, batch=2) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    mask = images_and_text(rows)
    if kind == "scores":
        mask = torch.where(mask, torch.randn(2, HEADS, rows, rows), -torch.inf)
    if kind == "padding":
        mask = (torch.arange(rows) >= torch.tensor([[0], [13]]))[:, None, None]
    expected = whole(q, k, v, mask).nan_to_num()
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    ring, found, broken = Ring(degree), dict[int, tuple[Tensor, ...]](), list[BaseException]()
    monkeypatch.setattr(ring_attention, "pass_on", ring.pass_on)
    moved: dict[int, int] = {}

    def rank(index: int) -> None:
        try:
            own = OwnRowsOf(rows, degree, index)
            mine = [own.take(x.detach().transpose(0, 1)).transpose(0, 1).requires_grad_() for x in (q, k, v, weight)]
            ranks, peers = TensorRanks(degree=1, index=0, group=None), Peers(degree, index, index)  # type: ignore[arg-type]
            result = ring_attention.ring_attention(
                *mine[:3], lambda source: pairs_under(mask, own, replace(own, index=source)), ranks, peers
            )
            (result * mine[3]).sum().backward()
            found[index] = (result.detach(), *(x.grad for x in mine[:3]))  # type: ignore[assignment]
            moved[index] = ranks.total_bytes
        except BaseException as error:
            broken.append(error)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not broken and len(found) == degree, broken
    for index, parts in found.items():
        mine, at = OwnRowsOf(rows, degree, index).among(torch.arange(rows))
        grads = [x.grad.nan_to_num() for x in (q, k, v)]  # type: ignore[union-attr]
        for part, one in zip(parts, (expected.detach(), *grads), strict=True):
            assert torch.allclose(part[:, at], one[:, mine], atol=2e-5)
    own_bytes = 2 * 2 * OwnRowsOf(rows, degree, 0).size * KEY_HEADS * WIDTH * 2 * 4
    assert set(moved.values()) == {3 * (degree - 1) * own_bytes}
    assert ring.most <= 6  # keys and values at hand and those that come, and in the backward two gradients on their way


def test_what_a_mask_empties_is_left_out_and_what_it_shows_whole_needs_no_mask() -> None:
    """Two ranks of two chunks of two rows: the first rank's front chunk sees nothing of the second rank's."""
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    first, second = OwnRowsOf(8, 2, 0), OwnRowsOf(8, 2, 1)
    of_others = pairs_under(mask, first, second)
    assert [(pair.query, pair.key, pair.mask) for pair in of_others] == [(2, 0, None), (2, 2, None)]
    diagonal = [pair for pair in pairs_under(mask, first, first) if pair.mask is not None]
    assert [(pair.query, pair.key) for pair in diagonal] == [(0, 0), (2, 2)]
