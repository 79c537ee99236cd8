"""Perturbation robustness: how far the text output moves when the image embeddings are shaken a little."""

import torch
from torch import Tensor
from torch.nn import functional

from mmplan.runtime.health.placed import local, placed_like
from mmplan.runtime.health.rule import Rule

NOISE_VARIANCE = 0.01  # N(0, 0.01 I), as reported: an absolute size, so embeddings should be of order one

RULE = Rule(
    monitor="robustness",
    metric="KL divergence of the text output with N(0, 0.01 I) added to the image embeddings, mean over positions",
    unit="nat",
    limit=0.03,
    fires="above",
    source="reported in an article on multimodal parallel training",
    advice="regularise the projector (weight decay, smaller learning rate, noise during training); compare the norm of "
    "the embeddings with that of the noise, 0.1 per coordinate",
    certainty=0.6,
    explains=("loss",),
    patience=2,
)


def perturbed(embeddings: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """The embeddings with noise of variance 0.01 in each coordinate."""
    own = local(embeddings)
    noise = torch.randn(own.shape, generator=generator, device=own.device, dtype=torch.float32)
    shaken: Tensor = own + (NOISE_VARIANCE**0.5 * noise).to(own.dtype)
    return placed_like(shaken, embeddings)


def output_divergence(clean: Tensor, shaken: Tensor) -> Tensor:
    """KL(clean || shaken) of the distributions that these logits [..., vocabulary] stand for, mean over positions."""
    first, second = functional.log_softmax(clean.float(), -1), functional.log_softmax(shaken.float(), -1)
    found: Tensor = (first.exp() * (first - second)).sum(-1).mean()
    return found
