"""Attention of some queries to some keys, such that results over several sets of keys can be joined.

Each comes with the logarithms of its rows' sums of exponentials, by which results are weighted (arXiv 2310.01889,
section 3; 2205.14135, section 3.1); the backward of a part reads the joined ones. Where nothing is masked, or the upper
triangle, torch's flash kernels compute a part; else scores are written out, in at least fp32. Tensors are [batch, rows,
heads, width], logarithms [batch, heads, rows].
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention


@dataclass(frozen=True, slots=True)
class Pair:
    """Queries and keys of which some see some: first and number of each among their tensor's rows.

    Attributes:
        count: so many pairs alike, one behind the other, of tensors of one sample: methods give each a place along the
            first dim.
        ahead: causal: place of the first query less that of the first key; None: every query sees every key.
        window: with `ahead`: a query sees so many keys, that of its own place included.
        mask: instead, [..., queries, keys] for four dims of scores: true where seen, or what is added to scores.
    """

    query: int
    queries: int
    key: int
    keys: int
    ahead: int | None = None
    window: int | None = None
    mask: Tensor | None = None
    count: int = 1

    def of_queries(self, x: Tensor) -> Tensor:
        """A view."""
        return self._of(x, self.query, self.queries)

    def of_keys(self, x: Tensor) -> Tensor:
        return self._of(x, self.key, self.keys)

    def of_logs(self, x: Tensor) -> Tensor:
        """Of [batch, heads, rows of queries]."""
        return self.of_queries(x.transpose(1, 2)).transpose(1, 2)

    def _of(self, x: Tensor, first: int, rows: int) -> Tensor:
        part = x.narrow(1, first, self.count * rows)
        return part if self.count == 1 else torch.unflatten(part.squeeze(0), 0, (self.count, rows))

    @property
    def is_triangle(self) -> bool:
        return self.ahead == 0 and self.window is None and self.queries == self.keys

    @property
    def is_whole(self) -> bool:
        return self.ahead is None and self.mask is None

    def seen(self, device: torch.device) -> Tensor | None:
        """A mask of four dims; None: all."""
        if self.mask is not None:
            return self.mask[(None,) * (4 - self.mask.dim())]
        if self.ahead is None:
            return None
        places = torch.arange(self.ahead, self.ahead + self.queries, device=device)
        behind = places.unsqueeze(1) - torch.arange(self.keys, device=device)
        return ((behind >= 0) & (behind < (self.window or self.ahead + self.queries)))[None, None]


@dataclass(frozen=True, slots=True)
class Part:
    """Attention over some keys, `logs` of its sums, and what a kernel's own backward wants back."""

    result: Tensor
    logs: Tensor
    state: tuple[Any, ...] = ()


def attend(q: Tensor, k: Tensor, v: Tensor, pair: Pair, scale: float) -> Part:
    """Of the pair's queries to its keys; rows that see none are zero, and their logs minus infinity."""
    q, k, v = pair.of_queries(q), pair.of_keys(k), pair.of_keys(v)
    if _is_fused(q, k, v, pair):
        return _fused(q, k, v, pair, scale)
    batch, rows, heads = q.shape[:3]
    scores = _scores(q, k, pair, scale)
    logs = scores.logsumexp(-1)
    weights = scores.sub_(_finite(logs).unsqueeze(-1)).exp_()
    result = weights.flatten(2, 3) @ _wide(v).transpose(1, 2)
    return Part(_rows_first(result, rows, heads), logs.reshape(batch, heads, rows))


def attend_back(
    q: Tensor, k: Tensor, v: Tensor, pair: Pair, scale: float, whole: Part, gradient: Tensor, products: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the pair's queries, keys and values.

    Args:
        whole: the result over all keys; gradient: its gradient; products: sums over `result * gradient`, as logs are.
    """
    q, k, v = pair.of_queries(q), pair.of_keys(k), pair.of_keys(v)
    gradient, logs = pair.of_queries(gradient), pair.of_logs(whole.logs)
    if _is_fused(q, k, v, pair):
        own = Part(pair.of_queries(whole.result), logs, whole.state)
        return _fused_back(q, k, v, pair, scale, own, gradient)
    rows, heads = q.shape[1:3]
    scores = _scores(q, k, pair, scale)
    shape = scores.shape[:-1]
    weights = scores.sub_(_finite(logs).reshape(shape).unsqueeze(-1)).exp_().flatten(2, 3)
    grads = _heads_first(gradient, k.shape[2])
    of_values = weights.transpose(2, 3) @ grads
    slopes = (grads @ _wide(v).permute(0, 2, 3, 1)).view(scores.shape)
    slopes = slopes.sub_(pair.of_logs(products).reshape(shape).unsqueeze(-1)).flatten(2, 3)
    slopes = slopes.mul_(weights).mul_(scale)
    of_queries = slopes @ _wide(k).transpose(1, 2)
    of_keys = slopes.transpose(2, 3) @ _heads_first(q, k.shape[2])
    return _rows_first(of_queries, rows, heads), of_keys.transpose(1, 2), of_values.transpose(1, 2)


def join(total: Tensor, logs: Tensor, part: Part, pair: Pair) -> None:
    """Add a part, in place, to the result over other keys."""
    rows, own = pair.of_queries(total), pair.of_logs(logs)
    joined = torch.logaddexp(own, part.logs)
    before, added = ((x - _finite(joined)).exp().transpose(1, 2).unsqueeze(3) for x in (own, part.logs))
    rows.mul_(before).add_(part.result * added)
    own.copy_(joined)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """In which parts are added up."""
    return torch.promote_types(dtype, torch.float32)


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_type(x.dtype))


def _finite(logs: Tensor) -> Tensor:
    """Rows that see nothing have no sum to be divided by."""
    return logs.clamp_min(torch.finfo(logs.dtype).min)


def _scores(q: Tensor, k: Tensor, pair: Pair, scale: float) -> Tensor:
    """[batch, heads of keys, heads of queries for each, queries, keys]."""
    of_keys, rows = k.shape[2], q.shape[1]
    scores = (_heads_first(q, of_keys) @ _wide(k).permute(0, 2, 3, 1)).mul_(scale)
    scores = torch.unflatten(scores, 2, (-1, rows))
    seen = pair.seen(q.device)
    if seen is None:
        return scores
    grouped = torch.unflatten(seen, 1, (of_keys, -1)) if seen.shape[1] > 1 else seen.unsqueeze(1)
    return scores.masked_fill_(~grouped, -torch.inf) if grouped.dtype == torch.bool else scores.add_(grouped)


def _heads_first(x: Tensor, of_keys: int) -> Tensor:
    """[batch, heads of keys, heads of queries for each x rows, width]: a product serves all heads that share keys."""
    grouped = torch.unflatten(_wide(x), 2, (of_keys, -1))
    return grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _rows_first(x: Tensor, rows: int, heads: int) -> Tensor:
    """The way back."""
    return torch.unflatten(x, 2, (-1, rows)).permute(0, 3, 1, 2, 4).reshape(x.shape[0], rows, heads, x.shape[3])


def _is_fused(q: Tensor, k: Tensor, v: Tensor, pair: Pair) -> bool:
    """Whether a flash kernel of torch computes the part and gives its logs."""
    if not (pair.is_whole or pair.is_triangle) or k.shape[3] != v.shape[3]:
        return False
    if q.device.type == "cpu":
        return True
    if q.dtype not in (torch.float16, torch.bfloat16) or q.shape[3] % 8:
        return False
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    return can_use_flash_attention(SDPAParams(queries, keys, values, None, 0.0, pair.is_triangle, grouped))


def _fused(q: Tensor, k: Tensor, v: Tensor, pair: Pair, scale: float) -> Part:
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    if q.device.type == "cpu":
        result, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, 0.0, pair.is_triangle, scale=scale
        )
        return Part(result.transpose(1, 2), logs)
    result, logs, *state, _ = torch.ops.aten._scaled_dot_product_flash_attention(
        *heads, 0.0, pair.is_triangle, False, scale=scale
    )
    return Part(result.transpose(1, 2), logs, tuple(state[-2:]))


def _fused_back(
    q: Tensor, k: Tensor, v: Tensor, pair: Pair, scale: float, own: Part, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    heads = [x.transpose(1, 2) for x in (gradient, q, k, v, own.result)]
    logs, causal = own.logs.contiguous(), pair.is_triangle
    if q.device.type == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads, logs, 0.0, causal, scale=scale
        )
    else:
        sizes = (None, None, pair.queries, pair.keys)
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *heads, logs, *sizes, 0.0, causal, *own.state, scale=scale
        )
    of_queries, of_keys, of_values = (x.transpose(1, 2) for x in found)
    return of_queries, of_keys, of_values
