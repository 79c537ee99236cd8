"""Which blocks of a user's own run on some rows of a sequence, what is told of others, and what glue does with rows."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from case_processes import run_on_ranks
from row_cases import BLOCKS, RANKS, RUN, WAYS, run_row_cases
from torch import Tensor

from mmplan.runtime.context import OwnRowsOf
from mmplan.runtime.ghost.cut_rows import CutRows, Follow, cut_rows

LINES = {
    "convolution": "rows are mixed in row_cases.py, line N, in convolved: result: Tensor = more(x.transpose(1, 2))",
    "positions": "rows are mixed in row_cases.py, line N, in counted: positions = torch.arange(x.shape[1]",
    "mean": "rows are mixed in row_cases.py, line N, in pooled: return x - x.mean(1, keepdim=True)",
    "by hand": "rows are mixed in row_cases.py, line N, in forward: return x + scores.softmax(-1) @ x",
    "own mask": "the mask of its attention is made inside, in row_cases.py, line N, in forward: attended = F.",
    "dropout": "it draws random numbers (dropout), which each rank would draw for itself",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("rows")
    found: list[dict[str, str]] = run_on_ranks(run_row_cases, RANKS, folder)
    return found


def test_every_block_is_told_of(told: list[dict[str, str]]) -> None:
    assert {*RUN, *LINES} == BLOCKS.keys() <= told[0].keys()


@pytest.mark.distributed
@pytest.mark.parametrize("name", [*RUN, *(f"{name}, {way}" for name, way in WAYS), "heads"])
def test_blocks_that_mix_rows_in_attention_alone_run_on_some(name: str, told: list[dict[str, str]]) -> None:
    assert [one[name] for one in told] == [""] * RANKS


@pytest.mark.distributed
@pytest.mark.parametrize("name", LINES)
def test_blocks_that_mix_rows_otherwise_are_refused_with_the_line(name: str, told: list[dict[str, str]]) -> None:
    for one in told:
        assert one[name].startswith("the plan has cp=2, and 'blocks.0' cannot be run on some rows of a sequence: ")
        assert LINES[name] in re.sub(r"line \d+", "line N", one[name]) and "set `constraints.cp: [1]`" in one[name]


class Ranks:
    """Two ranks of seven rows in turn, and a loss that is summed over them."""

    def __init__(self, whole: Tensor) -> None:
        self.whole, self.asked, self.losses = whole, 0, list[Tensor]()

    def rank(self, index: int) -> CutRows:
        own = OwnRowsOf(self.whole.shape[-2], 2, index)
        everything = torch.arange(own.count)
        place = torch.full((own.count,), -1)
        mine, at = own.among(everything)
        place[mine] = at
        local = own.take(self.whole.movedim(-2, 0)).movedim(0, -2)
        return cut_rows(local, None, Follow(place=place, whole=self._ask, total=self._total))

    def _ask(self) -> None:
        self.asked += 1

    def _total(self, loss: Tensor) -> Tensor:
        self.losses.append(loss)
        return torch.stack(self.losses).sum()  # of the last rank, that of all


LABELS = torch.tensor([[3, -100, 1, 0, 2, 4, 4], [-100, 1, 1, 2, -100, 0, 3]])


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.cross_entropy(x.float().view(-1, 5), F.pad(LABELS, (0, 1), value=-100)[..., 1:].reshape(-1)),
        lambda x: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, x.size(-1)), LABELS[..., 1:].reshape(-1)),
        lambda x: F.cross_entropy(x[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten(), reduction="sum") / 9,
        lambda x: F.cross_entropy(x[LABELS != -100], LABELS[LABELS != -100], label_smoothing=0.1),
        lambda x: F.cross_entropy((torch.tanh(x / 3.0) * 3.0).reshape(-1, 5), LABELS.flatten()),
        lambda x: F.cross_entropy(F.linear(x, torch.eye(5)).view(-1, 5), LABELS.flatten()),
    ],
)
def test_losses_of_rows_add_up_to_that_of_all(loss: object) -> None:
    assert callable(loss)
    ranks = Ranks(torch.randn(2, 7, 5))
    parts = [loss(ranks.rank(index)) for index in range(2)]
    assert type(parts[-1]) is Tensor and ranks.asked == 0
    assert float(parts[-1]) == pytest.approx(float(loss(ranks.whole)), rel=1e-6)


@pytest.mark.parametrize(
    "glue",
    [
        lambda x: x + torch.ones(2, 7, 5),
        lambda x: x.transpose(1, 2),
        lambda x: x[..., :3],
        lambda x: x.mean(1),
        lambda x: x.view(2, -1),
        lambda x: F.cross_entropy(x.view(-1, 5), LABELS.flatten(), weight=torch.ones(5)),
        lambda x: F.cross_entropy(x.view(-1, 5), LABELS.flatten(), reduction="none"),
        lambda x: torch.stack([x, x]),
        lambda x: x.data,
    ],
)
def test_whatever_else_glue_does_asks_for_all_rows(glue: object) -> None:
    assert callable(glue)
    ranks = Ranks(torch.randn(2, 7, 5))
    result = glue(ranks.rank(0))
    assert ranks.asked > 0 and type(result) is Tensor and bool(result.isnan().any())
