"""Causal convolutions and the gated delta rule on packed rows (arXiv 2412.06464, section 3.3), in chunks.

Both keep their inputs alone and compute the rest again in the backward pass, as flash-linear-attention does.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmplan.cost_models.delta_ops import CHUNK
from mmplan.runtime.norms import wide
from mmplan.runtime.rows import row_positions

NORM_EPS = 1e-6  # of the length of queries and keys (fla-org/flash-linear-attention, `l2norm`)


def causal_conv(x: Tensor, weight: Tensor, lengths: Sequence[int]) -> Tensor:
    """Row t becomes the sum over j of x[t - j] * weight[:, -1 - j] within its sequence; weight [width, kernel]."""
    rows = row_positions(lengths, max((1, *lengths))).to(x.device)
    result: Tensor = _CausalConv.apply(x, weight, rows)  # type: ignore[no-untyped-call]
    return result


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, rows)
        taps = weight.shape[1]
        return sum((_shifted(x, rows, j) * weight[:, taps - 1 - j] for j in range(taps)), torch.zeros_like(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rows = ctx.saved_tensors
        grad, taps = grads[0], weight.shape[1]
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = torch.zeros_like(x)
            for j in range(min(taps, x.shape[0])):
                from_later = (grad * weight[:, taps - 1 - j]) * (rows >= j).unsqueeze(1)
                of_x[: x.shape[0] - j] += from_later[j:]
        if ctx.needs_input_grad[1]:
            columns = [(grad * _shifted(x, rows, j)).sum(0) for j in reversed(range(taps))]
            of_weight = torch.stack(columns, dim=1)
        return of_x, of_weight, None


def _shifted(x: Tensor, rows: Tensor, distance: int) -> Tensor:
    """Row t - distance in place of row t, zeros where that is in front of the sequence."""
    if distance == 0:
        return x
    moved = F.pad(x, (0, 0, distance, 0))[: x.shape[0]]
    return moved * (rows >= distance).unsqueeze(1)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, step: Tensor, decay: Tensor, lengths: Sequence[int], key_heads: int
) -> Tensor:
    """The rule within each sequence: [rows, value_heads * value_dim].

    Args:
        q, k: [rows, key_heads * key_dim]; v: [rows, value_heads * value_dim]; gate, step: [rows, value_heads].
        decay: [2, value_heads]: A and the bias of the gate.
    """
    result: Tensor = _DeltaRule.apply(q, k, v, gate, step, decay, tuple(lengths), key_heads)  # type: ignore[no-untyped-call]
    return result


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor,
        step: Tensor,
        decay: Tensor,
        lengths: tuple[int, ...],
        key_heads: int,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, gate, step, decay)
        ctx.lengths, ctx.key_heads = lengths, key_heads
        result, _ = _all_sequences((q, k, v, gate, step, decay), lengths, key_heads)
        return result.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # For a second derivative gradients have to depend on the inputs themselves, not on copies cut off from them.
        twice = torch.is_grad_enabled()
        inputs = tuple(
            tensor if twice and tensor.requires_grad else tensor.detach().requires_grad_()
            for tensor in ctx.saved_tensors
        )
        with torch.enable_grad():
            result, states = _all_sequences(inputs, ctx.lengths, ctx.key_heads)
        if not states:
            return (*(torch.zeros_like(tensor) for tensor in inputs), None, None)
        outputs = (result, *(last for _, last in states))
        given = (grads[0].to(result.dtype), *(torch.zeros_like(last) for _, last in states))
        # first states take part although nobody asks for their gradient: every product then has both of its gradients
        wanted = (*inputs, *(first for first, _ in states))
        found = torch.autograd.grad(outputs, wanted, given, create_graph=twice)
        return (*found[: len(inputs)], None, None)


def _all_sequences(
    inputs: tuple[Tensor, ...], lengths: tuple[int, ...], key_heads: int
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Rows of all sequences, and the first and last state of each one that has rows."""
    q, k, v, gate, step, decay = inputs
    heads = gate.shape[1]
    parts: list[Tensor] = []
    states: list[tuple[Tensor, Tensor]] = []
    row = 0
    for length in lengths:
        if length == 0:
            continue
        here = slice(row, row + length)
        keys, queries = (
            _unit(wide(x[here]).view(length, key_heads, -1)).repeat_interleave(heads // key_heads, dim=1)
            for x in (k, q)
        )
        values = wide(v[here]).view(length, heads, -1)
        logs = -wide(decay[0]).exp() * F.softplus(wide(gate[here]) + wide(decay[1]))
        first = keys.new_zeros(heads, keys.shape[2], values.shape[2]).requires_grad_(torch.is_grad_enabled())
        rows, last = _one_sequence(queries, keys, values, logs, wide(step[here]).sigmoid(), first)
        parts.append(rows.reshape(length, -1))
        states.append((first, last))
        row += length
    return (torch.cat(parts) if parts else v.new_zeros(v.shape)), states


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + NORM_EPS)


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, logs: Tensor, step: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, heads, width] each, logs and step [rows, heads], state [heads, key_dim, value_dim]."""
    length, short = q.shape[0], -q.shape[0] % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, short)).transpose(0, 1) for x in (q * q.shape[2] ** -0.5, k, v))
    logs, step = (F.pad(x, (0, 0, 0, short)).transpose(0, 1) for x in (logs, step))
    ones = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device)
    results = []
    for start in range(0, length, CHUNK):
        cut = slice(start, start + CHUNK)
        queries, keys, values, beta = q[:, cut], k[:, cut], v[:, cut], step[:, cut].unsqueeze(-1)
        sums = logs[:, cut].cumsum(1)
        between = (sums.unsqueeze(2) - sums.unsqueeze(1)).tril().exp().tril()
        scaled = keys * beta
        system = -(scaled @ keys.transpose(1, 2)) * between
        solved: Tensor = _Solved.apply(system.masked_fill(ones.triu(), 0))  # type: ignore[no-untyped-call]
        own, carried = solved @ (values * beta), solved @ (scaled * sums.exp().unsqueeze(-1))
        fresh = own - carried @ state
        weights = (queries @ keys.transpose(1, 2)) * between
        results.append((queries * sums.exp().unsqueeze(-1)) @ state + weights @ fresh)
        end = sums[:, -1:]
        kept = keys * (end - sums).exp().unsqueeze(-1)
        state = state * end.exp().unsqueeze(-1) + kept.transpose(1, 2) @ fresh
    return torch.cat(results, dim=1).transpose(0, 1)[:length], state


class _Solved(torch.autograd.Function):
    """(1 - A)^-1 of strictly lower triangular A [heads, CHUNK, CHUNK]."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        one = torch.eye(CHUNK, dtype=a.dtype, device=a.device).expand(a.shape)
        inverse: Tensor = torch.linalg.solve_triangular(one - a, one, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(1, 2)
        result: Tensor = turned @ grads[0] @ turned
        return result
