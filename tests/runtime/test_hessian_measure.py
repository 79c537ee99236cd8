"""Measurements from files: branches, resumption, several processes, and what is said when something is wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from curved_cases import curved_scenario, curved_subject
from layer_zoo import FULL, graph_of, omni
from tiny_plans import hand_plan

from mmplan.cost_models.build import build_graph
from mmplan.errors import InputError
from mmplan.report.sensitivity import save_sensitivity
from mmplan.runtime.checkpoint.options import Checkpoints
from mmplan.runtime.hessian.own_scenario import sample_modalities, scenario_subject
from mmplan.runtime.hessian.processes import sensitivity
from mmplan.runtime.hessian.result import Measured
from mmplan.runtime.hessian.saved import saved_weights
from mmplan.runtime.hessian.settings import Question, Settings
from mmplan.runtime.hessian.subject import reaching_modalities
from mmplan.runtime.hessian.told import Estimate
from mmplan.runtime.hessian.values import Key, Value
from mmplan.runtime.launch import execute
from mmplan.scenario.load import load_scenario

SCENARIO = """\
name: small
model:
  modules:
    vision: {kind: vision_encoder, layers: 1, hidden: 8, heads: 2, ffn: 8, patch: 4, image_size: 8}
    projector: {kind: projector, dims: [8, 8]}
    llm: {kind: language_model, layers: 2, hidden: 8, heads: 2, kv_heads: 1, ffn: 8, vocabulary: 40}
  edges:
    - [vision, projector]
    - [projector, llm]
data: {text_tokens: [6, 9], images: {histogram: {0: 1, 1: 3}}}
batch: {global: 4}
precision: fp32
cluster: {device: cpu-core, nodes: 1, devices_per_node: 2}
"""
QUICK = Settings(samples=3, batches=2, seeds=1, layers=("vision.0", "llm.1"))


class Heard:
    """What a listener hears; `stop`: an interruption after so many values."""

    def __init__(self, stop: int | None = None) -> None:
        self.notes: list[str] = []
        self.values: list[Key] = []
        self.estimates: list[Estimate] = []
        self._stop = stop

    def note(self, text: str) -> None:
        self.notes.append(text)

    def estimate(self, estimate: Estimate) -> None:
        self.estimates.append(estimate)

    def value(self, key: Key, value: Value, left: int) -> None:
        self.values.append(key)
        if len(self.values) == self._stop:
            raise KeyboardInterrupt


def question(folder: Path, settings: Settings = QUICK, text: str = SCENARIO, **files: Path) -> Question:
    path = folder / "small.yaml"
    path.write_text(text)
    return Question(scenario=path, output=folder / "values.json", device="cpu", settings=settings, **files)


def measured(asked: Question, heard: Heard | None = None, local: int | None = None) -> Measured:
    found = sensitivity(asked, local=local, dry_run=False, listener=heard or Heard())
    assert found is not None
    return found


def by_name(found: Measured) -> dict[tuple[str, str], float]:
    return {(one.layer, one.modality): one.value for one in found.values}


def test_a_branch_has_the_samples_that_contain_its_modality() -> None:
    scenario = curved_scenario("llava")
    kinds = [sample_modalities(scenario, sample) for sample in scenario.data.manifest]
    assert kinds == [{"vision", "text"}, {"text"}, {"vision", "text"}]
    pieces = curved_subject("llava").batch(0)
    assert [(sorted(piece.modalities), piece.targets) for piece in pieces] == [
        (["text", "vision"], {"llm": 6 + 5}),  # each text token but the last predicts the next
        (["text"], {"llm": 4}),
    ]
    branches = curved_subject("llava").branches
    assert branches["vision.1"] == ("vision",)
    assert set(branches["llm.0"]) == {"vision", "text"}


def test_a_layer_has_a_branch_for_each_modality_that_reaches_it() -> None:
    branches = reaching_modalities(graph_of(omni(FULL, FULL, FULL)))
    assert branches["audio.0"] == ("audio",)
    assert "speech" not in branches["llm.0"]
    assert {"audio", "text", "speech"} <= set(branches["talker.0"])


def test_the_value_of_a_whole_batch_does_not_depend_on_its_forwards() -> None:
    """Targets are counted over all of them, so the loss is one mean however it is cut."""
    scenario = curved_scenario("llava")
    losses = []
    for microbatch in (None, 1):
        subject = scenario_subject(scenario, weights=None, samples=3, microbatch=microbatch, device=torch.device("cpu"))
        pieces = subject.batch(0)
        total = sum(piece.targets["llm"] for piece in pieces)
        losses.append(sum(float(piece.run().losses["llm"].detach()) / total for piece in pieces))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_an_interrupted_measurement_goes_on_and_gives_the_same(tmp_path: Path) -> None:
    whole, asked = measured(question(tmp_path)), question(tmp_path)
    asked.partial.unlink()
    first = Heard(stop=2)
    with pytest.raises(KeyboardInterrupt):
        measured(asked, first)
    assert asked.partial.exists()
    second = Heard()
    again = measured(asked, second)
    assert second.notes == [f"going on from {asked.partial}, which has 2 values"]
    assert not set(first.values) & set(second.values)
    assert by_name(again) == by_name(whole)
    save_sensitivity(again, asked)
    assert not asked.partial.exists()
    assert json.loads(asked.output.read_text())["layers"].keys() == {"vision.0", "llm.1"}


def test_an_unfinished_measurement_of_something_else_is_not_gone_on_from(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        measured(question(tmp_path), Heard(stop=1))
    for settings, expected in (
        (replace(QUICK, samples=2), "samples is 3, now 2"),
        (replace(QUICK, layers=()), "layers"),
    ):
        with pytest.raises(InputError, match=f"unfinished measurement is there whose {expected}"):
            measured(question(tmp_path, settings))
    with pytest.raises(InputError, match="weights are others"):
        measured(question(tmp_path, text=SCENARIO + "seed: 5\n"))
    with pytest.raises(InputError, match="another model or other data; give --restart to begin anew"):
        measured(question(tmp_path, text=SCENARIO.replace("[6, 9]", "[6, 8]")))
    restarted = Heard()
    measured(replace(question(tmp_path), restart=True), restarted)
    assert not restarted.notes
    question(tmp_path).partial.write_text("{")
    with pytest.raises(InputError, match="no such file, or damaged"):
        measured(question(tmp_path))


@pytest.mark.distributed
@pytest.mark.usefixtures("at_hand_once")
def test_a_checkpoint_of_a_sharded_run_gives_its_weights(tmp_path: Path) -> None:
    """With a learning rate that moves nothing they are those that are drawn; of another width they are refused."""
    asked = question(tmp_path, text=SCENARIO + "optimizer: {name: adamw, learning_rate: 1e-30}\n")
    scenario = load_scenario(asked.scenario)
    layers = [layer.id for layer in build_graph(scenario).layers()]
    plan = replace(hand_plan(scenario, [layers], dp=2), sharding="optimizer")
    execute(plan, local=2, steps=1, checkpoints=Checkpoints(folder=tmp_path / "saved"), timeout_s=60.0)
    drawn = by_name(measured(asked))
    asked.partial.unlink()
    assert by_name(measured(replace(asked, weights=tmp_path / "saved"))) == drawn
    wider = question(tmp_path, text=SCENARIO.replace("ffn: 8, vocabulary", "ffn: 12, vocabulary"))
    with pytest.raises(InputError, match=r"the model has 'llm\.0/.*' with shape .*, the checkpoint shape"):
        measured(replace(wider, weights=tmp_path / "saved", restart=True))
    with pytest.raises(InputError, match="the checkpoint is of the scenario's own model, not of a job's model"):
        saved_weights(tmp_path / "saved", job=True)
    part = next((tmp_path / "saved").glob("step-*/rank-00000.safetensors"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(InputError, match="no checkpoint is whole"):
        saved_weights(tmp_path / "saved", job=False)


@pytest.mark.distributed
def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    settings = replace(QUICK, samples=4, trace=2)
    alone = measured(question(tmp_path, settings))
    (tmp_path / "values.partial.json").unlink()
    heard = Heard()
    together = measured(question(tmp_path, settings), heard, local=2)
    assert heard.estimates
    assert len(heard.values) == len(alone.values) * 2
    assert by_name(together) == pytest.approx(by_name(alone), rel=1e-6)
    traces = [one.trace[0] for one in together.values if one.trace is not None]
    assert traces == pytest.approx([one.trace[0] for one in alone.values if one.trace is not None], rel=1e-4)
    (tmp_path / "values.partial.json").unlink()
    with pytest.raises(InputError, match="no such folder"):
        measured(question(tmp_path, settings, weights=tmp_path / "nowhere"), local=2)
