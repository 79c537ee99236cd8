"""By which sums a norm layer's statistics were made: those of its modality, or ones that something foreign is in."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RIGHT = "sums over all ranks, by modality"
GLOBAL = "one sum over all ranks and all modalities"
LOCAL = "the sums of this rank alone"
LOCAL_MIXED = "the sums of this rank alone, over all modalities"
MEAN_OF_RANKS = "the unweighted mean of the ranks' own statistics"
UNKNOWN = "none of the reductions known here"

_TOLERANCE = 1e-3  # of a standard deviation, and of its logarithm: what fp32 sums and bf16 statistics differ by


@dataclass(frozen=True, kw_only=True, slots=True)
class StatisticsUsed:
    """What a layer used for one modality.

    Attributes:
        reduction: one of the constants above.
        foreign: other modality -> its share of the elements that were summed.
        mean_off: of the mean, in standard deviations of the modality.
        scale_off: standard deviation used over the right one.
    """

    modality: str
    reduction: str
    foreign: dict[str, float]
    mean_off: float
    scale_off: float

    @property
    def right(self) -> bool:
        return self.reduction == RIGHT

    def __str__(self) -> str:
        told = f"{self.modality} is normalised by {self.reduction}"
        if self.right:
            return told
        strangers = " and ".join(f"{share:.0%} {name}'s" for name, share in self.foreign.items() if share > 0)
        of = f": the elements are {strangers}" if strangers else ""
        return f"{told}{of}; mean off by {self.mean_off:+.3g} standard deviations, scale {self.scale_off:.3g} times"


def diagnose_statistics(
    mean: Tensor, std: Tensor, moments: Tensor, *, rank: int, modalities: Sequence[str]
) -> tuple[StatisticsUsed, ...]:
    """Name the sums behind the statistics that a layer used on a rank; modalities without tokens are left out.

    Args:
        mean, std: [modalities], as the layer used them on `rank`.
        moments: [ranks, modalities, 3]: count, sum and sum of squares on each rank (`segment_moments`, gathered).

    Raises:
        ValueError: the shapes do not belong together.
    """
    if moments.dim() != 3 or moments.shape[1:] != (len(modalities), 3) or mean.shape != (len(modalities),):
        raise ValueError(
            f"moments {tuple(moments.shape)} and means {tuple(mean.shape)} of {len(modalities)} modalities: "
            "[ranks, modalities, 3] and [modalities] wanted"
        )
    moments = moments.double()
    present = [index for index in range(len(modalities)) if moments[:, index, 0].sum() > 0]
    return tuple(
        _diagnose(mean[index].item(), std[index].item(), moments, index, rank, modalities) for index in present
    )


def _diagnose(
    mean: float, std: float, moments: Tensor, index: int, rank: int, modalities: Sequence[str]
) -> StatisticsUsed:
    right_mean, right_std = _statistics(moments[:, index].sum(0))
    everywhere = [_statistics(one) for one in moments[:, index] if one[0] > 0]
    means, stds = zip(*everywhere, strict=True)
    candidates: dict[str, tuple[float, float]] = {
        RIGHT: (right_mean, right_std),
        GLOBAL: _statistics(moments.sum((0, 1))),
        LOCAL: _statistics(moments[rank, index]),
        LOCAL_MIXED: _statistics(moments[rank].sum(0)),
        MEAN_OF_RANKS: (sum(means) / len(means), sum(stds) / len(stds)),
    }

    def distance(reduction: str) -> float:
        other_mean, other_std = candidates[reduction]
        if not (other_std > 0 and std > 0 and right_std > 0):
            return abs(mean - other_mean) + abs(std - other_std)
        return abs(mean - other_mean) / right_std + abs(math.log(std / other_std))

    nearest = min(candidates, key=distance)
    reduction = RIGHT if distance(RIGHT) < _TOLERANCE else nearest if distance(nearest) < _TOLERANCE else UNKNOWN
    summed = {GLOBAL: moments[..., 0].sum(0), LOCAL_MIXED: moments[rank, :, 0]}.get(reduction, torch.zeros(0))
    shares = (summed / summed.sum().clamp(min=1)).tolist()
    return StatisticsUsed(
        modality=modalities[index],
        reduction=reduction,
        foreign={modalities[other]: share for other, share in enumerate(shares) if other != index and share > 0},
        mean_off=(mean - right_mean) / right_std if right_std > 0 else math.inf,
        scale_off=std / right_std if right_std > 0 else math.inf,
    )


def _statistics(moments: Tensor) -> tuple[float, float]:
    """Mean and standard deviation; of nothing: no numbers."""
    count, total, squares = moments.tolist()
    if count == 0:
        return math.nan, math.nan
    return total / count, math.sqrt(max(squares / count - (total / count) ** 2, 0.0))
