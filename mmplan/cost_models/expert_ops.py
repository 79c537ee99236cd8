"""The operators of a mixture of experts (part of `ops.Op`)."""

from dataclasses import dataclass
from typing import Literal

from mmplan.cost_models.values import Parallel, Value


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK:
    """Experts of each token: the column numbers of the largest scores, integers without gradient."""

    x: Value
    y: Value


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Weights of the chosen experts from their scores, in fp32.

    softmax: over the chosen (Mixtral, Qwen3: equals softmax over all, chosen ones renormalised); softmax_all: over all
    experts, not renormalised (DeepSeek-V2); sigmoid: renormalised (DeepSeek-V3, arXiv 2412.19437, section 2.1.2);
    sigmoid_plain: not renormalised (Llama 4).
    """

    kind: Literal["softmax", "softmax_all", "sigmoid", "sigmoid_plain"]
    x: Value
    chosen: Value
    y: Value


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """Copies of each token's row for its experts, sorted by expert; with expert parallelism an all-to-all.

    `capacity`: every expert gets capacity * tokens * topk / experts rows; what is more is dropped, what is less is
    filled with zeros (GShard, arXiv 2006.16668). None: as many as the router sends. `imbalance`: rows of the busiest
    rank over the mean; counts are of the mean, seconds of the busiest (`Layer.imbalance`).
    """

    x: Value
    chosen: Value
    y: Value
    experts: int
    capacity: float | None = None
    imbalance: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedLinear:
    """One linear for each of `experts`, each on its own rows: [routed rows, in] -> [routed rows, out].

    Weights lie whole experts on ep ranks; `column` splits each one's outputs over etp ranks, `row` its inputs.
    """

    name: str
    x: Value
    chosen: Value
    y: Value
    experts: int
    trainable: bool
    parallel: Parallel
    capacity: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Combine:
    """Sum of each token's expert rows times their weights; with expert parallelism an all-to-all before it."""

    x: Value
    chosen: Value
    weights: Value
    y: Value
    experts: int
    capacity: float | None = None
