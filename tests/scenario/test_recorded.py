"""A recorded model in a scenario file: read as it was written, and refused with key and line where it is none."""

from pathlib import Path

import pytest
import yaml

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import edge_bytes
from mmplan.cost_models.loads import mean_loads
from mmplan.errors import CheckError, InputError
from mmplan.planner.formats.jax_module import export_jax
from mmplan.planner.search import optimize
from mmplan.scenario.load import load_scenario
from mmplan.scenario.schema_recorded import recorded_values

TEXT = """
name: own
model:
  recorded:
    samples: 2
    modules: {eye: vision, trunk: text}
    kinds:
      eye.0:
        parameters: 48
        trained: 48
        products: [{rows: 8, inner: 6, outer: 8, operands: 0, weight: trained, reads: none}]
        output: 64
        kept: {numbers: 48}
        kept_first: {numbers: 48}
      trunk.0:
        parameters: 64
        trained: 64
        products: [{rows: 8, inner: 8, outer: 8, weight: trained}]
        attentions: [{rows: 8, pairs: 32, heads: 2, head_dim: 4, value_dim: 4}]
        moved: 128
        kernels: 3
        output: 64
        kept: {numbers: 100, other_bytes: 16}
        kept_frozen: {numbers: 36}
        kept_first: {numbers: 64}
      trunk.loss: {moved: 65, kernels: 1}
    layers:
    - {id: eye.0, kind: eye.0, pieces: [eye]}
    - {id: trunk.0, kind: trunk.0, pieces: [trunk.0], reads: {eye.0: 63}, block: true}
    - {id: trunk.1, kind: trunk.0, pieces: [trunk.1], reads: {trunk.0: 64}, block: true}
    - {id: trunk.loss, kind: trunk.loss, reads: {trunk.1: 64}}
batch: {global: 4}
precision: fp32
cluster: {device: cpu-core, nodes: 1, devices_per_node: 2}
"""


def written(folder: Path, *changes: tuple[str, str]) -> Path:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "own.yaml"
    path.write_text(text)
    return path


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    scenario = load_scenario(written(tmp_path))
    assert recorded_values(scenario.model) == yaml.safe_load(TEXT)["model"]["recorded"]
    graph = build_graph(scenario)
    assert [(layer.id, layer.kind) for layer in graph.layers()] == [
        *(("eye.0", "unit"), ("trunk.0", "block"), ("trunk.1", "block"), ("trunk.loss", "end"))
    ]
    loads = mean_loads(scenario, 3)  # of three samples; two were recorded
    assert edge_bytes(graph.edge("eye.0", "trunk.0"), loads, "fp32") == 3 * 32 * 4  # 63 / 2 numbers of each, rounded up
    assert not graph.edge("trunk.1", "trunk.loss").cuttable


def test_plans_of_a_recording_are_proved_and_not_split_inside_layers(tmp_path: Path) -> None:
    result = optimize(load_scenario(written(tmp_path)))
    assert result.plan.certificate.status == "optimal"
    assert result.plan.tp == result.plan.cp == 1
    with pytest.raises(CheckError, match="the recording of own knows numbers of parameters alone"):
        export_jax(result.plan)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "kind: trunk.0, pieces: [trunk.0]",
            "kind: trunk.9, pieces: [trunk.0]",
            r"layers\[1\]\.kind: unknown kind 'trunk\.9'; did you mean 'trunk\.0'",
        ),
        ("reads: {eye.0: 63}", "reads: {trunk.1: 63}", r"'trunk\.1' does not stand before 'trunk\.0'"),
        ("{id: trunk.1,", "{id: trunk.0,", r"'trunk\.0' stands twice"),
        ("{id: eye.0, kind", "{id: ear.0, kind", r"layers\[0\]\.id: unknown module 'ear'; modules: 'eye', 'trunk'"),
        ("trunk: text}", "trunk: text, tail: text}", r"modules\.tail: 'tail' has no layers"),
        ("rows: 8, inner: 6", "rows: 8, iner: 6", r"unknown key; did you mean 'inner'"),
        ("batch:", "data: {text_tokens: 5}\nbatch:", r"data\.text_tokens: the samples of this model were recorded"),
        (
            "batch:",
            "train: {trunk: {lora: {rank: 2, targets: [q]}}}\nbatch:",
            "adapters of a recorded model are part of it",
        ),
        ("model:\n", "model:\n  hf_config: llava-1.5-7b\n", "expected one of 'hf_config', 'modules'"),
    ],
)
def test_what_is_no_recording_is_refused(old: str, new: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=told):
        load_scenario(written(tmp_path, (old, new)))
