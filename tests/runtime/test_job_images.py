"""Which of a real model's modules ranks can take images of in turn, where these lie, and what is told of others."""

from collections.abc import Callable

import pytest
import torch
from ghost_models import FAMILIES
from torch import Tensor, nn

from mmplan.errors import InputError
from mmplan.runtime.ghost.image_calls import ImageCalls, around
from mmplan.runtime.ghost.recording import Batch, Recorder, Recording
from mmplan.runtime.ghost.units import find_units
from mmplan.runtime.ghost.weightless import build_weightless
from mmplan.runtime.tensor_sums import Peers

CPU = torch.device("cpu")
ENCODERS = {
    "llava": ("vision_tower", "multi_modal_projector"),
    "qwen2_vl": ("visual",),
    "qwen2_5_vl": ("visual",),
    "qwen3_vl": ("visual",),
    "qwen2_audio": ("audio_tower", "multi_modal_projector"),
    "mllama": ("vision_model", "multi_modal_projector"),
    "gemma3": ("vision_tower", "multi_modal_projector"),
    "whisper": ("encoder",),
}


def recorded(build: Callable[[], nn.Module], batch: Batch, words: tuple[str, ...], index: int) -> Recording:
    """On the rank `index` of two."""
    model = build_weightless(build)
    units = find_units(model)
    dealt = {unit for unit in units if set(unit.split(".")) & set(words)}
    recorder = Recorder(model, units)
    recorder.images = ImageCalls(recorder, around(model, units.keys(), dealt), Peers(2, index, None), CPU)
    return recorder.record(batch)


@pytest.mark.parametrize("family", ENCODERS)
def test_ranks_of_every_family_take_one_of_two_images_each(family: str) -> None:
    build, batch = FAMILIES[family]()
    first, second = (recorded(build, batch, ENCODERS[family], index) for index in (0, 1))
    assert {name.rpartition(".")[2] for name, _ in first.joined} == set(ENCODERS[family])
    assert {call.unit for call in first.calls} == {call.unit for call in second.calls}
    for key, joined in first.joined.items():
        other = second.joined[key]
        assert joined.deal.keeps and other.deal.keeps and joined.deal.counts == other.deal.counts
        for at, (start, end) in joined.deal.given.items():
            assert start == 0 and other.deal.given[at][0] == end
        read = {whole.slot for call in (*first.calls, first.loss) for whole in call.joined if whole.unit == key[0]}
        assert read and all(min(joined.deal.counts[slot]) > 0 for slot in read)


def test_images_of_unlike_sizes_are_dealt_out_by_their_grids() -> None:
    build, batch = FAMILIES["qwen2_5_vl"]()
    joined = recorded(build, batch, ENCODERS["qwen2_5_vl"], 1).joined["model.visual", 0]
    assert joined.deal.given == {0: (16, 48), 1: (1, 2)}  # grids of 4 x 4 and 4 x 8 patches
    assert joined.deal.counts == {0: (16, 32), 1: (4, 8)}  # merged by fours


class Encoded(nn.Module):
    """One's own encoder of pictures, and what reads it."""

    def __init__(self, more: nn.Module) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, 8), more)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        states = self.tower(x)
        for block in self.blocks:
            states = block(states)
        return states.square().mean()


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def test_a_rank_without_images_computes_one_that_nobody_takes() -> None:
    three, one = torch.randn(3, 5, 6), torch.randn(1, 5, 6)
    model = build_weightless(lambda: Encoded(nn.Tanh()))
    units = find_units(model)
    recorder = Recorder(model, units)
    towers = around(model, units.keys(), {name for name in units if "tower" in name})
    recorder.images = ImageCalls(recorder, towers, Peers(4, 3, None), CPU)
    for images, counts in ((three, (1, 1, 1, 0)), (one, (1, 0, 0, 0))):
        recording = recorder.record({"x": images})
        deal = recording.joined["tower", 0].deal
        assert (deal.given, deal.counts, deal.keeps) == ({0: (0, 1)}, {0: counts}, False)
        assert recording.of["tower.0", 0].output.leaves[0].shape == (1, 5, 8)
        assert recording.of["blocks.0", 0].output.leaves[0].shape == (*images.shape[:2], 8)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (Centred(8, 8), "output 0 differs when it is split"),
        (nn.Dropout(0.5), r"it draws random numbers \(dropout\), which each rank would draw for itself"),
    ],
)
def test_modules_whose_images_depend_on_each_other_are_refused(more: nn.Module, reason: str) -> None:
    message = rf"'tower' cannot be run on some of them: {reason}: set `constraints\.spread: \[\]` in the scenario"
    with pytest.raises(InputError, match=message):
        recorded(lambda: Encoded(more), {"x": torch.randn(2, 5, 6)}, ("tower",), 0)
