"""What no word of an exported file says is told, not left out: state in host memory, heads that are filled up."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mmplan.errors import CheckError
from mmplan.planner.formats.accelerate import export_accelerate
from mmplan.planner.formats.deepspeed import export_deepspeed
from mmplan.planner.formats.exported import Exported
from mmplan.planner.formats.jax_module import export_jax
from mmplan.planner.formats.megatron import export_megatron
from mmplan.planner.formats.torch_pipelining import export_torch_pipelining
from mmplan.planner.formats.torchtitan import export_torchtitan
from mmplan.planner.plan import Plan
from mmplan.planner.search import optimize
from mmplan.scenario.load import load_scenario

SCENARIO = """
name: small
model:
  modules:
    llm: {{kind: language_model, layers: 4, hidden: 768, heads: 6, kv_heads: 6, ffn: 4096, vocabulary: 512}}
data: {{text_tokens: 1024}}
batch: {{global: 8}}
precision: bf16
cluster: {{device: a100-sxm-80, nodes: 1, devices_per_node: 4}}
constraints: {{pp: 1, {more}}}
"""


def planned(folder: Path, more: str) -> Plan:
    file = folder / "small.yaml"
    file.write_text(SCENARIO.format(more=more))
    return optimize(load_scenario(file), gap=0.0).plan


def offloaded(folder: Path, sharding: str) -> Plan:
    return planned(folder, f"tp: 1, dp: 4, sharding: {sharding}, offload: optimizer")


def test_state_in_host_memory_is_said_where_a_framework_has_a_word_for_it(tmp_path: Path) -> None:
    plan = offloaded(tmp_path, "optimizer")
    deepspeed = export_deepspeed(plan)
    written = json.loads(deepspeed.files["ds_config.json"])
    assert written["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    script = export_megatron(plan).files["megatron.sh"]
    assert "--optimizer-cpu-offload --use-precision-aware-optimizer" in " ".join(script.split())


@pytest.mark.parametrize("export", [export_torch_pipelining, export_torchtitan, export_accelerate, export_jax])
def test_state_in_host_memory_is_a_plug_in_elsewhere(tmp_path: Path, export: Callable[[Plan], Exported]) -> None:
    losses = export(offloaded(tmp_path, "gradients")).losses
    assert [loss.step_s for loss in losses if "optimizer state in host memory" in loss.sentence] == [None]


def test_weights_in_host_memory_are_said_where_a_framework_has_a_word_for_them(tmp_path: Path) -> None:
    plan = planned(tmp_path, "tp: 1, dp: 4, offload: parameters")
    zero = json.loads(export_deepspeed(plan).files["ds_config.json"])["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu"}
    assert "fsdp_offload_params: true" in export_accelerate(plan).files["accelerate.yaml"]
    assert "enable_cpu_offload" in "".join(export_torchtitan(plan).files.values())
    assert "CPUOffloadPolicy" in "".join(export_torch_pipelining(plan).files.values())
    assert any("pinned_host" in loss.sentence for loss in export_jax(plan).losses)
    with pytest.raises(CheckError, match="keeps no weights in host memory"):
        export_megatron(plan)


def test_state_in_host_memory_without_what_it_takes_is_refused(tmp_path: Path) -> None:
    plan = offloaded(tmp_path, "none")
    with pytest.raises(CheckError, match="the plan shards nothing"):
        export_deepspeed(plan)
    with pytest.raises(CheckError, match="the plan has adamw with sharding none"):
        export_megatron(plan)


@pytest.mark.parametrize("export", [export_torch_pipelining, export_torchtitan, export_deepspeed])
def test_heads_that_are_filled_up_are_a_plug_in(tmp_path: Path, export: Callable[[Plan], Exported]) -> None:
    plan = planned(tmp_path, "tp: 4, pad_heads: true")
    told = [loss.sentence for loss in export(plan).losses]
    assert any("padded heads" in sentence for sentence in told)


def test_activations_in_host_memory_are_said_where_a_framework_has_a_word_for_them(tmp_path: Path) -> None:
    plan = planned(tmp_path, "tp: 1, dp: 4, recompute: none, offload: activations")
    for export in (export_torch_pipelining, export_torchtitan, export_accelerate, export_jax, export_deepspeed):
        told = [loss.sentence for loss in export(plan).losses if "activations in host memory" in loss.sentence]
        assert len(told) == 1, export
    with pytest.raises(CheckError, match="of fewer than all blocks"):
        export_megatron(plan)


def test_inputs_of_recomputed_blocks_in_host_memory_are_deepspeeds_cpu_checkpointing(tmp_path: Path) -> None:
    plan = planned(tmp_path, "tp: 1, dp: 4, sharding: optimizer, recompute: full, offload: optimizer+activations")
    stages = tuple(replace(stage, recompute="full") for stage in plan.stages)
    exported = export_deepspeed(replace(plan, stages=stages))
    written = json.loads(exported.files["ds_config.json"])
    assert written["activation_checkpointing"]["cpu_checkpointing"] is True
    assert written["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert not any("host memory" in loss.sentence for loss in exported.losses)
