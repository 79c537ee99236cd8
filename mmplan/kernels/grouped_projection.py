"""Patch embedding and token projection of all modalities in one launch: a grouped matrix product with persistent tiles,
K and N different for each modality (X6)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True, kw_only=True, slots=True)
class Patches:
    """The tokens of an image [batch, channels, height, width], one per patch x patch square, row by row: what a
    convolution with stride = kernel reads. They are taken by strides, never copied."""

    image: Tensor
    patch: int

    def __post_init__(self) -> None:
        if self.image.dim() != 4 or self.patch < 1 or any(side % self.patch for side in self.image.shape[2:]):
            raise ValueError(f"image {tuple(self.image.shape)} does not divide into patches of {self.patch}")

    def tokens(self) -> Tensor:
        """[batch, patches, channels * patch * patch], in the order of a convolution's weight."""
        b, c, h, w = self.image.shape
        p = self.patch
        split = self.image.reshape(b, c, h // p, p, w // p, p)
        return split.permute(0, 2, 4, 1, 3, 5).reshape(b, (h // p) * (w // p), c * p * p)


def grouped_projection(
    tokens: Sequence[Tensor | Patches], weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """tokens[i] @ weights[i].T + biases[i] for each modality i, as so many linear layers.

    tokens[i] [..., K_i] or `Patches`, weights[i] [N_i, K_i] (a convolution's weight flattened to that), biases[i] [N_i]
    or None; all of one dtype on one device. Gives [..., N_i]. Differentiable in all of them.
    """
    groups = _checked(tokens, weights, biases)
    return grouped_projection_reference(*groups)


def grouped_projection_reference(
    tokens: Sequence[Tensor | Patches], weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    dense = [item.tokens() if isinstance(item, Patches) else item for item in tokens]
    return [linear(x, w, b) for x, w, b in zip(dense, weights, biases or [None] * len(dense), strict=True)]


def _checked(
    tokens: Sequence[Tensor | Patches], weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None
) -> tuple[Sequence[Tensor | Patches], Sequence[Tensor], Sequence[Tensor | None]]:
    biases = [None] * len(weights) if biases is None else biases
    if not len(tokens) == len(weights) == len(biases):
        raise ValueError(f"{len(tokens)} groups of tokens, {len(weights)} weights, {len(biases)} biases")
    for x, weight, bias in zip(tokens, weights, biases, strict=True):
        width = x.image.shape[1] * x.patch**2 if isinstance(x, Patches) else x.shape[-1]
        if weight.dim() != 2 or weight.shape[1] != width:
            raise ValueError(f"weight {tuple(weight.shape)} of tokens of width {width}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias {tuple(bias.shape)} beside weight {tuple(weight.shape)}")
    return tokens, weights, biases
