"""What the ranks of `mmplan execute --health` see in a sampled step, as sums that rank 0 adds up.

A rank tells each number once: of what several ranks hold alike each tells its share.
"""

from dataclasses import dataclass, field

from mmplan.planner.prediction import TimedAction
from mmplan.runtime.health.key_values import Spread


@dataclass(kw_only=True, slots=True)
class Rows:
    """Embeddings of one modality: their sum, the count and, where each row is a sample, the rows."""

    total: list[float]
    count: float
    rows: list[list[float]] | None = None


@dataclass(kw_only=True, slots=True)
class Seen:
    """Of one rank and step.

    Attributes:
        headroom: of the output nearest to the end of its type, with its layer; None: no output.
        flows: place -> side -> squared gradients there, times mean squares of outputs at branches.
        ratios, effective_ranks: of attention matrices of the last cross-attention that this rank has.
        keys: layer or modality -> the spread of this rank's heads.
        embeddings: by modality.
        squares: what microbatches add to the gradient, squared and summed.
        total_square: of the summed gradient.
        lags: modality -> passes by which features were too old.
        timeline, asked_s: see `RankStep`.
    """

    headroom: tuple[float, str] | None = None
    flows: dict[str, dict[str, float]] = field(default_factory=dict)
    attention_at: str = ""
    ratios: list[float] = field(default_factory=list)
    effective_ranks: list[float] = field(default_factory=list)
    keys: dict[str, Spread] = field(default_factory=dict)
    embeddings: dict[str, Rows] = field(default_factory=dict)
    squares: float | None = None
    total_square: float = 0.0
    lags: dict[str, int] = field(default_factory=dict)
    timeline: tuple[TimedAction, ...] = ()
    asked_s: tuple[float, ...] = ()
