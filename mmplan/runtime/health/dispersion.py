"""Joint embedding dispersion (JED): how much of the embeddings' energy tells samples apart.

With z = [z_image; z_text] over a batch of n pairs,

    JED = tr Cov(z) / (mean ||z_image||^2 + mean ||z_text||^2),   Cov with 1/n,

which lies between 0 and 1 and equals 1 - (||mean z_image||^2 + ||mean z_text||^2) / (the same denominator). It is 0
where all samples have one embedding. An article calls JED < 0.15 healthy; with this normalisation that is refuted: for
unit vectors it asks for a mean cosine above 0.85 between *unlike* samples, a collapsed space, and a model with perfect
retrieval has JED near 1 (a test shows both). So the monitor fires *below* 0.15; `attach(fires={"jed": "above"})` gives
the article's direction. (With sums instead of means in the denominator JED shrinks as 1/n and judges the batch size.)
"""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from mmplan.runtime.health.rule import Rule

RULE = Rule(
    monitor="jed",
    metric="tr Cov([z_image; z_text]) / (mean ||z_image||^2 + mean ||z_text||^2), covariance with 1/n; of the last "
    "readings that have 8 samples together",
    unit="fraction of energy",
    limit=0.15,
    fires="below",
    source="the number is reported in an article, which calls values below it healthy; the direction is ours, because "
    "below it unlike samples have cosines above 0.85",
    advice="the embeddings have collapsed: raise the batch or the temperature of the contrastive loss, check that the "
    "projector still gets gradients, look for a bias that outgrows the rest",
    certainty=0.8,
    explains=("cmrc", "attention_collapse", "robustness", "drift", "gradient_attenuation", "loss"),
    patience=3,
)


LEAST_SAMPLES = 8  # of a reading, or pooled over the last ones


class Moments(NamedTuple):
    """Sums over samples, which add up over ranks: of vectors [d], of squared norms, and the count (both [])."""

    total: Tensor
    squares: Tensor
    samples: Tensor


def moments(embeddings: Tensor) -> Moments:
    """Of embeddings [n, d]."""
    values = embeddings.double()
    count = torch.tensor(float(len(values)), dtype=torch.float64, device=values.device)
    return Moments(values.sum(0), values.square().sum(), count)


class PooledDispersion:
    """JED of a reading, or of the last readings that have enough samples together: of one sample it is 0, and two are
    often alike by chance."""

    def __init__(self) -> None:
        self._last: deque[tuple[Moments, Moments]] = deque()

    def update(self, images: Moments, texts: Moments) -> float | None:
        """None before there are enough samples."""
        self._last.append((images, texts))
        while self._samples - float(self._last[0][0].samples) >= LEAST_SAMPLES:
            self._last.popleft()
        if self._samples < LEAST_SAMPLES:
            return None
        pooled = (Moments(*(sum(parts[1:], parts[0]) for parts in zip(*side))) for side in zip(*self._last))  # noqa: B905
        return joint_dispersion(*pooled)

    @property
    def _samples(self) -> float:
        return sum(float(images.samples) for images, _ in self._last)


def joint_dispersion(images: Moments, texts: Moments) -> float:
    """JED of the samples that the moments are of."""
    energy = scatter = 0.0
    for part in (images, texts):
        mean_square = float(part.squares / part.samples)
        energy += mean_square
        scatter += mean_square - float((part.total / part.samples).square().sum())
    return scatter / energy if energy > 0 else 0.0
