"""Norms and moments per modality, forward and backward."""

from collections.abc import Callable

import pytest
import torch
from kernel_inputs import DTYPES, close, every_second_column, leaves, random, segments
from torch import Tensor

from mmplan.kernels.segment_moments import segment_moments, segment_moments_reference
from mmplan.kernels.segment_norm import (
    segment_layer_norm,
    segment_layer_norm_reference,
    segment_normalize,
    segment_normalize_reference,
    segment_rms_norm,
    segment_rms_norm_reference,
)

SHAPES = ((0, 8), (1, 1), (5, 63), (3, 64), (3, 65), (2, 1023), (7, 1025))  # around the tile of 1024 elements


def compare(mine: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Results and all gradients, for the same gradient of the result."""
    dtype, runs = inputs[0].dtype, []
    for function in (mine, reference):
        given = leaves(*inputs)
        y = function(*given)
        y.backward(random(*y.shape, seed=7).to(y.dtype))
        runs.append([y, *(item.grad for item in given)])
    assert runs[0][0].dtype == dtype
    close(*runs, dtype, scale=10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d"), SHAPES)
def test_each_token_is_normalised_with_the_parameters_of_its_modality(rows: int, d: int, dtype: torch.dtype) -> None:
    segment, x = segments(rows, modalities=3), random(rows, d, dtype=dtype)
    weights, biases = random(3, d, dtype=dtype, seed=1), random(3, d, seed=2)
    x[segment == -1] = float("nan")  # padding: read by nobody
    compare(
        lambda x, w, b: segment_layer_norm(x, segment, w, b),
        lambda x, w, b: segment_layer_norm_reference(x, segment, w, b),
        *(x, weights, biases),
    )
    compare(
        lambda x, w: segment_rms_norm(x, segment, w),
        lambda x, w: segment_rms_norm_reference(x, segment, w),
        *(x, weights),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("rows", "d"), SHAPES[1:5])
def test_given_statistics_are_applied_and_get_gradients(rows: int, d: int, per_token: bool, dtype: torch.dtype) -> None:
    segment, shape = segments(rows, modalities=3), (rows, 1) if per_token else (3,)
    statistics = random(*shape, seed=3), random(*shape, seed=4).abs() + 0.1
    inputs = random(rows, d, dtype=dtype), *statistics, random(3, d, dtype=dtype, seed=1), random(3, d, seed=2)
    compare(
        lambda x, *others: segment_normalize(x, segment, *others),
        lambda x, *others: segment_normalize_reference(x, segment, *others),
        *inputs,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d"), SHAPES)
def test_moments_of_each_modality_and_their_gradient(rows: int, d: int, dtype: torch.dtype) -> None:
    segment, x = segments(rows, modalities=3), random(rows, d, dtype=dtype)
    for shift in (None, random(3, seed=5)):
        runs = []
        for function in (segment_moments, segment_moments_reference):
            (given,) = leaves(x)
            moments = function(given, segment, 3, shift)
            moments.backward(random(3, 3, seed=6))
            runs.append((moments, given.grad))
        close([runs[0][0]], [runs[1][0]], torch.float32, scale=rows * d)
        close([runs[0][1]], [runs[1][1]], dtype, scale=10)


def test_strides_and_leading_dimensions_do_not_matter() -> None:
    segment, weights = segments(2, 3, modalities=2), every_second_column(random(2, 40, seed=1))
    segment = every_second_column(segment)  # its rows are read at strides, too
    x = every_second_column(random(2, 3, 40))
    for given in (x, random(3, 2, 40).transpose(0, 1)):
        compare(
            lambda x, w: segment_layer_norm(x, segment, w),
            lambda x, w: segment_layer_norm_reference(x, segment, w),
            *(given, weights),
        )
    of_line = every_second_column(segments(6, modalities=2))
    lines = random(6, 40)
    close(
        [segment_moments(lines, of_line, 2), segment_layer_norm(lines, of_line, weights)],
        [segment_moments_reference(lines, of_line, 2), segment_layer_norm_reference(lines, of_line, weights)],
        torch.float32,
        scale=100,
    )


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    (x,) = leaves(random(4, 8))
    y = segment_rms_norm(x, segments(4, modalities=2), random(2, 8))
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
