"""`mmplan fit`: memory of given degrees, impossible degrees, questions without a file, suggestions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmplan.cli import app
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import kept_bytes
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.memory import state_bytes
from mmplan.cost_models.peak_loads import MicrobatchLoads, peak_loads
from mmplan.errors import InputError
from mmplan.planner.check_degrees import check_degrees
from mmplan.planner.degrees import Degrees
from mmplan.planner.even_stages import block_counts, even_chunks
from mmplan.planner.fit import fit
from mmplan.planner.fit_job import Question, job_of
from mmplan.planner.memory import estimate_memory, module_shard
from mmplan.planner.memory_liveness import in_flight_chunks
from mmplan.report.fit import fit_document, fit_tables
from mmplan.scenario.load import load_scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"
LLAVA = SCENARIOS / "llava-1.5-7b-sft.yaml"


def question(**options) -> Question:
    base = {"model": "llava-1.5-7b", "gpu": "a100-sxm-80", "gpus": 8, "seq": 2048}
    return Question(**(base | options))


@pytest.mark.parametrize("pp", [1, 4])
def test_on_the_mmplan_stack_the_parts_are_state_and_kept_bytes(pp: int) -> None:
    scenario = load_scenario(SCENARIOS / "vitl16-llama3-8b.yaml")
    degrees = Degrees(pp=pp, dp=2, microbatches=8)
    graph = build_graph(scenario)
    loads = mean_loads(scenario, 1)
    chunks = even_chunks(graph, ["llm"], pp)
    for stage, layers in zip(estimate_memory(scenario, degrees), chunks, strict=True):
        states = sum(stage.part_bytes(name) for name in ("weights", "gradients", "optimizer state"))
        assert states == sum(state_bytes(layer, scenario.precision, scenario.optimizer) for layer in layers)
        step = {part.name: part.bytes for part in stage.moments[0].parts}
        alive = pp - stage.stage
        expected = sum(
            kept_bytes(layer, loads[layer.module], scenario.precision) * (1 if layer.kind == "loss" else alive)
            for layer in layers
        )
        assert step["activations"] + step.get("logits", 0) == pytest.approx(expected, abs=2 * len(layers) * alive)


def test_blocks_are_dealt_as_launch_scripts_do() -> None:
    assert block_counts(46, 4) == (11, 12, 12, 11)  # GLM-4.5-Air, ms-swift issue 5737
    assert block_counts(70, 12) == (5, *[6] * 10, 5)  # BLOOM-176B: both embeddings count as layers
    assert block_counts(22, 24) == (0, *[1] * 22, 0)  # Zero Bubble, table 4: one layer per chunk
    with pytest.raises(InputError, match="3 blocks and 2 vocabulary layers"):
        block_counts(3, 6)


def test_chunks_hold_every_layer_once_with_encoders_in_front() -> None:
    graph = build_graph(load_scenario(SCENARIOS / "qwen2.5-omni-7b.yaml"))
    chunks = even_chunks(graph, ["thinker", "talker"], 4)
    assert sorted(layer.id for chunk in chunks for layer in chunk) == sorted(layer.id for layer in graph.layers())
    assert {layer.module for layer in chunks[0]} >= {"vision", "audio"}


def test_microbatches_alive_by_schedule() -> None:
    assert [in_flight_chunks("1f1b", 4, stage, 1, 16) for stage in range(4)] == [(4,), (3,), (2,), (1,)]
    assert in_flight_chunks("gpipe", 4, 0, 1, 16) == (16,)
    assert in_flight_chunks("zb-2p", 4, 3, 1, 16) == (8,)
    assert in_flight_chunks("1f1b", 4, 0, 1, 2) == (2,)
    # Megatron-LM: (p - 1) * 2 + (v - 1) * p + 1 = 11 chunk forwards on the first of 4 stages with 2 chunks
    assert in_flight_chunks("interleaved", 4, 0, 2, 16) == (4 + 3, 4)


def test_memory_follows_the_largest_images_not_the_mean(tmp_path: Path) -> None:
    text = LLAVA.read_text()
    few = tmp_path / "few.yaml"
    few.write_text(text.replace("images: 1", "images: {histogram: {0: 9, 10: 1}}"))
    scenario = load_scenario(few)
    loads = MicrobatchLoads(scenario.model, scenario.data)
    mean, peak = loads.mean(1), loads.peak(1)
    assert mean == mean_loads(scenario, 1)
    assert peak["vision"].tokens == pytest.approx(10 * 577)
    assert mean["vision"].tokens < 0.15 * peak["vision"].tokens
    assert peak_loads(load_scenario(LLAVA), 2) == mean_loads(load_scenario(LLAVA), 2)


def test_more_of_anything_never_takes_less_memory() -> None:
    def total(**options) -> int:
        scenario, degrees = job_of(question(stack="nemo-2025", **options))
        return max(stage.device_bytes for stage in estimate_memory(scenario, degrees))

    assert total(mbs=2) > total(mbs=1)
    assert total(seq=4096) > total(seq=2048)
    assert total(recompute="full") < total(recompute="16") < total(recompute="none")
    assert total(zero=3) < total(zero=2) < total(zero=1) < total(zero=0)
    assert total(offload="optimizer") < total()
    assert total(tp=2) < total()
    assert total(pp=4, vp=2) > total(pp=4)


def test_an_encoder_whose_heads_tp_does_not_divide_is_replicated() -> None:
    """InternViT has 25 heads (vllm issue 8097): tp 4 is for the language model alone."""
    scenario = load_scenario(SCENARIOS / "internvl2.5-26b.yaml")
    vision, llm = scenario.model.module("vision"), scenario.model.module("llm")
    assert module_shard(vision, Degrees(tp=4)).tp == 1
    assert module_shard(llm, Degrees(tp=4)).tp == 4
    assert len(estimate_memory(scenario, Degrees(tp=4, dp=16, microbatches=16))) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tp": 3}, "tp 3 x cp 1 x pp 1 = 3 devices do not divide the 8 of the cluster: dp = 2.66667"),
        ({"tp": 8, "pp": 2}, "16 devices do not divide the 8"),
        ({"dp": 16}, "tp 1 x cp 1 x pp 1 x dp 16 = 16 devices, the cluster has 8"),
        ({"gbs": 12, "mbs": 1}, "global batch 12 / (dp 8 x mbs 1) = 1.5 microbatches"),
        ({"ep": 2}, "llm has no experts, so ep 2 has nothing to spread"),
        ({"pp": 8, "vp": 5}, "pp 8 x vp 5 = 40 pieces of the pipeline, the language model has 32 layers"),
        ({"pp": 2, "vp": 2, "gbs": 12, "mbs": 1}, "interleaving deals microbatches in groups of pp: 3 microbatches"),
        ({"stack": "nemo"}, "unknown software stack 'nemo'"),
        ({"gpu": "h100"}, "unknown GPU 'h100'; did you mean 'h100-sxm', 'h100-pcie'"),
        ({"model": "llava"}, "no bundled config and no file of the name 'llava'"),
        ({"gpus": 12}, "12 GPUs / 8 in a node = 1.5 nodes"),
        ({"images": 8, "image_size": 336}, "8 images make 4608 tokens, the sequence has 2048"),
        ({"gpu": None}, "--model needs --gpu too"),
        ({"scenario": LLAVA}, "give either a scenario file or --model"),
        ({"freeze": ("vison",)}, "--freeze vison: unknown module; modules: "),
        ({"schedule": "1f1"}, "unknown schedule '1f1'"),
        ({"cross_entropy": "fast"}, "--cross-entropy fast: expected 'plain', 'fused', 'chunked'"),
        ({"recompute": "some"}, "--recompute some: expected 'none', 'selective', 'full'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_arithmetic(options: dict, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        scenario, degrees = job_of(question(**options))
        check_degrees(scenario, degrees)
    assert sentence in str(caught.value)


def test_a_fit_that_is_out_of_memory_offers_changes_that_do_fit() -> None:
    scenario, degrees = job_of(question(stack="deepspeed-2024", zero=2, mbs=8))
    result = fit(scenario, degrees)
    assert result.verdict.kind == "OOM" and result.changes
    recompute = next(change for change in result.changes if change.text.startswith("recompute every block"))
    again = replace(scenario, technique=replace(scenario.technique, recompute="full"))
    assert fit(again, degrees, suggest=False).fullest.device_bytes == recompute.device_bytes


def test_tables_and_document_say_the_same() -> None:
    result = fit(*job_of(question(stack="nemo-2025", tp=2, pp=2)))
    document = fit_document(result)
    assert document["verdict"] == result.verdict.kind
    assert len(document["stages"]) == 2
    assert document["stages"][0]["allocated_bytes"] < document["stages"][0]["device_bytes"]
    assert sum(document["step"]["parts_s"].values()) == pytest.approx(document["step"]["step_time_s"])
    assert result.sentence.split(":")[0] in str(fit_tables(result, explain=True)[0])


def test_the_command_answers_without_a_file_and_exits_1_when_out_of_memory() -> None:
    arguments = "fit --model llava-1.5-7b --gpu a100-sxm-40 --gpus 8 --seq 2048 --stack deepspeed-2024 --recompute full"
    fits = CliRunner().invoke(app, [*arguments.split(), "--explain"])
    assert fits.exit_code == 0 and fits.output.startswith("fits: every rank holds")
    assert "Largest tensors" in fits.output and "step time" in fits.output
    full = CliRunner().invoke(app, [*arguments.split(), "--zero", "0", "--json", "-"])
    assert full.exit_code == 1 and json.loads(full.output)["verdict"] == "OOM"


@pytest.mark.parametrize(
    "options", [{"seq": 4096}, {"images": 2}, {"image_size": 336}, {"freeze": ("vision",)}, {"lora": 8}]
)
def test_what_a_scenario_says_itself_is_no_option_beside_it(options: dict) -> None:
    with pytest.raises(InputError, match=f"--{next(iter(options)).replace('_', '-')} belongs to --model"):
        job_of(Question(scenario=LLAVA, **options))
