"""What layers do to whole rows of packed sequences: class tokens, positions, merging, pooling, audio convolutions.

Index tensors are integers, so nothing here makes autograd keep activations, convolutions aside.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor, nn


def periods(rows: int, period: int | None, lengths: Sequence[int]) -> tuple[int, ...]:
    """Lengths of the pieces that start anew: every `period` rows, or each sequence."""
    return tuple(lengths) if period is None else (period,) * (rows // period)


def prepend(x: Tensor, token: Tensor, lengths: Sequence[int]) -> Tensor:
    """`token` [width] in front of each piece; lengths are those of the pieces without it."""
    pieces = [row for piece in torch.split(x, list(lengths)) for row in (token.unsqueeze(0), piece)]
    return torch.cat(pieces) if pieces else x


def drop_first(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Inverse of `prepend`; lengths are those of the pieces with the token."""
    kept = torch.ones(x.shape[0], dtype=torch.bool)
    kept[_starts(lengths)] = False
    return x.index_select(0, kept.nonzero().squeeze(1).to(x.device))


def merge_rows(x: Tensor, lengths: Sequence[int], merge: int) -> Tensor:
    """[rows, width] -> [rows / merge, merge * width] within each sequence; copies only if a remainder is dropped."""
    x = _without_remainders(x, lengths, merge)
    return x.view(x.shape[0] // merge, merge * x.shape[1])


def pool_rows(x: Tensor, lengths: Sequence[int], size: int) -> Tensor:
    """Mean of `size` neighbouring rows within each sequence."""
    x = _without_remainders(x, lengths, size)
    return x.view(x.shape[0] // size, size, x.shape[1]).mean(1)


def multiply(a: Tensor, b: Tensor, groups: int) -> Tensor:
    """a * b; with `groups` b [rows, groups] has one column for each part of a row of a."""
    return (a.view(a.shape[0], groups, -1) * b.unsqueeze(-1)).view(a.shape) if groups else a * b


def row_positions(lengths: Sequence[int], size: int) -> Tensor:
    """Index into a table of `size` rows for each packed row, starting anew with each sequence.

    Raises:
        ValueError: a sequence is longer than the table and not a whole number of tables.
    """
    longer = next((length for length in lengths if length > size and length % size), None)
    if longer is not None:
        raise ValueError(f"a sequence of {longer} tokens does not fit a position table of {size} rows")
    return torch.cat([torch.arange(length) % size for length in (0, *lengths)])


def stretched_positions(lengths: Sequence[int], size: int) -> Tensor:
    """Index into a table of `size` rows for each packed row: the table stretched over each sequence, nearest row."""
    return torch.cat([torch.arange(length) * size // max(1, length) for length in (0, *lengths)])


def take_columns(x: Tensor, start: int, width: int, groups: int) -> Tensor:
    """Columns [start, start + width / groups) of each of `groups` equal parts of a row, copied: [rows, width]."""
    parts = x.view(x.shape[0], groups, x.shape[1] // groups)
    return parts[:, :, start : start + width // groups].contiguous().view(x.shape[0], width)


def join_heads(own: Tensor, shared: Tensor, heads: int) -> Tensor:
    """Each head's part of a row of `own` followed by the row of `shared`."""
    parts = own.view(own.shape[0], heads, own.shape[1] // heads)
    both = torch.cat((parts, shared.unsqueeze(1).expand(-1, heads, -1)), dim=2)
    return both.view(own.shape[0], both.shape[1] * both.shape[2])


@lru_cache(maxsize=8)
def sinusoids(length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Fixed positions [length, width]: sines, then cosines (openai/whisper, `sinusoids`, maximal scale 10000)."""
    half = width // 2
    scale = math.log(10000) / max(1, half - 1)
    angles = torch.outer(torch.arange(length).float(), torch.exp(-scale * torch.arange(half)))
    return torch.cat((angles.sin(), angles.cos(), torch.zeros(length, width - 2 * half)), dim=1).to(device, dtype)


def convolve(x: Tensor, conv: nn.Module, lengths: Sequence[int]) -> Tensor:
    """An `nn.Conv1d` over the frames of each clip: [frames, channels] -> [frames / stride, out_channels], clips packed.

    Neighbouring clips of equal length share one call; lengths are in frames of x.
    """
    blocks: list[Tensor] = []
    first = 0
    for length, run in groupby(lengths):
        count = len(list(run))
        clips = x.narrow(0, first, count * length).view(count, length, x.shape[1]).transpose(1, 2)
        blocks.append(conv(clips).transpose(1, 2).flatten(0, 1))
        first += count * length
    return torch.cat(blocks) if blocks else x.new_zeros(0, conv.get_parameter("weight").shape[0])


def convolve_chunks(x: Tensor, conv: nn.Module, frames: int, inputs: int) -> Tensor:
    """An `nn.Conv2d` over [channels, frames, bins] of each chunk: [chunks * frames, inputs * bins] -> half of both."""
    if x.shape[0] == 0:
        outputs = conv.get_parameter("weight").shape[0]
        return x.new_zeros(0, outputs * -(-(x.shape[1] // inputs) // 2))
    chunks = x.view(-1, frames, inputs, x.shape[1] // inputs).transpose(1, 2)
    result: Tensor = conv(chunks).transpose(1, 2).flatten(2).flatten(0, 1)
    return result


def interleave(parts: Sequence[Tensor], keys: Sequence[str], positions: Mapping[str, Tensor]) -> Tensor:
    """Row i of a part goes to row positions[key][i] of the packed sequence; every row is written once."""
    order = torch.cat([positions[key] for key in keys]).argsort()  # gathering keeps indices only, scattering rows too
    rows = torch.cat(list(parts))
    return rows.index_select(0, order.to(rows.device))


def with_zero_row(x: Tensor) -> Tensor:
    """x and a last row of zeros, for indices that point nowhere."""
    return torch.cat((x, x.new_zeros(1, x.shape[1])))


def add_rows(a: Tensor, b: Tensor, positions: Tensor) -> Tensor:
    """a with row i of b added to row positions[i]; unlike `index_add` this keeps no copy of b for the backward."""
    sources = torch.full((a.shape[0],), b.shape[0], device=a.device)
    sources[positions.to(a.device)] = torch.arange(b.shape[0], device=a.device)
    return a + with_zero_row(b).index_select(0, sources)


def _starts(lengths: Sequence[int]) -> list[int]:
    starts, row = [], 0
    for length in lengths:
        starts.append(row)
        row += length
    return starts


def _without_remainders(x: Tensor, lengths: Sequence[int], size: int) -> Tensor:
    if all(length % size == 0 for length in lengths):
        return x
    runs = zip(_starts(lengths), lengths, strict=True)
    kept = [torch.arange(start, start + length // size * size) for start, length in runs]
    return x.index_select(0, torch.cat(kept).to(x.device))
