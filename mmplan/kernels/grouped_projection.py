"""Patch embedding and token projection of all modalities in one launch: a grouped matrix product with persistent tiles,
K and N different for each modality."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from mmplan.kernels.dispatch import uses_triton
from mmplan.kernels.grouped_product import Operand, Product, grouped_product


@dataclass(frozen=True, kw_only=True, slots=True)
class Patches:
    """The tokens of an image [batch, channels, height, width], one per patch x patch square, row by row: what a
    convolution with stride = kernel reads. They are taken by strides, never copied."""

    image: Tensor
    patch: int

    def __post_init__(self) -> None:
        if self.image.dim() != 4 or self.patch < 1 or any(side % self.patch for side in self.image.shape[2:]):
            raise ValueError(f"image {tuple(self.image.shape)} does not divide into patches of {self.patch}")

    @property
    def length(self) -> int:
        """Patches of one image."""
        return self.image.shape[2] // self.patch * (self.image.shape[3] // self.patch)

    def tokens(self) -> Tensor:
        """[batch, patches, channels * patch * patch], in the order of a convolution's weight."""
        b, c, h, w = self.image.shape
        p = self.patch
        split = self.image.reshape(b, c, h // p, p, w // p, p)
        return split.permute(0, 2, 4, 1, 3, 5).reshape(b, self.length, c * p * p)


def grouped_projection(
    tokens: Sequence[Tensor | Patches], weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """tokens[i] @ weights[i].T + biases[i] for each modality i, as so many linear layers.

    tokens[i] [..., K_i] or `Patches`, weights[i] [N_i, K_i] (a convolution's weight flattened to that), biases[i] [N_i]
    or None; all of one dtype on one device. Gives [..., N_i]. Differentiable in all of them.
    """
    biases = [None] * len(weights) if biases is None else biases
    _check(tokens, weights, biases)
    given = [
        *(x.image if isinstance(x, Patches) else x for x in tokens),
        *weights,
        *(b for b in biases if b is not None),
    ]
    if not given or not uses_triton(*given) or not _multiplied_by_kernel(given[0]):
        return grouped_projection_reference(tokens, weights, biases)
    if len({item.dtype for item in given}) > 1:
        raise ValueError(f"dtypes differ: {sorted({str(item.dtype) for item in given})}")
    patches = [x.patch if isinstance(x, Patches) else 0 for x in tokens]
    shapes = [(x.image.shape[0], x.length) if isinstance(x, Patches) else x.shape[:-1] for x in tokens]
    inputs = [x.image if isinstance(x, Patches) else x.reshape(x.shape[:-1].numel(), x.shape[-1]) for x in tokens]
    outputs = _Projection.apply(patches, *inputs, *weights, *biases)  # type: ignore[no-untyped-call]
    return [y.view(*shape, y.shape[-1]) for y, shape in zip(outputs, shapes, strict=True)]


def grouped_projection_reference(
    tokens: Sequence[Tensor | Patches], weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    dense = [item.tokens() if isinstance(item, Patches) else item for item in tokens]
    return [linear(x, w, b) for x, w, b in zip(dense, weights, biases or [None] * len(dense), strict=True)]


class _Projection(torch.autograd.Function):
    """Its arguments are the inputs, the weights and the biases of all groups, one after the other."""

    @staticmethod
    def forward(ctx: Any, patches: list[int], *given: Tensor | None) -> tuple[Tensor, ...]:
        groups = len(patches)
        inputs, weights, biases = given[:groups], given[groups : 2 * groups], given[2 * groups :]
        products, outputs = [], []
        for x, weight, bias, patch in zip(inputs, weights, biases, patches, strict=True):
            assert x is not None and weight is not None
            tokens = _operand(x, patch)
            y = x.new_empty(tokens.rows, len(weight))
            products.append(Product(a=tokens, b=Operand.of(weight).transposed(), c=y, bias=bias))
            outputs.append(y)
        grouped_product(products)
        ctx.save_for_backward(*inputs, *weights)
        ctx.patches, ctx.bias_dtypes = patches, [None if bias is None else bias.dtype for bias in biases]
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        """One launch for the inputs' gradients dy @ w, one for the weights' dy.T @ x; only what is asked for."""
        groups, saved, wanted = len(ctx.patches), ctx.saved_tensors, ctx.needs_input_grad[1:]
        inputs, weights = saved[:groups], saved[groups:]
        gradients: list[Tensor | None] = [None] * len(wanted)
        of_inputs, of_weights = [], []
        for i, (x, weight, dy, patch) in enumerate(zip(inputs, weights, dys, ctx.patches, strict=True)):
            if wanted[i]:
                gradients[i] = dx = x.new_empty(len(dy), weight.shape[1])
                of_inputs.append(Product(a=Operand.of(dy), b=Operand.of(weight), c=dx))
            if wanted[groups + i]:
                gradients[groups + i] = dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
                of_weights.append(Product(a=_operand(x, patch).transposed(), b=Operand.of(dy), c=dw.T))
            if wanted[2 * groups + i]:
                gradients[2 * groups + i] = dy.float().sum(0).to(ctx.bias_dtypes[i])
        grouped_product(of_inputs)
        grouped_product(of_weights)
        for i, (x, patch) in enumerate(zip(inputs, ctx.patches, strict=True)):
            dx_or_none = gradients[i]
            if patch and dx_or_none is not None:
                gradients[i] = _image_of(dx_or_none, x.shape, patch)
        return None, *gradients


def _multiplied_by_kernel(x: Tensor) -> bool:
    """Other types, and those that autocast is to choose, are the reference's."""
    return x.dtype in (torch.float32, torch.float16, torch.bfloat16) and not torch.is_autocast_enabled(x.device.type)


def _operand(x: Tensor, patch: int) -> Operand:
    return Operand.of_patches(x, patch) if patch else Operand.of(x)


def _image_of(tokens: Tensor, shape: torch.Size, patch: int) -> Tensor:
    """The inverse of `Patches.tokens`: patches do not overlap, so each number goes to one place."""
    b, c, h, w = shape
    split = tokens.view(b, h // patch, w // patch, c, patch, patch)
    return split.permute(0, 3, 1, 4, 2, 5).reshape(shape)


def _check(tokens: Sequence[Tensor | Patches], weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    if not len(tokens) == len(weights) == len(biases):
        raise ValueError(f"{len(tokens)} groups of tokens, {len(weights)} weights, {len(biases)} biases")
    for x, weight, bias in zip(tokens, weights, biases, strict=True):
        width = x.image.shape[1] * x.patch**2 if isinstance(x, Patches) else x.shape[-1]
        if weight.dim() != 2 or weight.shape[1] != width:
            raise ValueError(f"weight {tuple(weight.shape)} of tokens of width {width}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias {tuple(bias.shape)} beside weight {tuple(weight.shape)}")
