"""Which token tables and heads of a user's own tensor-parallel ranks share: ranks are threads of one process."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmplan.runtime.ghost.recording import Batch, Recorder
from mmplan.runtime.ghost.units import find_units
from mmplan.runtime.ghost.vocabulary import find_vocabulary
from mmplan.runtime.ghost.weightless import build_weightless
from mmplan.runtime.tensor_sums import TensorRanks
from mmplan.runtime.thread_group import Threads

RANKS, WORDS = 2, 6


class Model(nn.Module):
    """A table with a word that is not trained, and a head. Args: tied: they are one; more: of a loss of all logits."""

    def __init__(self, *, tied: bool = False, more: float = 0.0, words: int = WORDS) -> None:
        super().__init__()
        self.words, self.says = nn.Embedding(words, 4, padding_idx=1), nn.Linear(4, words, bias=False)
        self.says.weight = self.words.weight if tied else self.says.weight
        self.more = more

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.says(self.words(ids)).float()
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].flatten())
        return loss + self.more * logits.logsumexp(-1).mean() if self.more else loss


def shared(recorder: Recorder, batch: Batch, threads: Threads, rank: int) -> tuple[list[str], dict[str, int]]:
    """Tables and heads."""
    group, own = threads.groups_of(rank)(np.arange(RANKS).reshape(1, -1)), copy.copy(recorder)
    found, recordings = find_vocabulary(
        own,
        tables=["words"],
        heads=["says"],
        apart=set(),
        recordings=(own.record(batch),),
        record=lambda: (own.record(batch),),
        ranks=TensorRanks(degree=RANKS, index=rank, group=group),
        device=torch.device("cpu"),
    )
    heads = {} if found is None else dict(found.heads)
    assert dict(recordings[0].labelled) == dict.fromkeys(heads, 2 * 4)  # rows of logits that are followed to the loss
    return [] if found is None else sorted(found.tables), heads


@pytest.mark.parametrize(
    ("form", "tables", "heads"),
    [
        ({}, ["words"], {"says": WORDS}),
        ({"tied": True}, ["words"], {"says": WORDS}),
        ({"more": 0.1}, ["words"], {}),  # all logits of a row are read
        ({"more": 0.1, "tied": True}, [], {}),
        ({"words": 7}, [], {}),  # two ranks cannot have as many each
    ],
)
def test_what_glue_does_with_logits_says_whether_a_head_is_split(
    form: dict[str, float], tables: list[str], heads: dict[str, int]
) -> None:
    model, batch = build_weightless(partial(Model, **form)), {"ids": torch.tensor([[0, 1, 5, 2, 3], [4, 1, 1, 0, 5]])}
    recorder, threads = Recorder(model, find_units(model)), Threads()
    recorder.record(batch)
    assert threads.run(range(RANKS), partial(shared, recorder, batch, threads)) == [(tables, heads)] * RANKS
