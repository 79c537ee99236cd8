"""How FSDP is said by Accelerate, axolotl, the Trainer and VeOmni: what is sharded, what lies in host memory."""

from pathlib import Path
from typing import Any

import pytest

from mmplan.commands.import_kinds import read_files
from mmplan.scenario.formats.reading import Reading

ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  {}
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
AXOLOTL = """base_model: Qwen/Qwen2.5-7B
sequence_len: 8192
micro_batch_size: 2
gradient_accumulation_steps: 4
bf16: auto
{}
"""
TRAINER = (
    "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 2 "
    "--gradient_accumulation_steps 4 --model_max_length 2048 --bf16 True {}\n"
)
VEOMNI = """model:
  model_path: Qwen/Qwen2.5-VL-7B-Instruct
data:
  max_seq_len: 8192
train:
  micro_batch_size: 1
  global_batch_size: 32
  {}
"""


def read(tmp_path: Path, name: str, text: str) -> Reading:
    (tmp_path / name).write_text(text)
    return read_files([str(tmp_path / name)])


def present(reading: Reading) -> dict[str, Any]:
    """The recipe with the technique of the scenario under it."""
    fragment: Any = reading.fragment
    own = fragment["recipes"]["present"]
    return dict(fragment.get("technique", {})) | own | own.get("technique", {})


@pytest.mark.parametrize(
    ("name", "text", "said", "sharding", "offload"),
    [
        ("a.yaml", ACCELERATE, "fsdp_sharding_strategy: FULL_SHARD", "parameters", None),
        ("a.yaml", ACCELERATE, "fsdp_sharding_strategy: SHARD_GRAD_OP", "gradients", None),
        ("a.yaml", ACCELERATE, "fsdp_sharding_strategy: NO_SHARD", "none", None),
        ("a.yaml", ACCELERATE, "fsdp_version: 2\n  fsdp_reshard_after_forward: false", "gradients", None),
        ("a.yaml", ACCELERATE, "fsdp_version: 2\n  fsdp_reshard_after_forward: true", "parameters", None),
        ("a.yaml", ACCELERATE, "fsdp_reshard_after_forward: SHARD_GRAD_OP", "gradients", None),
        ("a.yaml", ACCELERATE, "fsdp_version: 2\n  fsdp_offload_params: true", "parameters", "parameters"),
        ("r.sh", TRAINER, '--fsdp "full_shard auto_wrap"', "parameters", None),
        ("r.sh", TRAINER, '--fsdp "shard_grad_op auto_wrap offload"', "gradients", "parameters"),
        ("r.sh", TRAINER, "--fsdp no_shard", "none", None),
        ("x.yaml", AXOLOTL, "fsdp:\n  - full_shard\n  - auto_wrap", "parameters", None),
        ("x.yaml", AXOLOTL, "fsdp: [shard_grad_op, offload]", "gradients", "parameters"),
        ("x.yaml", AXOLOTL, "fsdp_version: 2\nfsdp_config:\n  reshard_after_forward: false", "gradients", None),
        ("x.yaml", AXOLOTL, "fsdp_config:\n  offload_params: true", "parameters", "parameters"),
        ("v.yaml", VEOMNI, "data_parallel_mode: fsdp2", "parameters", None),
        ("v.yaml", VEOMNI, "data_parallel_mode: fsdp1\n  enable_full_shard: false", "gradients", None),
        ("v.yaml", VEOMNI, "data_parallel_mode: fsdp2\n  enable_fsdp_offload: true", "parameters", "parameters"),
    ],
)
def test_what_is_sharded_is_read_from_every_way_to_say_it(
    tmp_path: Path, name: str, text: str, said: str, sharding: str, offload: str | None
) -> None:
    found = present(read(tmp_path, name, text.format(said)))
    assert (found["sharding"], found.get("offload")) == (sharding, offload)


def test_axolotls_degrees_give_the_devices(tmp_path: Path) -> None:
    said = "context_parallel_size: 2\ntensor_parallel_size: 2\ndp_shard_size: 4\ndp_replicate_size: 2\nfsdp_version: 2"
    reading = read(tmp_path, "x.yaml", AXOLOTL.format(said))
    assert "tp 2 x cp 2 x pp 1 x dp 8 = 32 devices; global batch 64 = 4 x 2 x dp 8" in reading.read
    assert "dp_shard_size" not in " ".join(reading.ignored)
    assert "cp 4 x pp 1 x dp 2" in " ".join(
        read(tmp_path, "x.yaml", AXOLOTL.format("sequence_parallel_degree: 4")).read
    )


def test_offloaded_weights_of_accelerates_deepspeed_are_read(tmp_path: Path) -> None:
    text = ACCELERATE.replace("type: FSDP", "type: DEEPSPEED").replace("fsdp_config", "deepspeed_config")
    reading = read(tmp_path, "a.yaml", text.format("zero_stage: 3\n  offload_param_device: cpu"))
    assert present(reading)["offload"] == "parameters"
    reading = read(tmp_path, "a.yaml", text.format("zero_stage: 2\n  offload_optimizer_device: cpu"))
    assert (present(reading)["offload"], present(reading)["sharding"]) == ("optimizer", "gradients")
