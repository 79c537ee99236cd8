"""Indices of the elements that are sent, in bytes: a bit for each element, or two bytes for each that is sent."""

import torch
from torch import Tensor

from mmplan.cost_models.compressed_bytes import SEGMENT, as_bitmap, bitmap_bytes, offset_bytes
from mmplan.kernels.sign_pack import pack_fields, unpack_fields


def pack_indices(indices: Tensor, elements: int) -> Tensor:
    """Ascending indices int64 [kept] into so many elements -> uint8 [index_bytes]; nothing where all are kept."""
    kept = indices.numel()
    if kept == elements:
        return indices.new_empty(0, dtype=torch.uint8)
    if as_bitmap(elements, kept):
        sent = torch.zeros(elements, dtype=torch.uint8, device=indices.device)
        sent[indices] = 1
        return pack_fields(sent, 1)
    counts = torch.bincount(indices // SEGMENT, minlength=-(-elements // SEGMENT))
    places = (indices % SEGMENT).to(torch.int16)  # wraps above 32767, and back in `unpack_indices`
    return torch.cat((counts.to(torch.int32).view(torch.uint8), places.view(torch.uint8)))


def unpack_indices(data: Tensor, elements: int, kept: int) -> Tensor:
    """The way back of `pack_indices`."""
    if kept == elements:
        return torch.arange(elements, device=data.device)
    if as_bitmap(elements, kept):
        assert data.numel() == bitmap_bytes(elements)
        return unpack_fields(data, 1)[:elements].nonzero().squeeze(1)
    split = offset_bytes(elements, 0)
    counts = data[:split].clone().view(torch.int32).long()
    places = data[split:].clone().view(torch.int16).long() % SEGMENT
    segments = torch.arange(counts.numel(), device=data.device)
    return segments.repeat_interleave(counts, output_size=kept) * SEGMENT + places
