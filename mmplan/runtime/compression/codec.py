"""A gradient as bytes and back. What is lost on the way is given too: the next step sends it (error feedback)."""

import torch
from torch import Tensor

from mmplan.cost_models.compressed_bytes import GradientFormat, index_bytes
from mmplan.kernels.fp8 import E4M3, Fp8Blocks, fp8_dequantize, fp8_quantize
from mmplan.kernels.sign_pack import SignPacked, sign_pack, sign_unpack
from mmplan.kernels.top_k import top_k
from mmplan.runtime.compression.indices import pack_indices, unpack_indices


def encode(flat: Tensor, form: GradientFormat) -> tuple[Tensor, Tensor]:
    """fp32 [n] -> its message, uint8 [form.wire_bytes(n)], and what it leaves out, fp32 [n]."""
    if form.dense(flat.numel()):
        return flat.view(torch.uint8), torch.zeros_like(flat)
    values, indices = top_k(flat, form.kept(flat.numel()))
    coded, lost = _encode_values(values, form)
    residual = flat.clone()
    residual[indices] = lost
    return torch.cat((pack_indices(indices, flat.numel()), coded)), residual


def add_decoded(message: Tensor, total: Tensor, form: GradientFormat) -> None:
    """Add what a message says to fp32 [n]. Each element is said once, so the sum is the same in every run."""
    elements = total.numel()
    if form.dense(elements):
        total += message.clone().view(torch.float32)
        return
    kept = form.kept(elements)
    split = index_bytes(elements, kept)
    indices = unpack_indices(message[:split], elements, kept)
    total[indices] += _decode_values(message[split:], kept, form)


def _encode_values(values: Tensor, form: GradientFormat) -> tuple[Tensor, Tensor]:
    if form.values == "sign4":
        packed, lost = sign_pack(values, block=form.block)
        return torch.cat((packed.signs, packed.magnitudes, packed.scales.view(torch.uint8))), lost
    quantized = fp8_quantize(values, E4M3, block=form.block)
    lost = values - fp8_dequantize(quantized, block=form.block)
    return torch.cat((quantized.values.view(torch.uint8), quantized.scales.view(torch.uint8))), lost


def _decode_values(data: Tensor, kept: int, form: GradientFormat) -> Tensor:
    scales = -(-kept // form.block) * 4
    numbers, steps = data[:-scales], data[-scales:].clone().view(torch.float32)  # cloned: fp32 begins at four bytes
    if form.values == "sign4":
        signs = -(-kept // 8)
        return sign_unpack(SignPacked(numbers[:signs], numbers[signs:], steps), kept, block=form.block)
    return fp8_dequantize(Fp8Blocks(numbers.clone().view(E4M3), steps), block=form.block)
