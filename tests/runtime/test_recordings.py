"""What is recorded of a model is what the planner derives from its config: parameters, FLOPs, kept activations."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

from ghost_models import FAMILIES, joined, saved_config
from recorded_families import SAMPLES, Compared, compared_on_ranks

from mmplan.cost_models.build import model_layers
from mmplan.cost_models.counts import dgrad_flops, forward_flops, kept_bytes, wgrad_flops
from mmplan.cost_models.load import Load
from mmplan.errors import InputError
from mmplan.runtime.ghost.counting import Counting
from mmplan.runtime.ghost.importing import record_job
from mmplan.runtime.ghost.job import Job, load_job
from mmplan.runtime.ghost.recorded_model import model_from_recordings
from mmplan.runtime.ghost.recording import Batch, Recorder
from mmplan.runtime.ghost.units import find_units
from mmplan.runtime.ghost.weightless import build_weightless
from mmplan.scenario.scenario import Model, Training

HERE = Path(__file__).parent
# Parameters of units that no loss depends on: LLaVA's last block and norm, the pooling of Gemma's tower.
UNUSED = {"llava": 4136, "gemma3": 4064}
OTHER_FLOPS = {
    "gemma3": {"llm.0", "llm.2"},  # windows are a mask here, under which all pairs are computed
    # The library fills 17 patches of a tile up to 24.
    "mllama": {"vision.0", "vision.1", "vision.2", "vision.3"},
}
# Blocks that two ranks share otherwise, or of which that counts on other layers: a table that stands beside the first.
OTHER_BLOCKS = {name: set(layers) - {"projector.0"} for name, layers in OTHER_FLOPS.items()} | {
    "qwen3_vl_moe": {"llm.0", "llm.1", "llm.2"},  # a plan splits each expert, a job has them whole on each rank
    "qwen2_audio": {"audio.0"},
    "llava": {"vision.1"},  # keeps the block behind it, on which no loss depends, whole on each rank
}
# Recorded over derived bytes of all layers: norms and rotations in steps, as the library's code has them, keep what
# the planner's fused ones do not.
MOST_KEPT = {"gemma3": 1.3, "mllama": 1.4}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_recording_has_the_numbers_of_the_config(name: str, tmp_path: Path) -> None:
    case = FAMILIES[name]()
    by_degree = compared_on_ranks(case, SAMPLES[name], saved_config(case[0](), tmp_path), (2,))
    _require_equal(name, by_degree[1])
    _require_equal_blocks(name, by_degree[1], by_degree[2])


def _require_equal(name: str, layers: Compared) -> None:
    derived, recorded = ([pair[side] for pair in layers.values()] for side in (0, 1))
    assert sum(a.parameters for a in derived) - sum(b.parameters for b in recorded) == UNUSED.get(name, 0)
    flops = {
        layer
        for layer, (a, b) in layers.items()
        if (a.forward_flops, a.backward_flops) != (b.forward_flops, b.backward_flops)
    }
    assert flops == OTHER_FLOPS.get(name, set())
    kept = [(a.kept_bytes, b.kept_bytes) for layer, (a, b) in layers.items() if b.parameters or layer not in flops]
    assert 0.98 < sum(b for _, b in kept) / sum(a for a, _ in kept) < MOST_KEPT.get(name, 1.25)


def _require_equal_blocks(name: str, whole: Compared, on_two: Compared) -> None:
    """Of blocks that two ranks share: what each has, computes and hands to sums."""
    blocks = [la for la in whole if whole[la][0].parameters and re.search(r"(vision|audio|llm|deepstack\d)\.\d", la)]
    others = set()
    for layer in blocks:
        derived, recorded = (replace(side, kept_bytes=0) for side in on_two[layer])
        others |= set() if derived == recorded else {layer}
        if layer not in OTHER_BLOCKS.get(name, ()):
            assert recorded.forward_flops < 0.6 * whole[layer][1].forward_flops
    assert others == OTHER_BLOCKS.get(name, set())
    kept = [on_two[layer] for layer in blocks if layer not in others]
    assert 0.98 < sum(b.kept_bytes for _, b in kept) / sum(a.kept_bytes for a, _ in kept) < 1.4


def recorded(model: nn.Module, batch: Batch, **modalities: str) -> Model:
    recording = Recorder(model, find_units(model), Counting(model, torch.float32)).record(batch)
    return model_from_recordings("own", model, [recording], 1, modalities)  # type: ignore[arg-type]


ONE = Load(sequences=1, tokens=1, outputs=1)


class Two(nn.Module):
    """x [4, 6] -> 8 -> relu -> 3."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x))).sum()


def test_products_kept_numbers_and_edges_of_two_layers_by_hand() -> None:
    model = recorded(build_weightless(Two), {"x": torch.randn(4, 6)})
    first, second, end = model_layers(model)
    assert [layer.id for layer in (first, second, end)] == ["first.0", "second.0", "second.loss"]
    assert (forward_flops(first, ONE), dgrad_flops(first, ONE), wgrad_flops(first, ONE)) == (384, 0, 384)  # 2*4*6*8
    assert (forward_flops(second, ONE), dgrad_flops(second, ONE), wgrad_flops(second, ONE)) == (192, 192, 192)
    assert kept_bytes(first, ONE, "fp32") == 4 * 24  # x
    assert kept_bytes(second, ONE, "fp32") == 4 * 32  # what relu gives, which both it and the linear keep
    assert model.recorded is not None
    reads = [(layer.id, [(read.layer, read.numbers) for read in layer.reads]) for layer in model.recorded.layers]
    assert reads[1:] == [("second.0", [("first.0", 32)]), ("second.loss", [("second.0", 12)])]


def test_what_is_frozen_costs_no_backward() -> None:
    model = recorded(build_weightless(Two), {"x": torch.randn(4, 6)})
    frozen = replace(model.modules[0], training=Training(mode="frozen"))
    first, second, _ = model_layers(replace(model, modules=(frozen, model.modules[1])))
    assert not first.has_backward and not first.trainable
    assert kept_bytes(first, ONE, "fp32") == 0
    assert (dgrad_flops(second, ONE), wgrad_flops(second, ONE)) == (0, 192)  # nothing in front of it is trained


def test_parameters_that_the_model_does_not_train_have_no_gradient() -> None:
    model = build_weightless(Two)
    model.second.weight.requires_grad_(False)  # type: ignore[union-attr]
    _, second, _ = model_layers(recorded(model, {"x": torch.randn(4, 6)}))
    assert (dgrad_flops(second, ONE), wgrad_flops(second, ONE)) == (192, 0)
    assert second.trainable  # its bias


class Circle(nn.Module):
    """A block that is called before and after another, and a parameter that only glue reads."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.between = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.twice(self.between(self.twice(x))) * self.scale).sum()


def test_modules_that_feed_each_other_are_one_layer() -> None:
    model = recorded(build_weightless(Circle), {"x": torch.randn(2, 4)})
    assert model.recorded is not None
    assert [layer.pieces for layer in model.recorded.layers] == [("twice", "between"), ("scale",)]
    assert sum(kind.parameters for _, kind in model.recorded.kinds) == 44
    assert forward_flops(model_layers(model)[0], ONE) == 3 * 64


def test_modules_have_the_modality_of_their_name_of_the_job_or_of_what_they_read() -> None:
    build, batch = joined()
    model = build_weightless(build)
    names = {module.name: module.modality for module in recorded(model, batch, left="audio").modules}
    assert names == {"left": "audio", "right": "text", "trunk": "text", "head": "text"}
    own, precision = record_job(load_job(HERE / "own_model_job.py"))
    assert precision == "fp32"
    assert {module.name: module.modality for module in own.modules} == {
        **dict.fromkeys(("eye", "bridge"), "vision"),
        **dict.fromkeys(("words", "blocks", "ending", "says"), "text"),
    }


def test_samples_without_a_modality_count_in_the_mean() -> None:
    """Of 32 batches of LLaVA 11 have one image and 10 two."""
    model, _ = record_job(load_job(HERE / "llava_job.py"))
    assert model.recorded is not None and model.recorded.samples == 32
    tower = model_layers(model)[1]
    assert tower.module == "vision_tower"
    assert forward_flops(tower, Load(tokens=32, sequences=32)) == (11 + 2 * 10) * 2 * 16 * 48 * 24


def test_a_job_without_batches_is_refused() -> None:
    job = Job(file=Path("job.py"), model=Two, batches=lambda size: [], weight=lambda batch: 1.0)
    with pytest.raises(InputError, match=r"job\.py: batches: `batches` gave no batch"):
        record_job(job)
