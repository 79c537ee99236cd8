"""A block of which each rank has some whole experts, set up from outside: its own code computes on the rows they get.

Rows go to the ranks of their experts and come back by the exchanges that built-in models use (`runtime/exchange.py`),
unweighted; what is done with an expert's rows is the module's own forward, on its experts alone. Where experts lie on
tensor-parallel ranks, which hold the same tokens, each of these sends a part of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mmplan.errors import InputError
from mmplan.runtime.exchange import from_experts, join_rows, own_rows, plan_exchange, to_experts
from mmplan.runtime.ghost.expert_flow import Experts
from mmplan.runtime.ghost.listed_experts import ListedExperts
from mmplan.runtime.held import Cut
from mmplan.runtime.tensor_sums import TensorRanks

Compute = Callable[[Tensor, Sequence[int]], Tensor]  # rows, expert by expert, and how many each has -> their results


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSplit:
    """Experts that ranks share. `numbers`: attributes of their module that are divided; `topk`: experts of a token."""

    experts: Experts
    topk: int
    numbers: tuple[str, ...] = ()


def expert_cuts(split: ExpertSplit, degree: int) -> dict[str, Cut]:
    """Parameters within the block of which each rank has those of its experts."""
    if split.experts.form == "listed":
        return {}
    return dict.fromkeys(split.experts.parameters, Cut(0, 1, degree))


def parameters_away(split: ExpertSplit, degree: int, index: int) -> set[str]:
    """Parameters within the block of experts that are modules of their own, and not of this rank."""
    experts, away = split.experts, set[str]()
    for place, member in enumerate(experts.members):
        if place * degree // experts.count != index:
            away |= {name for name in experts.parameters if name.startswith(f"{member}.")}
    return away


def set_up_experts(block: nn.Module, split: ExpertSplit, ranks: TensorRanks) -> None:
    """Replace the forward of the module that is called with the tokens; the block's parameters are this rank's."""
    assert ranks.experts is not None
    experts, module = split.experts, block.get_submodule(split.experts.module)
    for attribute in split.numbers:
        setattr(module, attribute, getattr(module, attribute) // ranks.experts.degree)
    if experts.form == "chosen":
        module.forward = _with_chosen(module.forward, experts, ranks)
    elif experts.form == "every":
        module.forward = _with_every(module.forward, experts, split.topk, ranks)
    else:
        own = experts.count // ranks.experts.degree
        first = own * ranks.experts.index
        members = [block.get_submodule(name) for name in experts.members]

        def compute(rows: Tensor, counts: Sequence[int]) -> Tensor:
            pieces = zip(torch.split(rows, list(counts)), members[first : first + own], strict=True)
            return torch.cat([member(piece) for piece, member in pieces if piece.shape[0]])

        def sent(rows: Tensor, numbers: Tensor) -> Tensor:
            return copies_at_experts(rows, numbers, experts.count, ranks, compute)

        module.forward = ListedExperts(module, members, experts.width, sent)


def at_experts(rows: Tensor, chosen: Tensor, count: int, ranks: TensorRanks, compute: Compute) -> Tensor:
    """Results of rows [tokens, width] at each of their experts, chosen [tokens, topk] -> [tokens * topk, width]."""
    assert ranks.experts is not None
    order = chosen.flatten().argsort(stable=True)
    counts: list[int] = chosen.flatten().bincount(minlength=count).tolist()
    exchange = plan_exchange(counts, ranks.experts, rows.device)
    came = to_experts(rows.index_select(0, order // chosen.shape[1]), exchange, ranks)
    here = exchange.rows
    if not came.shape[0]:
        # A row that counts for nothing: without one the backward would not come to this rank's exchanges.
        came, here = torch.cat((came, came.new_zeros(1, came.shape[1]))), [1, *here[1:]]
    made = compute(came, here)[: sum(exchange.rows)].to(rows.dtype)
    return from_experts(made, exchange, ranks).index_select(0, order.argsort())


def copies_at_experts(rows: Tensor, numbers: Tensor, count: int, ranks: TensorRanks, compute: Compute) -> Tensor:
    """The same of rows [copies, width] that have one expert each, numbers [copies, 1]."""
    if ranks.degree == 1:
        return at_experts(rows, numbers, count, ranks, compute)
    made = at_experts(own_rows(rows, ranks), own_rows(numbers, ranks), count, ranks, compute)
    return join_rows(made, rows.shape[0], ranks)


def _with_chosen(forward: Callable[..., Any], experts: Experts, ranks: TensorRanks) -> Callable[..., Tensor]:
    def called(*args: Any, **kwargs: Any) -> Tensor:
        leaves, spec = tree_flatten((args, kwargs))
        given, chosen, weights = leaves[experts.rows], leaves[experts.chosen], leaves[experts.weights]
        every = weights.shape[1] != chosen.shape[1]
        if every:  # a weight for each expert, of which those of the chosen count
            weights = weights.gather(1, chosen)
        rows = given.reshape(-1, experts.width)

        def compute(own: Tensor, counts: Sequence[int]) -> Tensor:
            numbers = torch.arange(len(counts), device=own.device)
            numbers = numbers.repeat_interleave(torch.tensor(counts, device=own.device)).unsqueeze(1)
            ones = weights.new_ones(numbers.shape)
            inner = list(leaves)
            inner[experts.rows] = own.view(*[1] * (given.dim() - 2), *own.shape)
            inner[experts.chosen] = numbers.to(chosen.dtype)
            inner[experts.weights] = (
                ones.new_zeros(len(numbers), len(counts)).scatter(1, numbers, ones) if every else ones
            )
            args, kwargs = tree_unflatten(inner, spec)
            result: Tensor = forward(*args, **kwargs)
            return result.reshape(-1, experts.width)

        if ranks.degree > 1:
            rows, picked, weights = own_rows(rows, ranks), own_rows(chosen, ranks), own_rows(weights, ranks)
        else:
            picked = chosen
        made = at_experts(rows, picked, experts.count, ranks, compute)
        total = (made.view(*picked.shape, -1) * weights.unsqueeze(2)).sum(1).to(given.dtype)
        total = join_rows(total, len(chosen), ranks) if ranks.degree > 1 else total
        result: Tensor = total.view(given.shape)
        return result

    return called


def _with_every(forward: Callable[..., Any], experts: Experts, topk: int, ranks: TensorRanks) -> Callable[..., Tensor]:
    def called(*args: Any, **kwargs: Any) -> Tensor:
        leaves, spec = tree_flatten((args, kwargs))
        rows = leaves[experts.rows].reshape(-1, experts.width)
        chosen = rows_with_values(rows.detach(), experts.count, topk)
        tokens = torch.arange(len(chosen), device=rows.device).unsqueeze(1)
        places = (chosen * len(chosen) + tokens).flatten()

        def compute(own: Tensor, counts: Sequence[int]) -> Tensor:
            """Every expert gets as many rows as the one with the most; zeros are added."""
            most = max(counts)
            at = torch.cat([torch.arange(n, device=own.device) + i * most for i, n in enumerate(counts)])
            padded = own.new_zeros(len(counts) * most, experts.width).index_copy(0, at, own)
            inner = list(leaves)
            inner[experts.rows] = padded
            args, kwargs = tree_unflatten(inner, spec)
            result: Tensor = forward(*args, **kwargs)
            return result.reshape(-1, experts.width).index_select(0, at)

        numbers = chosen.flatten().unsqueeze(1)
        made = copies_at_experts(rows.index_select(0, places), numbers, experts.count, ranks, compute)
        result: Tensor = rows.new_zeros(rows.shape).index_copy(0, places, made).view(leaves[experts.rows].shape)
        return result

    return called


def rows_with_values(rows: Tensor, count: int, topk: int) -> Tensor:
    """Which experts' rows of each token are not zero: rows [count * tokens, width] -> expert numbers [tokens, topk].

    Raises:
        InputError: a token has more of them.
    """
    largest = rows.view(count, -1, rows.shape[1]).abs().amax(2)
    most = int((largest > 0).sum(0).max()) if largest.numel() else 0
    if most > topk:
        raise InputError(f"a token has rows for {most} of {count} experts, and {topk} were seen before the run")
    return largest.topk(topk, dim=0).indices.T.contiguous()


def rows_given(block: nn.Module, experts: Experts) -> list[int]:
    """How many rows with values the block gives to experts, taken down from here on; it does as it did."""
    counts: list[int] = []

    def watched(forward: Callable[..., Any], *, zeros: bool) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            leaves = tree_leaves((args, kwargs))
            rows = leaves[experts.rows] if zeros else next(leaf for leaf in leaves if isinstance(leaf, Tensor))
            rows = rows.detach().reshape(-1, experts.width)
            counts.append(int((rows != 0).any(1).sum()) if zeros else len(rows))
            return forward(*args, **kwargs)

        return called

    if experts.form == "every":
        module = block.get_submodule(experts.module)
        module.forward = watched(module.forward, zeros=True)
    for name in experts.members:
        member = block.get_submodule(name)
        member.forward = watched(member.forward, zeros=False)
    return counts
