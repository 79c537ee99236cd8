"""Projections of all modalities in one launch, against one linear layer each; gradients too."""

from collections.abc import Sequence

import pytest
import torch
from kernel_inputs import DTYPES, close, every_second_column, leaves, random
from torch import Tensor

from mmplan.kernels.grouped_projection import Patches, grouped_projection, grouped_projection_reference


def compare(tokens: Sequence[Tensor | Patches], weights: Sequence[Tensor], bias: bool = True) -> None:
    dtype, runs = weights[0].dtype, []
    for function in (grouped_projection, grouped_projection_reference):
        inputs = leaves(*(item.image if isinstance(item, Patches) else item for item in tokens))
        given = [
            Patches(image=x, patch=item.patch) if isinstance(item, Patches) else x
            for x, item in zip(inputs, tokens, strict=True)
        ]
        matrices = leaves(*weights)
        biases = leaves(*(random(len(w), dtype=dtype, seed=8) for w in weights)) if bias else []
        outputs = function(given, matrices, [*biases[:-1], None] if bias else None)  # the last has none
        loss = sum((y.float() * random(*y.shape, seed=9)).sum() for y in outputs)
        assert isinstance(loss, Tensor)
        loss.backward()
        runs.append([*outputs, *(item.grad for item in (*inputs, *matrices, *biases[:-1]))])
    close(*runs, dtype, scale=10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_differ_and_are_odd(dtype: torch.dtype) -> None:
    sizes = ((21, 17, 33), (1, 5, 40), (0, 4, 3), (16, 1, 1))  # tokens, K, N; the interpreter's tile is 16 x 32 x 16
    compare([random(t, k, dtype=dtype) for t, k, _ in sizes], [random(n, k, dtype=dtype, seed=1) for _, k, n in sizes])


@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_that_fill_whole_vectors_and_leading_dimensions(dtype: torch.dtype) -> None:
    tokens = [random(2, 17, 48, dtype=dtype), random(15, 16, dtype=dtype), random(64, dtype=dtype)]
    compare(tokens, [random(32, 48, dtype=dtype, seed=1), random(16, 16, dtype=dtype), random(8, 64, dtype=dtype)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_patches_are_taken_out_of_images_beside_tokens(dtype: torch.dtype) -> None:
    """The image's convolution with stride = kernel, the tokens' linear layer, in one launch."""
    square = random(2, 3, 8, 12, dtype=dtype)
    tokens = [Patches(image=square, patch=4), random(9, 20, dtype=dtype), Patches(image=square[:1, :1], patch=2)]
    weights = [random(17, 48, dtype=dtype, seed=1), random(40, 20, dtype=dtype, seed=2), random(5, 4, dtype=dtype)]
    compare(tokens, weights)
    y, *_ = grouped_projection(tokens, weights)
    # In fp64: torch lets cuDNN multiply fp32 as TF32.
    expected = torch.nn.functional.conv2d(square.double(), weights[0].double().view(17, 3, 4, 4), stride=4)
    close([y.float()], [expected.flatten(2).transpose(1, 2).float()], dtype, scale=10)


@pytest.mark.parametrize(("name", "one", "three"), [("allow_tf32", True, False), ("fp32_precision", "tf32", "ieee")])
def test_torch_may_be_told_of_tf32_in_either_way(name: str, one: object, three: object) -> None:
    x, w = random(5, 6), random(7, 6)
    setattr(torch.backends.cuda.matmul, name, one)
    try:
        (y,) = grouped_projection([x], [w])
    finally:
        setattr(torch.backends.cuda.matmul, name, three)
    close([y], [(x.double() @ w.double().T).float()], torch.float16, scale=10)


def test_channels_last_images_and_transposed_matrices() -> None:
    image = random(2, 8, 12, 3).permute(0, 3, 1, 2)
    tokens = [Patches(image=image, patch=4), random(20, 9).T, every_second_column(random(4, 20))]
    compare(tokens, [random(17, 48, seed=1), random(20, 30).T, random(5, 20)], bias=False)


def test_no_modality_and_mixed_types() -> None:
    assert grouped_projection([], []) == []
    with pytest.raises(ValueError, match="dtypes differ"):
        grouped_projection([random(2, 3)], [random(4, 3, dtype=torch.bfloat16)])


def test_only_the_gradients_that_are_asked_for_are_made() -> None:
    x, (weight,) = random(5, 6), leaves(random(7, 6))
    (y,) = grouped_projection([x], [weight])
    y.sum().backward()
    assert x.grad is None and weight.grad is not None
    close([weight.grad], [x.sum(0).expand(7, 6)], torch.float32, scale=10)
