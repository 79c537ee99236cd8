"""A recorded model in a scenario file: read as it was written, and refused with key and line where it is none."""

from pathlib import Path

import pytest
import yaml

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import edge_bytes, forward_flops, kept_bytes, op_parameters
from mmplan.cost_models.load import Load
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.local_layer import backward_sum_bytes, forward_sum_bytes, recomputed_sum_bytes
from mmplan.errors import CheckError, InfeasibleError, InputError
from mmplan.planner.check import check_plan
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
        products: [{rows: 8, inner: 8, outer: 8, weight: trained, on_ranks: {2: {outer: 4}}}]
        attentions: [{rows: 8, pairs: 32, heads: 2, head_dim: 4, value_dim: 4, on_ranks: {2: 1}}]
        moved: 128
        kernels: 3
        output: 64
        kept: {numbers: 100, other_bytes: 16}
        kept_frozen: {numbers: 36}
        kept_first: {numbers: 64}
        on_ranks:
          2:
            parameters: 32
            trained: 32
            moved: 96
            kept: {numbers: 68, other_bytes: 16}
            kept_frozen: {numbers: 36}
            kept_first: {numbers: 32}
            forward_sums: [64]
            backward_sums: [{numbers: 64, reads: inputs}, {numbers: 8, reads: weights}]
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


def test_what_a_rank_has_of_a_layer_is_what_was_recorded(tmp_path: Path) -> None:
    """Two samples were recorded; the load has one."""
    scenario = load_scenario(written(tmp_path))
    graph, one = build_graph(scenario), Load(sequences=1, tokens=1, outputs=1)
    eye, block = graph.layer("eye.0"), graph.layer("trunk.0")
    assert [sum(op_parameters(op, tp) for op in block.ops) for tp in (1, 2, 4)] == [64, 32, 64]
    products = 8 * 8 * 8  # two samples of 8 rows, two flops each: halved once
    pairs = 32 * 2 * (4 + 4)
    assert [forward_flops(block, one, tp) for tp in (1, 2, 4)] == [
        products + pairs,
        (products + pairs) / 2,
        products + pairs,
    ]
    assert [kept_bytes(block, one, "fp32", tp) for tp in (1, 2)] == [50 * 4 + 8, 34 * 4 + 8]
    assert forward_sum_bytes(block, one, "fp32", 2) == recomputed_sum_bytes(block, one, "fp32", 2) == 32 * 4
    assert backward_sum_bytes(block, one, "fp32", 2) == (32 + 4) * 4
    assert forward_sum_bytes(eye, one, "fp32", 2) == backward_sum_bytes(block, one, "fp32", 4) == 0
    assert forward_flops(eye, one, 2) == forward_flops(eye, one) == 8 * 6 * 8


def test_sums_of_gradients_that_nothing_wants_are_not_made(tmp_path: Path) -> None:
    """Neither is the encoder trained nor, in the second case, the trunk."""
    one = Load(sequences=1, tokens=1, outputs=1)
    still = "train: {eye: frozen}\nbatch:"
    block = build_graph(load_scenario(written(tmp_path, ("batch:", still)))).layer("trunk.0")
    assert backward_sum_bytes(block, one, "fp32", 2) == 4 * 4  # of a weight alone
    still = "train: {eye: frozen, trunk: frozen}\nbatch:"
    with pytest.raises(InputError, match="train"):
        load_scenario(written(tmp_path, ("batch:", still)))


def test_plans_of_a_recording_are_proved_and_split_what_a_trial_has_split(tmp_path: Path) -> None:
    result = optimize(load_scenario(written(tmp_path)))
    assert result.plan.certificate.status == "optimal"
    shared = optimize(load_scenario(written(tmp_path, ("batch:", "constraints: {tp: 2}\nbatch:"))))
    assert shared.plan.tp == 2 and shared.plan.certificate.status == "optimal"
    assert not check_plan(shared.plan)
    four = ("devices_per_node: 2", "devices_per_node: 4"), ("batch:", "constraints: {tp: 4}\nbatch:")
    with pytest.raises(InfeasibleError, match="the recording of own has no layers that 4 ranks share; its degrees: 2"):
        optimize(load_scenario(written(tmp_path, *four)))
    with pytest.raises(CheckError, match="the recording of own knows numbers of parameters alone"):
        export_jax(result.plan)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "on_ranks: {2: 1}",
            "on_ranks: {4: 1}",
            r"kinds\.trunk\.0\.attentions\[0\]\.on_ranks: 4 ranks are none of those of `on_ranks` of its kind",
        ),
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


def test_modules_of_a_recording_have_a_precision_each(tmp_path: Path) -> None:
    """The eye hands on numbers of two bytes each; what it keeps in its own type takes half as many."""
    device, words = (
        ("device: cpu-core", "device: a100-sxm-40"),
        ("precision: fp32", "precision: {default: fp32, eye: bf16}"),
    )
    one, two = (load_scenario(written(tmp_path, device, *more)) for more in ((), (words,)))
    assert two.precisions == ("bf16", "fp32")
    (wide, narrow) = ({edge.producer: edge for edge in build_graph(each).edges()} for each in (one, two))
    for name, times in (("eye.0", 2), ("trunk.0", 1)):
        sizes = [
            edge_bytes(edges[name], mean_loads(each, 1), each.precision_of(edges[name]))
            for edges, each in ((wide, one), (narrow, two))
        ]
        assert sizes[0] == times * sizes[1] > 0
