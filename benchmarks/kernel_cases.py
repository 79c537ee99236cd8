"""One case per kernel and direction, of a size that training has: what is run, and the bytes and operations it needs.

`moved_bytes` are what any implementation has to move: each input read once, each output written once. `flops` count
only where arithmetic is what limits. With few tokens the same specialisations serve to compile, and to try the
benchmark on a CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmplan.kernels.fp8 import fp8_dequantize, fp8_dequantize_reference, fp8_quantize, fp8_quantize_reference
from mmplan.kernels.grouped_projection import Patches, grouped_projection, grouped_projection_reference
from mmplan.kernels.masked_norm import masked_squared_norm, masked_squared_norm_reference
from mmplan.kernels.ragged import ragged_gather, ragged_gather_reference, ragged_scatter, ragged_scatter_reference
from mmplan.kernels.segment_moments import segment_moments, segment_moments_reference
from mmplan.kernels.segment_norm import (
    segment_layer_norm,
    segment_layer_norm_reference,
    segment_normalize,
    segment_normalize_reference,
    segment_rms_norm,
    segment_rms_norm_reference,
)
from mmplan.kernels.sign_pack import sign_pack, sign_pack_reference, sign_unpack, sign_unpack_reference
from mmplan.kernels.top_k import top_k, top_k_reference

Run = Callable[[], Any]
MODALITIES = 3
TOKENS = 16384  # of a batch on one device
WIDTH = 4096  # hidden size of a 7 B language model
DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """`prepare(function, device)` makes inputs of its own and gives a call of the function on them."""

    operator: str
    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    prepare: Callable[[Callable[..., Any], torch.device], Run]
    moved_bytes: int
    flops: int = 0


def cases(tokens: int = TOKENS) -> list[Case]:
    return [*projections(tokens), *norms(tokens), *_compression(tokens), *_rows(tokens)]


def projections(tokens: int, dtype: torch.dtype = DTYPE) -> list[Case]:
    """A vision tower's patch embedding (ViT-L/14 at 336 pixels: 576 patches of 588 numbers), an audio frame projection
    and a text projection, in one launch; and two without images, whose loads are all of 16 bytes."""
    images, frames = max(1, tokens // 576), tokens // 4
    shapes = ((images * 576, 588, 1024), (frames, 1280, WIDTH), (tokens, WIDTH, WIDTH))
    dense = shapes[1:]

    def mixed(function: Callable[..., Any], device: torch.device, backward: bool) -> Run:
        image = Patches(image=_random(device, images, 3, 336, 336, dtype=dtype), patch=14)
        given = [image, *(_random(device, t, k, grad=backward, dtype=dtype) for t, k, _ in dense)]
        return _projection(function, device, given, shapes, backward)

    def only_dense(function: Callable[..., Any], device: torch.device, backward: bool) -> Run:
        given = [_random(device, t, k, grad=backward, dtype=dtype) for t, k, _ in dense]
        return _projection(function, device, given, dense, backward)

    found = []
    for name, prepare, sizes in (("patches, frames, tokens", mixed, shapes), ("frames, tokens", only_dense, dense)):
        products = [2 * t * k * n for t, k, n in sizes]
        moved = sum(dtype.itemsize * (t * k + k * n + t * n) for t, k, n in sizes)
        inputs = sum(products[-2:])  # the image wants no gradient
        for direction, flops in (("forward", sum(products)), ("backward", sum(products) + inputs)):
            function = partial(prepare, backward=direction == "backward")
            case = Case(
                operator="grouped_projection",
                name=f"{direction}: {name}" if dtype == DTYPE else f"{direction}, fp32: {name}",
                function=grouped_projection,
                reference=grouped_projection_reference,
                prepare=function,
                moved_bytes=moved if direction == "forward" else 2 * moved,
                flops=flops,
            )
            found.append(case)
    return found


def _projection(
    function: Callable[..., Any],
    device: torch.device,
    given: Sequence[Tensor | Patches],
    shapes: Sequence[tuple[int, int, int]],
    backward: bool,
) -> Run:
    dtype = next(x.dtype for x in given if isinstance(x, Tensor))
    weights = [_random(device, n, k, grad=backward, dtype=dtype) for _, k, n in shapes]
    if not backward:
        return partial(function, given, weights)
    leaves = [*weights, *(x for x in given if isinstance(x, Tensor))]
    outputs = function(given, weights)
    return _gradients(outputs, leaves, [torch.randn_like(y) for y in outputs])


def norms(tokens: int, width: int = WIDTH) -> list[Case]:
    numbers = tokens * width

    def norm(function: Callable[..., Any], device: torch.device, others: int, backward: bool) -> Run:
        x, segment = _random(device, tokens, width, grad=backward), _segment(device, tokens)
        parameters = [_random(device, MODALITIES, width, grad=backward) for _ in range(others)]
        if not backward:
            return partial(function, x, segment, *parameters)
        y = function(x, segment, *parameters)
        return _gradients([y], [x, *parameters], [torch.randn_like(y)])

    def given(function: Callable[..., Any], device: torch.device, backward: bool) -> Run:
        x, segment = _random(device, tokens, width, grad=backward), _segment(device, tokens)
        statistics = [torch.rand(MODALITIES, device=device).requires_grad_(backward) for _ in range(2)]
        parameters = [*statistics, *(_random(device, MODALITIES, width, grad=backward) for _ in range(2))]
        if not backward:
            return partial(function, x, segment, *parameters)
        y = function(x, segment, *parameters)
        return _gradients([y], [x, *parameters], [torch.randn_like(y)])

    def moments(function: Callable[..., Any], device: torch.device) -> Run:
        return partial(function, _random(device, tokens, width), _segment(device, tokens), MODALITIES)

    table: tuple[tuple[str, Callable[..., Any], Callable[..., Any], Callable[..., Run]], ...] = (
        ("layer norm", segment_layer_norm, segment_layer_norm_reference, partial(norm, others=2)),
        ("rms norm", segment_rms_norm, segment_rms_norm_reference, partial(norm, others=1)),
        ("given statistics", segment_normalize, segment_normalize_reference, given),
    )
    found = []
    for name, function, reference, prepare in table:
        for direction, passes in (("forward", 2), ("backward", 3)):
            case = Case(
                operator="segment_norm",
                name=f"{direction}: {name}" if width == WIDTH else f"{direction}, {width} wide: {name}",
                function=function,
                reference=reference,
                prepare=partial(prepare, backward=direction == "backward"),
                moved_bytes=passes * 2 * numbers,
            )
            found.append(case)
    case = Case(
        operator="segment_moments",
        name="forward",
        function=segment_moments,
        reference=segment_moments_reference,
        prepare=moments,
        moved_bytes=2 * numbers,
    )
    return [*found, case]


def _compression(tokens: int) -> list[Case]:
    """Of a gradient of 16,384 x 4,096 elements."""
    n = tokens * WIDTH

    def of_gradient(function: Callable[..., Any], device: torch.device, *others: Any) -> Run:
        return partial(function, _random(device, n), *others)

    def of_elements(function: Callable[..., Any], device: torch.device, **options: Any) -> Run:
        return partial(function, _random(device, n), _segment(device, n), MODALITIES, **options)

    def with_residual(function: Callable[..., Any], device: torch.device) -> Run:
        return partial(function, _random(device, n), _random(device, n).float())

    def unpack(function: Callable[..., Any], device: torch.device) -> Run:
        return partial(function, sign_pack_reference(_random(device, n))[0], n, dtype=DTYPE)

    def dequantize(function: Callable[..., Any], device: torch.device) -> Run:
        return partial(function, fp8_quantize_reference(_random(device, n)), dtype=DTYPE)

    def norm(function: Callable[..., Any], device: torch.device) -> Run:
        return partial(function, _random(device, tokens, WIDTH), _segment(device, tokens), MODALITIES)

    k, packed = n // 20, n * 5 // 8 + n // 64
    table: tuple[tuple[str, str, Callable[..., Any], Callable[..., Any], Callable[..., Run], int], ...] = (
        ("masked_norm", "by token", masked_squared_norm, masked_squared_norm_reference, norm, 2 * n),
        ("masked_norm", "by element", masked_squared_norm, masked_squared_norm_reference, of_elements, 10 * n),
        ("top_k", "5 %", top_k, top_k_reference, lambda f, device: of_gradient(f, device, k), 2 * n + 10 * k),
        ("sign_pack", "pack, with residual", sign_pack, sign_pack_reference, with_residual, 10 * n + packed),
        ("sign_pack", "unpack", sign_unpack, sign_unpack_reference, unpack, 2 * n + packed),
        ("fp8", "quantise", fp8_quantize, fp8_quantize_reference, of_gradient, 3 * n + n // 32),
        ("fp8", "dequantise", fp8_dequantize, fp8_dequantize_reference, dequantize, 3 * n + n // 32),
    )
    return [
        Case(operator=operator, name=name, function=mine, reference=reference, prepare=prepare, moved_bytes=moved)
        for operator, name, mine, reference, prepare, moved in table
    ]


def _rows(tokens: int) -> list[Case]:
    """Vision tokens among text tokens: a quarter of the sequence is images'."""
    vision = tokens // 4

    def places(device: torch.device) -> list[Tensor]:
        order = torch.arange(tokens, device=device)
        return [order[:vision], order[vision:]]

    def gather(function: Callable[..., Any], device: torch.device) -> Run:
        return partial(function, _random(device, tokens, WIDTH), places(device)[1])

    def gather_backward(function: Callable[..., Any], device: torch.device) -> Run:
        x = _random(device, tokens, WIDTH, grad=True)
        y = function(x, places(device)[1])
        return _gradients([y], [x], [torch.randn_like(y)])

    def scatter(function: Callable[..., Any], device: torch.device) -> Run:
        parts = [_random(device, vision, WIDTH), _random(device, tokens - vision, WIDTH)]
        return partial(function, parts, places(device), tokens)

    def scatter_backward(function: Callable[..., Any], device: torch.device) -> Run:
        parts = [_random(device, vision, WIDTH, grad=True), _random(device, tokens - vision, WIDTH, grad=True)]
        y = function(parts, places(device), tokens)
        return _gradients([y], parts, [torch.randn_like(y)])

    row_bytes = 2 * WIDTH
    table: tuple[tuple[str, Callable[..., Any], Callable[..., Any], Callable[..., Run], int], ...] = (
        ("forward: gather", ragged_gather, ragged_gather_reference, gather, 2 * (tokens - vision)),
        ("backward: gather", ragged_gather, ragged_gather_reference, gather_backward, 2 * tokens - vision),
        ("forward: scatter", ragged_scatter, ragged_scatter_reference, scatter, 2 * tokens),
        ("backward: scatter", ragged_scatter, ragged_scatter_reference, scatter_backward, 2 * tokens),
    )
    return [
        Case(
            operator="ragged",
            name=name,
            function=mine,
            reference=reference,
            prepare=prepare,
            moved_bytes=rows * row_bytes,
        )
        for name, mine, reference, prepare, rows in table
    ]


def _random(device: torch.device, *shape: int, grad: bool = False, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device).requires_grad_(grad)


def _segment(device: torch.device, n: int) -> Tensor:
    """Runs of tokens of one modality, as images and sentences come."""
    return torch.arange(n, device=device) // 577 % MODALITIES


def _gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> Run:
    return partial(torch.autograd.grad, outputs, leaves, gradients, retain_graph=True)
