"""Blocks of a user's own that two context-parallel ranks try to run on their rows, and the code of these ranks."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case_processes import meeting
from torch import Tensor, nn

from mmplan.errors import InputError
from mmplan.runtime.ghost.own_rows import RowRanks, cut
from mmplan.runtime.ghost.recording import Recorder
from mmplan.runtime.ghost.row_trials import RowWays
from mmplan.runtime.ghost.units import find_units
from mmplan.runtime.ghost.weightless import build_weightless
from mmplan.runtime.row_heads import to_heads, to_rows
from mmplan.runtime.tensor_sums import Peers, TensorRanks
from mmplan.scenario.technique import ContextParallel

WIDTH, ROWS = 12, 7  # rows that do not divide into chunks
RANKS = 2


class Attends(nn.Module):
    """A block of an attention of two heads, and what `mixed` adds."""

    def __init__(self, mixed: Callable[[nn.Module, Tensor], Tensor], more: nn.Module | None = None) -> None:
        super().__init__()
        self.project, self.back, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mixed
        self.more = nn.Identity() if more is None else more

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.view(*x.shape[:2], 2, -1).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return x + self.back(attended.transpose(1, 2).flatten(2)) + self.mixed(self.more, x)


class AttendsByHand(Attends):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.back(x) @ x.transpose(1, 2)
        return x + scores.softmax(-1) @ x


class AttendsUnderItsOwnMask(Attends):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        own = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return super().forward(x, own)


class Model(nn.Module):
    def __init__(self, block: nn.Module, *, masked: bool) -> None:
        super().__init__()
        self.table, self.blocks, self.masked = nn.Embedding(20, WIDTH), nn.ModuleList([block]), masked

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril() if self.masked else None
        for block in self.blocks:
            x = block(x, mask)
        return x.square().mean()


def nothing(more: nn.Module, x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def applied(more: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = more(x)
    return result


def convolved(more: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = more(x.transpose(1, 2))
    return result.transpose(1, 2)


def counted(more: nn.Module, x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[1], device=x.device)
    return x * positions.unsqueeze(1)


def pooled(more: nn.Module, x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def dropped(more: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


RUN = ("causal", "masked", "pointwise")
WAYS: tuple[tuple[str, ContextParallel], ...] = (*((name, "all-to-all") for name in RUN), ("masked", "gather"))
BLOCKS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "causal": (lambda: Attends(nothing), False),
    "masked": (lambda: Attends(nothing), True),
    "pointwise": (lambda: Attends(applied, nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))), True),
    "convolution": (lambda: Attends(convolved, nn.Conv1d(WIDTH, WIDTH, 3, padding=1)), False),
    "positions": (lambda: Attends(counted), False),
    "mean": (lambda: Attends(pooled), False),
    "by hand": (lambda: AttendsByHand(nothing), False),
    "own mask": (lambda: AttendsUnderItsOwnMask(nothing), False),
    "dropout": (lambda: Attends(dropped), False),
}


def tried(build: Callable[[], nn.Module], ranks: RowRanks) -> str:
    """Why the block is refused; empty where it is not."""
    model = build_weightless(build)
    recorder = Recorder(model, find_units(model))
    recorder.cut = frozenset({"blocks.0"})
    recording = recorder.record({"ids": torch.arange(2 * ROWS).view(2, ROWS)})
    try:
        RowWays(recorder, ranks, torch.device("cpu")).look(recording.calls)
    except InputError as error:
        return str(error)
    return ""


def exchanged(ranks: RowRanks) -> str:
    """What is wrong with rows that were exchanged for heads and back."""
    whole, own = torch.arange(2.0 * 4 * ROWS * 3).view(2, 4, ROWS, 3), ranks.own(ROWS)
    rows = cut(whole, (-2,), own)
    (heads,) = to_heads((rows,), own, ranks.ranks, ranks.peers)
    if not heads.equal(whole[:, 2 * ranks.peers.index :][:, :2]):
        return f"heads are {heads}"
    moved = ranks.ranks.total_bytes
    back = to_rows(heads, own, ranks.ranks, ranks.peers)
    if ranks.ranks.total_bytes - moved != rows.nbytes:
        return f"{ranks.ranks.total_bytes - moved} bytes for rows of {rows.nbytes}"
    return "" if back.equal(rows) else f"rows are {back}"


def run_row_cases(rank: int, folder: str) -> None:
    """Body of one of two processes; writes its results to `folder`."""
    with meeting(rank, folder, RANKS) as results:
        peers = Peers(RANKS, rank, dist.group.WORLD)
        ranks = RowRanks(TensorRanks(degree=1, index=0, group=None, context=peers, width=peers), peers)
        for name, (block, masked) in BLOCKS.items():
            results[name] = tried(lambda block=block, masked=masked: Model(block(), masked=masked), ranks)
        for name, way in WAYS:
            block, masked = BLOCKS[name]
            other = replace(ranks, ranks=replace(ranks.ranks, context_parallel=way))
            results[f"{name}, {way}"] = tried(lambda block=block, masked=masked: Model(block(), masked=masked), other)
        results["heads"] = exchanged(ranks)
