"""Modules in precisions of their own: bytes, seconds and plans, by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import edge_bytes, parameters
from mmplan.cost_models.layout import Layout, Trained
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.planned_memory import planned_state_bytes
from mmplan.errors import InputError
from mmplan.planner.check import check_plan
from mmplan.planner.degrees import Degrees
from mmplan.planner.fit import fit
from mmplan.planner.plan import scenario_hash
from mmplan.planner.search import optimize
from mmplan.planner.shared_bytes import shared_bytes
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

TINY = Path("scenarios/tiny.yaml").read_text()
GPUS = "cluster: {device: a100-sxm-40, nodes: 1, devices_per_node: 4}"


def _scenario(tmp_path: Path, precision: str, *changes: tuple[str, str]) -> Scenario:
    text = TINY.replace("precision: fp32", f"precision: {precision}")
    for old, new in (("cluster: {device: cpu-core, nodes: 1, devices_per_node: 4}", GPUS), *changes):
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return load_scenario(path)


def test_a_module_counts_more_than_its_modality_and_this_more_than_the_default(tmp_path: Path) -> None:
    mixed = _scenario(tmp_path, "{default: bf16, audio: fp16, text: fp32, audio_projector: bf16}")
    found = {module.name: mixed.precision_of(module) for module in mixed.model.modules}
    expected = {"vision": "bf16", "projector": "bf16", "audio": "fp16", "audio_projector": "bf16", "llm": "fp32"}
    assert found == expected
    for edge in build_graph(mixed).edges():
        assert mixed.precision_of(edge) == expected[edge.producer.rsplit(".", 1)[0]]


def test_one_word_for_every_module_is_that_word(tmp_path: Path) -> None:
    word = _scenario(tmp_path, "bf16")
    said = _scenario(tmp_path, "{vision: bf16, audio: bf16, default: bf16}")
    assert said == word
    assert (
        scenario_hash(said) == scenario_hash(word) != scenario_hash(_scenario(tmp_path, "{default: bf16, llm: fp32}"))
    )


@pytest.mark.parametrize(
    ("precision", "changes", "message"),
    [
        ("{default: bf16, visoin: fp32}", (), "precision.visoin: no module or modality of this name; did you mean 'vi"),
        ("{vision: fp32, text: bf16}", (), "precision: 'audio', 'audio_projector' has none: name it, its modality"),
        ("{default: bf16, llm: fp8}", (), "precision.llm: expected 'fp32', 'bf16' or 'fp16', found 'fp8'"),
        (
            "{default: fp32, llm: bf16}",
            ((GPUS, "cluster: {device: v100-sxm2-32, nodes: 1, devices_per_node: 4}"),),
            "precision.llm: v100-sxm2-32 has no bf16 units; it has 'fp32', 'fp16'",
        ),
        (
            "{default: bf16, llm: fp32}",
            (("constraints:\n", "constraints:\n  offload: [none, optimizer]\n"),),
            "constraints.offload: 'optimizer' needs one precision for all modules",
        ),
    ],
)
def test_what_cannot_be_is_told_with_its_key(
    precision: str, changes: tuple[tuple[str, str], ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as error:
        _scenario(tmp_path, precision, *changes)
    assert message in str(error.value)


def test_states_and_messages_are_as_wide_as_their_module(tmp_path: Path) -> None:
    """AdamW: fp32 weight 4, gradient 4, moments 8; bf16 weight 2, gradient 4, moments 8, master copy 4. The 64 patches
    of an image leave the projector as 16 rows of 128."""
    mixed = _scenario(tmp_path, "{default: bf16, vision: fp32, projector: fp32}")
    graph, loads = build_graph(mixed), mean_loads(mixed, 1)
    eyes, text = graph.layer("vision.0"), graph.layer("llm.0")
    assert planned_state_bytes(eyes, mixed) == 16 * parameters(eyes)
    assert planned_state_bytes(text, mixed) == 18 * parameters(text)
    edge = graph.edge("projector.0", "llm.embed")
    rows = loads["vision"].sequences * 16
    assert edge_bytes(edge, loads, mixed.precision_of(edge)) == pytest.approx(128 * rows * 4, abs=1)


def test_shared_weights_of_a_stage_travel_in_two_buffers(tmp_path: Path) -> None:
    """Three ranks share them, so each buffer is filled up to a multiple of 3."""
    mixed = _scenario(tmp_path, "{default: bf16, vision: fp32}")
    graph = build_graph(mixed)
    layers = [graph.layer("vision.0"), graph.layer("llm.0")]
    wide, narrow = (-(-parameters(layer) // 3) * 3 for layer in layers)
    found = shared_bytes(layers, Layout(tp=1, dp=3, sharding="optimizer"), mixed, {})
    assert (found.reduce, found.update) == (4 * (wide + narrow), 4 * wide + 2 * narrow)


def test_layers_are_priced_at_the_rate_of_their_own_precision(tmp_path: Path) -> None:
    mixed = _scenario(tmp_path, "{default: bf16, vision: fp32}")
    of = {word: AnalyticCostModel(_scenario(tmp_path, word)) for word in ("fp32", "bf16")}
    graph, costs, loads = build_graph(mixed), AnalyticCostModel(mixed), mean_loads(mixed, 16)
    for name, word in (("vision.0", "fp32"), ("llm.0", "bf16")):
        layer = graph.layer(name)
        assert costs.forward_s(layer, loads[layer.module], 1) == of[word].forward_s(layer, loads[layer.module], 1)
        assert costs.backward_s(layer, loads[layer.module], 1) == of[word].backward_s(layer, loads[layer.module], 1)


def test_an_update_is_priced_by_what_is_read_and_written(tmp_path: Path) -> None:
    """AdamW: gradients read and cleared 8, moments 16; fp32 weights 8 more, 16-bit ones 10. Not knowing costs least."""
    mixed, count = _scenario(tmp_path, "{default: bf16, vision: fp32}"), 10**9
    costs, ranks = AnalyticCostModel(mixed), Layout(tp=1)
    all_wide, none_wide = (costs.update_s(Trained(count, wide=(wide, 0, 0)), ranks) for wide in (count, 0))
    half = costs.update_s(Trained(count, wide=(count // 2, 0, 0)), ranks)
    assert all_wide / none_wide == pytest.approx(32 / 34)
    assert half == pytest.approx((all_wide + none_wide) / 2)
    assert costs.update_s(Trained(count), ranks) == all_wide
    two = replace(ranks, dp=2, sharding="optimizer")
    gathers = [costs.gather_s(Trained(count, wide=(wide, 0, 0)), two, 2) for wide in (count, 0)]
    assert gathers[0] == pytest.approx(2 * gathers[1], rel=1e-3)


def test_plans_of_unlike_precisions_are_proved_and_checked(tmp_path: Path) -> None:
    """Between those of one precision: slower than all in bf16, no slower than all in fp32."""
    cut = (("  pp: [2, 4]", "  pp: [2]\n  sharding: [none, optimizer]"),)
    found = {
        name: optimize(_scenario(tmp_path, precision, *cut)).plan
        for name, precision in (("bf16", "bf16"), ("mixed", "{default: bf16, vision: fp32}"), ("fp32", "fp32"))
    }
    for plan in found.values():
        assert not check_plan(plan)
        assert plan.certificate.bound_s <= plan.certificate.objective_s
    seconds = {name: plan.certificate.objective_s for name, plan in found.items()}
    assert seconds["bf16"] <= seconds["mixed"] <= seconds["fp32"]


def test_fit_says_that_it_prices_one_precision(tmp_path: Path) -> None:
    mixed = _scenario(tmp_path, "{default: bf16, llm: fp32}")
    with pytest.raises(InputError, match=r"fit prices one for all modules, here vision bf16, .*, llm fp32;"):
        fit(mixed, Degrees(tp=1, pp=1, dp=4, microbatch_size=1, microbatches=4))
