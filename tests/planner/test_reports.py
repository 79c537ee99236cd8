"""Problems that people reported: our verdict on each that states enough, and every report accounted for."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from report_jobs import Case, job, report_file

from mmplan.errors import MmplanError
from mmplan.planner.degrees import Degrees
from mmplan.planner.estimate import estimate_step
from mmplan.planner.fit import fit
from mmplan.planner.memory import estimate_memory

ROOT = Path(__file__).parents[2]
REPORTS = (ROOT / ".." / "shared" / "data" / "reports" / "reports.json").resolve()


def by_id(section: str) -> dict[str, Case]:
    return {case["id"]: case for case in report_file()[section]}


@pytest.mark.parametrize("name", by_id("cases"))
def test_the_verdict_is_the_one_of_the_report(name: str, tmp_path: Path) -> None:
    case = by_id("cases")[name]
    verdict = fit(*job(case, tmp_path), suggest=False).verdict
    if case["verdict"] == "not fits":
        assert verdict.kind in ("tight", "OOM")
    else:
        assert verdict.kind == case["verdict"], verdict.sentence
    assert verdict.decides in case.get("decides", [verdict.decides]), verdict.sentence


@pytest.mark.parametrize("name", by_id("differs"))
def test_where_we_differ_is_known(name: str, tmp_path: Path) -> None:
    case = by_id("differs")[name]
    assert fit(*job(case, tmp_path), suggest=False).verdict.kind == case["ours"] != case["verdict"]


@pytest.mark.parametrize("name", by_id("impossible"))
def test_impossible_degrees_are_refused_as_in_the_report(name: str, tmp_path: Path) -> None:
    case = by_id("impossible")[name]
    with pytest.raises(MmplanError) as caught:
        fit(*job(case, tmp_path))
    assert case["message"] in str(caught.value)


def test_a_235b_moe_on_64_gpus_is_offered_more_stages_or_offload(tmp_path: Path) -> None:
    """R01: experts' optimizer state is split over 64 / (ep 8 x pp 2) = 4 ranks only."""
    result = fit(*job(by_id("cases")["R01"], tmp_path))
    assert [change for change in result.changes if re.search(r"pp \d+|ep \d+|offload", change.text)]


def test_with_parameters_on_the_host_more_gpus_do_not_help(tmp_path: Path) -> None:
    """R24, https://github.com/deepspeedai/DeepSpeed/issues/4093: GPT-J took 13 GB per GPU on 2 and on 4 GPUs."""
    case = {"id": "R24", "model": "gpt-j-6b", "gpu": "a100-sxm-40", "text_tokens": 2048}
    options = {"stack": "deepspeed-2024", "zero": 3, "offload": "parameters", "recompute": "full", "mbs": 1}
    sizes = [
        fit(*job({**case, "gpus": gpus, "fit": options}, tmp_path)).fullest.allocated_bytes / 1e9 for gpus in (2, 4)
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
    assert 2 < sizes[0] < 13  # live parameters 1e9 x 2 B are in it; the report's sequence length is not given


def test_frozen_towers_with_hooks_keep_their_activations(tmp_path: Path) -> None:
    """R12, https://github.com/modelscope/ms-swift/pull/10214."""
    case = {**by_id("cases")["R95"], "freeze": ["vision", "projector"]}
    scenario, degrees = job(case, tmp_path)
    hooks = replace(scenario, technique=replace(scenario.technique, frozen_hooks=True))
    with_hooks, without = (estimate_memory(one, degrees)[0].part_bytes("activations") for one in (hooks, scenario))
    assert with_hooks > 1.4 * without


def test_recompute_and_few_replicas_explain_the_slow_70b(tmp_path: Path) -> None:
    """R50: tp 8, pp 8, dp 2 with recompute reached 296 of the 420 TFLOP/s of tp 8, pp 2, dp 48 without: 0.70."""
    fast = job(by_id("cases")["R50-768"], tmp_path)
    case = by_id("cases")["R50"]
    slow = job({**case, "fit": {**case["fit"], "pp": 8, "recompute": "full", "zero": 1}}, tmp_path)
    rates = [
        degrees.global_batch / degrees.devices / estimate_step(scenario, degrees).step_s
        for scenario, degrees in (fast, slow)
    ]
    assert rates[1] / rates[0] == pytest.approx(296.5 / 420.5, abs=0.12)


def test_inside_one_node_many_microbatches_favour_stages_over_shards(tmp_path: Path) -> None:
    """R40, https://github.com/NVIDIA/Megatron-LM/issues/258: pp 8 beat tp 8 on 8 A100 at 1B to 10B."""
    case = {**by_id("cases")["R28"], "gpus": 8, "fit": {"stack": "megatron-2021", "pp": 8, "mbs": 1, "gbs": 64}}
    scenario, _ = job(case, tmp_path)
    stages, shards = (estimate_step(scenario, Degrees(**d, microbatches=64)).step_s for d in ({"pp": 8}, {"tp": 8}))
    assert stages < shards


def test_one_microbatch_leaves_a_pipeline_idle(tmp_path: Path) -> None:
    """R51, https://github.com/NVIDIA/Megatron-LM/issues/1000: a global batch of 1 gave 20 TFLOP/s."""
    case = {**by_id("cases")["R28"], "gpus": 8, "fit": {"stack": "megatron-2021", "pp": 8, "mbs": 1, "gbs": 1}}
    scenario, degrees = job(case, tmp_path)
    one, many = (estimate_step(scenario, replace(degrees, microbatches=count)).step_s / count for count in (1, 64))
    assert one > 5 * many  # bubble (p - 1) / m: 7 idle slots for 1


@pytest.mark.skipif(not REPORTS.exists(), reason="the collection of reports is not here")
def test_every_report_is_accounted_for() -> None:
    text = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
    for report in json.loads(REPORTS.read_text(encoding="utf-8")):
        assert re.search(rf"\b{report['id']}\b", text), report["id"]
