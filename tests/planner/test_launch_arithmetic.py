"""What several files of one run imply together: processes, replicas, nodes, and files that are named and not given."""

import json
from pathlib import Path
from typing import Any

import pytest

from mmplan.commands.import_kinds import read_files
from mmplan.errors import InputError
from mmplan.scenario.formats.reading import Reading

SCRIPT = """deepspeed --num_gpus 8 train.py \\
    --deepspeed ./scripts/{settings} \\
    --model_name_or_path lmsys/vicuna-7b-v1.5 \\
    --bf16 True --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --model_max_length 2048
"""
DEEPSPEED = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}


def read(folder: Path, **files: str) -> Reading:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return read_files([str(folder / name.replace("__", ".")) for name in files])


def part(reading: Reading, key: str) -> dict[str, Any]:
    value = reading.fragment[key]
    assert isinstance(value, dict)
    return value


def told(reading: Reading) -> str:
    return "\n".join((*reading.read, *reading.ignored, *reading.warnings))


def test_deepspeeds_batch_implies_its_devices(tmp_path: Path) -> None:
    """256 / (2 x 4) = 32."""
    reading = read(tmp_path, ds__json=json.dumps(DEEPSPEED))
    assert part(reading, "cluster") == {"nodes": 4, "devices_per_node": 8}
    assert "32 replicas = 32 devices, from ds.json:1 train_batch_size" in told(reading)


@pytest.mark.parametrize(("batch", "nodes"), [(64, 1), (256, 4), (1024, 16)])
def test_batch_of_one_file_and_microbatch_of_another_imply_nodes(tmp_path: Path, batch: int, nodes: int) -> None:
    settings = json.dumps({"train_batch_size": batch, "zero_optimization": {"stage": 2}})
    reading = read(tmp_path, run__sh=SCRIPT.format(settings="zero2.json"), zero2__json=settings)
    assert part(reading, "cluster")["nodes"] == nodes
    assert part(reading, "batch") == {"global": batch}
    assert f"global batch / (microbatch x accumulation) = {batch // 8} replicas = {batch // 8} devices" in told(reading)


def test_a_batch_that_makes_no_whole_nodes_is_told(tmp_path: Path) -> None:
    """32 / (4 x 2) = 4 replicas; the script starts 8 processes."""
    settings = json.dumps({"train_batch_size": 32, "zero_optimization": {"stage": 2}})
    reading = read(tmp_path, run__sh=SCRIPT.format(settings="zero2.json"), zero2__json=settings)
    assert part(reading, "cluster")["devices_per_node"] == 8
    assert "= 4 replicas = 4 devices, no whole number of nodes of 8: not taken" in told(reading)


@pytest.mark.parametrize(
    ("name", "sharding", "offload"),
    [
        ("zero3.json", "parameters", None),
        ("ds_z2_config.json", "gradients", None),
        ("zero_stage1_config.json", "optimizer", None),
        ("zero3_offload.json", "parameters", "parameters"),
        ("ds_config_zero2_offload.json", "gradients", "optimizer"),
    ],
)
def test_settings_that_are_not_given_are_assumed_by_their_name_and_told_at_every_price(
    tmp_path: Path, name: str, sharding: str, offload: str | None
) -> None:
    reading = read(tmp_path, run__sh=SCRIPT.format(settings=name))
    recipe = part(reading, "recipes")["present"]
    assert recipe["sharding"] == sharding
    assert recipe.get("technique", {}).get("offload") == offload
    assert recipe["source"] == f"run.sh; without ./scripts/{name}, which was not given"
    assert f"{name} is not given: by its name ZeRO stage" in told(reading)


def test_a_name_without_a_stage_is_told(tmp_path: Path) -> None:
    reading = read(tmp_path, run__sh=SCRIPT.format(settings="ds_config.json"))
    assert "sharding" not in part(reading, "recipes")["present"]
    assert "ds_config.json is not given and its name says no ZeRO stage" in told(reading)


def test_megatron_deepspeed_names_its_file_beside_a_switch(tmp_path: Path) -> None:
    run = (
        "deepspeed --num_gpus 8 pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --bf16 "
        "--seq-length 64 --micro-batch-size 1 --global-batch-size 8 --vocab-size 100 "
        "--deepspeed --deepspeed_config ds.json {}\n"
    )
    reading = read(tmp_path, run__sh=run.format("--zero-stage 1"))
    recipe = part(reading, "recipes")["present"]
    assert (recipe["sharding"], recipe["source"]) == ("optimizer", "run.sh; without ds.json, which was not given")
    assert "ds.json is not given and its name says no ZeRO stage" in told(read(tmp_path, run__sh=run.format("")))


def test_the_file_itself_counts_and_another_one_is_told(tmp_path: Path) -> None:
    settings = json.dumps({"zero_optimization": {"stage": 2}})
    own = read(tmp_path, run__sh=SCRIPT.format(settings="zero3.json"), zero3__json=settings)
    assert part(own, "recipes")["present"]["sharding"] == "gradients"
    assert part(own, "recipes")["present"]["source"] == "run.sh, zero3.json"
    other = read(tmp_path, run__sh=SCRIPT.format(settings="zero3.json"), zero2__json=settings)
    assert "names './scripts/zero3.json', which is not among the files that are given" in told(other)


ACCELERATE = "distributed_type: {kind}\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: 16\n"
AXES = (
    "parallelism_config:\n  parallelism_config_tp_size: 2\n  parallelism_config_dp_shard_size: {shard}\n"
    "  parallelism_config_dp_replicate_size: 2\n"
)


def test_accelerates_processes_are_those_of_its_axes(tmp_path: Path) -> None:
    reading = read(tmp_path, a__yaml=ACCELERATE.format(kind="FSDP") + AXES.format(shard=4))
    assert part(reading, "cluster") == {"nodes": 2, "devices_per_node": 8}
    assert part(reading, "technique")["stack"] == "torch-2025"
    with pytest.raises(InputError, match="dp_shard 8 x dp_replicate 2 x tp 2 = 32 processes, the file starts 16"):
        read(tmp_path, a__yaml=ACCELERATE.format(kind="FSDP") + AXES.format(shard=8))
    with pytest.raises(InputError, match="expected a whole number from 1 on, found '-1'"):
        read(tmp_path, a__yaml=ACCELERATE.format(kind="FSDP") + AXES.format(shard=-1))


def test_accelerate_may_name_deepspeeds_file(tmp_path: Path) -> None:
    named = ACCELERATE.format(kind="DEEPSPEED") + "deepspeed_config:\n  deepspeed_config_file: zero3.json\n"
    reading = read(tmp_path, a__yaml=named)
    assert part(reading, "recipes")["present"]["sharding"] == "parameters"
    assert part(reading, "technique")["stack"] == "deepspeed-2024"
    assert part(reading, "cluster") == {"nodes": 2, "devices_per_node": 8}


@pytest.mark.parametrize(
    ("lines", "nodes"),
    [
        ("GPUS_PER_NODE=8\nNNODES=4\nWORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))\n", 4),
        ("GPUS_PER_NODE=8\nNNODES=${SLURM_NNODES:-2}\n", 2),
        ("#SBATCH --nodes=3\n#SBATCH --gpus-per-node=8\n", 3),
        ("export WORLD_SIZE=32\n", 4),
        ("export SLURM_NNODES=2\nNPROC_PER_NODE=8\n", 2),
    ],
)
def test_variables_of_launchers_are_the_machines(tmp_path: Path, lines: str, nodes: int) -> None:
    run = (
        "python pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
        "--micro-batch-size 1 --global-batch-size 96 --vocab-size 100 --tensor-model-parallel-size 2 --bf16\n"
    )
    reading = read(tmp_path, run__sh=f"#!/bin/bash\n{lines}{run}")
    assert part(reading, "cluster")["nodes"] == nodes
    assert part(reading, "cluster")["devices_per_node"] == 8


TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
{more}
seq_len = 2048
[parallelism]
data_parallel_replicate_degree = {replicate}
data_parallel_shard_degree = {shard}
tensor_parallel_degree = 2
"""


@pytest.mark.parametrize(
    ("replicate", "shard", "more", "devices"),
    [(2, 8, "", 32), (1, -1, "", 8), (1, -1, "global_batch_size = 8", 8), (4, -1, "", 8), (4, 1, "", 8)],
)
def test_torchtitans_degrees_of_minus_one_are_the_rest(
    tmp_path: Path, replicate: int, shard: int, more: str, devices: int
) -> None:
    cluster = part(read(tmp_path, t__toml=TITAN.format(replicate=replicate, shard=shard, more=more)), "cluster")
    assert cluster["nodes"] * cluster["devices_per_node"] == devices


def test_torchtitans_rest_is_a_multiple_of_its_replicas(tmp_path: Path) -> None:
    cluster = part(read(tmp_path, t__toml=TITAN.format(replicate=8, shard=-1, more="")), "cluster")
    assert cluster["nodes"] * cluster["devices_per_node"] == 16
