"""Over how many ranks the work and weights of a layer are split."""

from dataclasses import dataclass
from functools import cache

from mmplan.scenario.technique import ContextParallel


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Degrees that reach inside a layer. Functions that take one also take a plain `tp`, short for `Shard(tp=tp)`.

    tp: tensor parallel (heads, MLP widths, vocabulary; Megatron, arXiv 1909.08053). ep: routed experts are spread over
    so many ranks. etp: each routed expert's width is split over so many ranks; None means as `tp`. cp: every sequence's
    rows are split over so many ranks, whose keys and values come together in one way for self-attention
    (`context_parallel`). `sequence`: values that tp does not split along width are rows over tp (Megatron, arXiv
    2205.05198, section 4.2.2).

    Routed rows on a rank are tokens * topk * etp / tp whatever `ep` is: the ep * etp ranks of an expert group hold
    ep * etp / tp different sets of tokens and ep sets of experts (Megatron Core's parallel folding, arXiv 2504.14960).
    """

    tp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    context_parallel: ContextParallel = "ring"
    sequence: bool = False

    def __post_init__(self) -> None:
        if min(self.tp, self.ep, self.expert_tp, self.cp) < 1:
            raise ValueError(f"degrees are at least 1, found {self}")

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp


def as_shard(degrees: int | Shard) -> Shard:
    """A plain tensor-parallel degree as a shard."""
    return degrees if isinstance(degrees, Shard) else Shard(tp=degrees)


@cache
def shard_of(tp: int = 1, ep: int = 1, etp: int | None = None, cp: int = 1) -> Shard:
    """The one object of these degrees: a search asks for the same ones millions of times."""
    return Shard(tp=tp, ep=ep, etp=etp, cp=cp)
