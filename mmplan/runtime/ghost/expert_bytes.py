"""Bytes that ranks which share experts of a block exchange in its forward and backward, told from a recording alone."""

from dataclasses import dataclass

from mmplan.runtime.ghost.split_experts import ExpertSplit
from mmplan.runtime.tensor_sums import TensorRanks


@dataclass(frozen=True, slots=True)
class WithGradient:
    """What at the experts of a call has a gradient: the rows they get, the weights of their results, their own."""

    rows: bool
    weights: bool
    experts: bool


def expert_forward_bytes(tokens: int, split: ExpertSplit, ranks: TensorRanks, element_bytes: int) -> int:
    """Rows of this rank's tokens to experts and back, and the gather of results where tokens are dealt out."""
    there = _own(tokens, split, ranks) * split.experts.width
    return element_bytes * (2 * there + _joined(_dealt(tokens, split), split.experts.width, ranks))


def expert_backward_bytes(
    tokens: int, split: ExpertSplit, ranks: TensorRanks, element_bytes: int, gradient: WithGradient
) -> int:
    """Their gradients: on the way back where results have one, on the way there where rows have one."""
    experts, dealt = split.experts, _dealt(tokens, split)
    there = _own(tokens, split, ranks) * experts.width
    total = element_bytes * there * (int(gradient.rows or gradient.experts) + int(gradient.rows))
    total += element_bytes * _joined(dealt, experts.width, ranks) if gradient.rows else 0
    if experts.form == "chosen" and gradient.weights:
        total += experts.weight_bytes * _joined(dealt, split.topk, ranks)
    return total


def _dealt(tokens: int, split: ExpertSplit) -> int:
    """Rows that are dealt out over tensor-parallel ranks: tokens, or their copies for experts."""
    return tokens * (1 if split.experts.form == "chosen" else split.topk)


def _own(tokens: int, split: ExpertSplit, ranks: TensorRanks) -> int:
    """Copies that this rank sends to experts (see `exchange.own_rows`)."""
    rows = _dealt(tokens, split)
    size = -(-rows // ranks.degree)
    own = max(0, min(size, rows - ranks.index * size))
    return own * (split.topk if split.experts.form == "chosen" else 1)


def _joined(rows: int, width: int, ranks: TensorRanks) -> int:
    """Elements of a gather of the parts of dealt rows (see `exchange.join_rows`)."""
    return 0 if ranks.degree == 1 else -(-rows // ranks.degree) * ranks.degree * width
