"""What the operators mean, by hand, without Triton: formulas, padding, what is refused."""

import pytest
import torch

from mmplan.kernels.fp8 import E4M3, E5M2, fp8_dequantize, fp8_quantize
from mmplan.kernels.grouped_projection import Patches, grouped_projection
from mmplan.kernels.masked_norm import masked_squared_norm
from mmplan.kernels.ragged import ragged_gather, ragged_positions, ragged_scatter
from mmplan.kernels.segment_moments import segment_moments, statistics, token_moments
from mmplan.kernels.segment_norm import segment_layer_norm, segment_normalize, segment_rms_norm
from mmplan.kernels.sign_pack import sign_pack, sign_unpack
from mmplan.kernels.top_k import top_k

SEGMENT = torch.tensor([0, 1, 1, -1, 0])
X = torch.ones(5, 3)


def test_one_modality_is_the_layer_norm_of_torch() -> None:
    x, weight, bias = torch.randn(5, 12), torch.randn(12), torch.randn(12)
    found = segment_layer_norm(x, torch.zeros(5, dtype=torch.int64), weight[None], bias[None])
    torch.testing.assert_close(found, torch.nn.functional.layer_norm(x, (12,), weight, bias))
    found = segment_rms_norm(x, torch.zeros(5, dtype=torch.int64), weight[None], eps=1e-6)
    torch.testing.assert_close(found, torch.nn.functional.rms_norm(x, (12,), weight, eps=1e-6))


def test_token_sums_over_a_cut_hidden_size_give_the_uncut_norm() -> None:
    """Two ranks hold 5 and 7 of 12 features; their moments add, their outputs side by side are the norm."""
    x, weights, biases = torch.randn(5, 12, dtype=torch.float64).float() + 3, torch.randn(2, 12), torch.randn(2, 12)
    parts = [slice(0, 5), slice(5, 12)]
    mean, inverse_std = statistics(sum(token_moments(x[:, part]) for part in parts))
    outputs = [
        segment_normalize(x[:, part], SEGMENT, mean, inverse_std, weights[:, part], biases[:, part]) for part in parts
    ]
    expected = segment_layer_norm(x, SEGMENT, weights, biases)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-4, atol=1e-4)


def test_pooled_moments_over_ranks_are_those_of_all_tokens_together() -> None:
    x = torch.randn(5, 12)
    summed = segment_moments(x[:2], SEGMENT[:2], 2) + segment_moments(x[2:], SEGMENT[2:], 2)
    mean, inverse_std = statistics(summed, eps=0.0)
    for modality in (0, 1):
        mine = x[modality == SEGMENT]
        torch.testing.assert_close(mean[modality], mine.mean())
        torch.testing.assert_close(inverse_std[modality], 1 / mine.std(correction=0))


def test_a_shift_keeps_the_variance_of_numbers_far_from_zero() -> None:
    """Mean 4096, standard deviation 1: fp32 squares of 1.7e7 hold no variance of 1; shifted by the mean they do."""
    x = torch.randn(400, 32) + 4096
    segment = torch.zeros(400, dtype=torch.int64)
    exact = 1 / x.double().std(correction=0).item()
    mean, _ = statistics(segment_moments(x, segment, 1))
    again, inverse_std = statistics(segment_moments(x, segment, 1, mean), eps=0.0, shift=mean)
    assert inverse_std.item() == pytest.approx(exact, rel=1e-5)
    assert again.item() == pytest.approx(x.double().mean().item(), rel=1e-7)


def test_a_modality_without_tokens_has_moments_of_zero_and_harmless_statistics() -> None:
    moments = segment_moments(torch.randn(5, 4), SEGMENT, 3)
    assert moments[2].tolist() == [0, 0, 0]
    mean, inverse_std = statistics(moments, eps=0.25)
    assert mean[2] == 0 and inverse_std[2] == 2


def test_padding_gives_zeros_and_takes_part_in_no_gradient() -> None:
    x = torch.randn(5, 4)
    x[3] = float("inf")
    x, weights, biases = x.requires_grad_(), torch.ones(2, 4, requires_grad=True), torch.zeros(2, 4, requires_grad=True)
    y = segment_layer_norm(x, SEGMENT, weights, biases)
    y.square().sum().backward()
    assert y[3].tolist() == [0, 0, 0, 0]
    assert x.grad is not None and x.grad[3].tolist() == [0, 0, 0, 0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in (weights, biases))


def test_error_feedback_loses_nothing_over_steps() -> None:
    """What was decoded over all steps and what is still owed is what was given."""
    given, sent, residual = torch.zeros(300), torch.zeros(300), None
    for step in range(20):
        x = torch.randn(300, generator=torch.Generator().manual_seed(step))
        packed, residual = sign_pack(x, residual)
        given, sent = given + x, sent + sign_unpack(packed, 300)
    assert residual is not None
    torch.testing.assert_close(sent + residual, given, rtol=1e-5, atol=1e-4)
    assert residual.abs().max() < 0.5  # bounded: half a step of a block, however many steps


def test_packed_bytes_are_five_bits_a_number_and_a_scale_per_block() -> None:
    packed, _ = sign_pack(torch.randn(4096))
    assert sum(part.nbytes for part in packed) == 4096 * 5 // 8 + 4096 // 256 * 4
    assert packed.signs.dtype == packed.magnitudes.dtype == torch.uint8


def test_the_error_of_a_code_is_half_a_step() -> None:
    x = torch.randn(4096)
    packed, lost = sign_pack(x)
    assert (lost.view(-1, 256).abs().amax(1) <= packed.scales * 0.5001).all()
    for kind, relative in ((E4M3, 2**-4), (E5M2, 2**-3)):  # half a unit of 3 and of 2 bits
        y = fp8_dequantize(fp8_quantize(x, kind, block=128))
        normal = x.abs() > x.view(-1, 128).abs().amax(1).repeat_interleave(128) * 2**-8
        assert ((y - x).abs() <= relative * x.abs() * 1.0001)[normal].all()


def test_overflow_stays_visible() -> None:
    x = torch.ones(64)
    x[3] = float("inf")
    assert sign_unpack(sign_pack(x, block=32)[0], 64, block=32).isnan().tolist() == [True] * 32 + [False] * 32
    assert fp8_dequantize(fp8_quantize(x, block=32), block=32).isnan().tolist() == [True] * 32 + [False] * 32


def test_patches_are_those_of_a_convolution() -> None:
    image, weight = torch.randn(2, 3, 8, 12), torch.randn(7, 3, 4, 4)
    (y,) = grouped_projection([Patches(image=image, patch=4)], [weight.flatten(1)])
    expected = torch.nn.functional.conv2d(image, weight, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(y, expected)


def test_positions_of_a_padded_batch() -> None:
    assert ragged_positions(torch.tensor([2, 0, 1]), 3).tolist() == [0, 1, 6]
    merged = ragged_scatter([torch.ones(2, 1), torch.full((1, 1), 2.0)], [torch.tensor([0, 3]), torch.tensor([1])], 5)
    assert merged.flatten().tolist() == [1, 2, 0, 1, 0]
    assert ragged_gather(merged, torch.tensor([1, 9, -1])).flatten().tolist() == [2, 0, 0]


def test_a_norm_of_rows_and_one_of_elements_agree() -> None:
    x = torch.randn(5, 4)
    by_row = masked_squared_norm(x, SEGMENT, 2)
    torch.testing.assert_close(by_row, masked_squared_norm(x, SEGMENT[:, None].expand(5, 4), 2))
    torch.testing.assert_close(by_row[0], x[[0, 4]].square().sum())


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("k=3 of 2 elements", lambda: top_k(torch.ones(2), 3)),
        ("k=-1 of 2", lambda: top_k(torch.ones(2), -1)),
        ("block=24 is no power of two", lambda: sign_pack(torch.ones(2), block=24)),
        (r"residual \(3,\) of x \(2,\)", lambda: sign_pack(torch.ones(2), torch.ones(3))),
        ("neither float8_e4m3fn nor", lambda: fp8_quantize(torch.ones(2), torch.float16)),
        ("2 modalities with a segment of torch.bool", lambda: masked_squared_norm(torch.ones(2), torch.ones(2) > 0, 2)),
        (r"segment \(3,\) of torch.int64 is no leading part", lambda: masked_squared_norm(torch.ones(2), SEGMENT[:3])),
        (r"segment \(5,\) .* of tokens \(4, 3\)", lambda: segment_layer_norm(torch.ones(4, 3), SEGMENT, X[:2])),
        (r"\[modalities, 3\] wanted", lambda: segment_rms_norm(torch.ones(5, 3), SEGMENT, torch.ones(2, 4))),
        (r"shift \(3,\) of 2", lambda: segment_moments(torch.ones(5, 3), SEGMENT, 2, torch.ones(3))),
        (
            r"per modality \(2,\) or per token \(5, 1\) wanted",
            lambda: segment_normalize(torch.ones(5, 3), SEGMENT, torch.ones(5), torch.ones(5), torch.ones(2, 3)),
        ),
        ("does not divide into patches of 5", lambda: Patches(image=torch.ones(1, 1, 8, 10), patch=5)),
        (r"weight \(2, 4\) of tokens of width 3", lambda: grouped_projection([torch.ones(1, 3)], [torch.ones(2, 4)])),
        ("1 groups of tokens, 0 weights", lambda: grouped_projection([torch.ones(1, 3)], [])),
        ("parts .* are rows of different kinds", lambda: ragged_scatter([X, X[:, :2]], [SEGMENT, SEGMENT], 4)),
        ("of torch.bool of x", lambda: ragged_gather(X, SEGMENT > 0)),
        ("of torch.float32 of tokens", lambda: segment_layer_norm(X, SEGMENT.float(), X[:2])),
        (r"weights \(0, 3\)", lambda: segment_layer_norm(X, SEGMENT, X[:0])),
        (r"\(0, 0, 0\) of 15 numbers in blocks of 256: \(2, 8, 1\)", lambda: sign_unpack(sign_pack(X[:0])[0], 15)),
        ("1 scales of 32 values in blocks of 16: 2", lambda: fp8_dequantize(fp8_quantize(torch.ones(32)), block=16)),
        (r"positions \(2,\) of a part \(3, 1\)", lambda: ragged_scatter([torch.ones(3, 1)], [SEGMENT[:2]], 4)),
        (r"lengths \[4\] of a batch padded to 3", lambda: ragged_positions(torch.tensor([4]), 3)),
    ],
)  # fmt: skip
def test_a_wrong_call_is_told_what_does_not_fit(message: str, call) -> None:
    with pytest.raises(ValueError, match=message):
        call()
