"""DeepSpeed JSON, torchtitan TOML and YAML of frameworks: their words for the same run."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.commands.import_kinds import KINDS, read_files
from mmplan.errors import InputError
from mmplan.scenario.formats.reading import Reading


def read(tmp_path: Path, name: str, text: str) -> Reading:
    (tmp_path / name).write_text(text)
    return read_files([str(tmp_path / name)])


def told(reading: Reading) -> str:
    return "\n".join((*reading.read, *reading.ignored, *reading.warnings))


def recipe(reading: Reading) -> dict[str, object]:
    return dict(reading.fragment["recipes"]["present"])  # type: ignore[index]


DEEPSPEED = """{
  // comments run, as DeepSpeed reads Hjson
  "train_batch_size": 64, # per step
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 4,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "zero_hpz_partition_size": 8,},
  "my_key": 1,
}
"""


def test_deepspeed_settings_with_comments_and_unknown_keys(tmp_path: Path) -> None:
    reading = read(tmp_path, "ds.json", DEEPSPEED)
    assert (reading.kind, recipe(reading)["sharding"], reading.fragment["precision"]) == (
        "deepspeed",
        "parameters",
        "bf16",
    )
    assert reading.fragment["technique"]["offload"] == "parameters"  # type: ignore[index]
    assert "keys that DeepSpeed does not know: 'my_key'" in told(reading)
    assert "zero_hpz_partition_size = 8: shards inside groups" in told(reading)


def test_batch_sizes_that_do_not_divide_are_refused_with_the_arithmetic(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"train_batch_size 63 / \(micro 2 x accumulation 4\) = 7.875 replicas"
    ) as caught:
        read(tmp_path, "ds.json", DEEPSPEED.replace("64", "63"))
    assert caught.value.line == 3


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('"stage": 3', '"stage": 4'), "expected a ZeRO stage from 0 to 3, found 4"),
        (('"my_key": 1', '"my_key": NaN'), "not valid JSON"),
        (('"my_key": 1', '"bf16": {}'), "the key 'bf16' stands twice"),
        (('{"enabled": true}', "[1]"), "expected a mapping, found a list of 1 item"),
        (('"train_batch_size": 64', '"train_batch_size": -8'), "expected a whole number from 1 on"),
    ],
)
def test_impossible_deepspeed_settings_are_refused(tmp_path: Path, change: tuple[str, str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read(tmp_path, "ds.json", DEEPSPEED.replace(*change))


def test_a_template_says_which_values_another_script_fills_in(tmp_path: Path) -> None:
    text = '{"train_batch_size": BATCH, "zero_optimization": {"stage": ZERO_STAGE}, "bf16": {"enabled": true}}'
    reading = read(tmp_path, "ds.json", text)
    assert "a template: another script fills in 'BATCH', 'ZERO_STAGE'" in told(reading)
    assert "recipes" not in reading.fragment


TITAN = """# preset for 64 H100 GPUs
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 8
seq_len = 8192
speed_hack = true
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "full"
"""


def test_torchtitan_runs_a_local_batch_in_microbatches_where_a_pipeline_is(tmp_path: Path) -> None:
    reading = read(tmp_path, "run.toml", TITAN)
    assert recipe(reading) == {
        "source": "run.toml", "tp": 8, "pp": 2, "vp": 2, "microbatch": 1, "sharding": "gradients", "recompute": "full",
        "technique": {"overlap_dp": True},
    }  # fmt: skip
    assert reading.fragment["cluster"] == {"device": "h100-sxm", "nodes": 8, "devices_per_node": 8}
    assert reading.fragment["batch"] == {"global": 32}  # 8 samples x dp 4
    assert "keys that torchtitan does not know and that are not read: 'training.speed_hack'" in told(reading)


def test_torchtitan_without_a_pipeline_runs_it_at_once_and_old_keys_are_read(tmp_path: Path) -> None:
    old = TITAN.replace("local_batch_size", "batch_size").replace(
        "pipeline_parallel_degree = 2", "pipeline_parallel_degree = 1"
    )
    reading = read(tmp_path, "run.toml", old)
    assert (recipe(reading)["microbatch"], recipe(reading)["sharding"]) == (8, "parameters")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("seq_len = 8192", "seq_len = "), "not valid TOML"),
        (("tensor_parallel_degree = 8", "tensor_parallel_degree = true"), "expected a number, found the boolean true"),
        (("tensor_parallel_degree = 8", "tensor_parallel_degree = 3"), "no whole number"),
    ],
)
def test_impossible_torchtitan_files_are_refused(tmp_path: Path, change: tuple[str, str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read(tmp_path, "run.toml", TITAN.replace(*change))


NEMO = """
trainer: {devices: 8, num_nodes: 4, precision: bf16-mixed}
model:
  precision: ${trainer.precision}
  micro_batch_size: 2
  global_batch_size: 256
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: null
  sequence_parallel: true
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  activation: fast-swiglu
  normalization: rmsnorm
  bias: false
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  activations_checkpoint_granularity: selective
  tokenizer: {type: meta-llama/Meta-Llama-3-8B, model: "${data_dir}/x"}
  optim: {name: distributed_fused_adam}
"""


def test_nemo_yaml_with_its_references(tmp_path: Path) -> None:
    reading = read(tmp_path, "nemo.yaml", NEMO)
    assert (reading.kind, reading.document) == ("nemo", "scenario")
    llm = reading.fragment["model"]["modules"]["llm"]  # type: ignore[index]
    assert (llm["layers"], llm["kv_heads"], llm["ffn"], llm["vocabulary"]) == (32, 8, 14336, 128256)
    assert {key: recipe(reading)[key] for key in ("tp", "pp", "microbatch", "sharding", "recompute")} == {
        "tp": 4, "pp": 2, "microbatch": 2, "sharding": "optimizer", "recompute": "selective",
    }  # fmt: skip
    assert reading.fragment["cluster"]["nodes"] == 4  # type: ignore[index]


FACTORY = """
model_name_or_path: Qwen/Qwen2-VL-7B-Instruct
image_max_pixels: 262144
stage: sft
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj
template: qwen2_vl
cutoff_len: 2048
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
bf16: true
"""


@pytest.mark.parametrize(
    ("said", "ffn"),
    [
        ("${multiply:4, ${.hidden_size}}", 16384),
        ("${divide_ceil:${model.hidden_size},3}", 1366),
        ("${divide_floor:${.hidden_size}, 3}", 1365),
    ],
)
def test_sums_of_nemos_launcher_are_done(tmp_path: Path, said: str, ffn: int) -> None:
    text = (
        "trainer: {num_nodes: 1, devices: 8, precision: bf16}\nmodel:\n  micro_batch_size: 4\n  global_batch_size: 64\n"
        "  tensor_model_parallel_size: 2\n  encoder_seq_length: 2048\n  num_layers: 24\n  hidden_size: 4096\n"
        f"  ffn_hidden_size: {said}\n  num_attention_heads: 32\n"
    )
    assert read(tmp_path, "g.yaml", text).fragment["model"]["modules"]["llm"]["ffn"] == ffn  # type: ignore[index]
    with pytest.raises(InputError, match="no line sets these values"):
        read(tmp_path, "g.yaml", text.replace(said, "${multiply:4, ${.nothing}}"))
    with pytest.raises(InputError, match="no line sets these values"):
        read(tmp_path, "g.yaml", text.replace(said, "${multiply:2, ${.ffn_hidden_size}}"))


def test_python_is_refused_for_what_it_is(tmp_path: Path) -> None:
    text = "from torchtitan.trainer import Trainer\n\n\ndef plan():\n    return Trainer.Config()\n"
    with pytest.raises(InputError, match="a Python file, and nothing in a file is executed: give the command line"):
        read(tmp_path, "plan.py", text)
    with pytest.raises(InputError, match="Python configurations are not executed: give the log of the run"):
        read_files(["torchtitan", str(tmp_path / "plan.py")])


def test_yaml_of_swift_with_megatrons_degrees_is_swifts(tmp_path: Path) -> None:
    text = (
        "model: Qwen/Qwen2.5-VL-7B-Instruct\ntensor_model_parallel_size: 2\npipeline_model_parallel_size: 2\n"
        "micro_batch_size: 1\nglobal_batch_size: 16\nmax_length: 8192\nfreeze_vit: true\n"
    )
    for more in ("", "tuner_type: full\n"):
        reading = read(tmp_path, "s.yaml", text + more)
        assert (reading.kind, recipe(reading)["tp"], recipe(reading)["pp"]) == ("ms-swift", 2, 2)


def test_a_schedule_in_torchtitans_old_table_is_read(tmp_path: Path) -> None:
    text = (
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nbatch_size = 4\nseq_len = 8192\n'
        "data_parallel_shard_degree = 2\ntensor_parallel_degree = 2\n[experimental]\npipeline_parallel_degree = 2\n"
        'pipeline_parallel_schedule = "Interleaved1F1B"\npipeline_parallel_microbatches = 2\n'
    )
    reading = read(tmp_path, "t.toml", text)
    assert {key: recipe(reading)[key] for key in ("pp", "vp", "microbatch")} == {"pp": 2, "vp": 2, "microbatch": 2}
    assert "experimental" not in " ".join(reading.ignored)


def test_llama_factory_freezes_the_encoder_unless_told_and_trains_adapters(tmp_path: Path) -> None:
    reading = read(tmp_path, "sft.yaml", FACTORY)
    assert reading.kind == "llama-factory"
    adapters = {"lora": {"rank": 16, "targets": ["q", "v"]}}
    assert reading.fragment["train"] == {"vision": "frozen", "projector": "frozen", "llm": adapters}
    assert reading.fragment["data"] == {"text_tokens": 2048 - 324, "images": 1, "image_size": 512}
    assert reading.fragment["batch"] == {"global": 64}


def test_veomni_names_ulysses(tmp_path: Path) -> None:
    text = """
model: {model_path: Qwen/Qwen2.5-VL-7B-Instruct}
data: {max_seq_len: 8192}
train:
  micro_batch_size: 1
  global_batch_size: 32
  freeze_vit: true
  accelerator: {ulysses_size: 4, fsdp_config: {fsdp_mode: fsdp2}}
"""
    reading = read(tmp_path, "v.yaml", text)
    assert (reading.kind, recipe(reading)["cp"], recipe(reading)["sharding"]) == ("veomni", 4, "parameters")
    assert reading.fragment["technique"]["context_parallel"] == "all-to-all"  # type: ignore[index]
    assert reading.fragment["train"] == {"vision": "frozen"}


def test_automodel_recipes_that_train_no_model_by_themselves_are_refused(tmp_path: Path) -> None:
    good = """
recipe: TrainFinetuneRecipeForVLM
step_scheduler: {global_batch_size: 8, local_batch_size: 1}
model: {_target_: nemo_automodel.X.from_pretrained, pretrained_model_name_or_path: Qwen/Qwen2.5-VL-7B-Instruct}
distributed: {strategy: fsdp2, tp_size: 2, cp_size: 1}
freeze_config: {freeze_vision_tower: true}
"""
    reading = read(tmp_path, "a.yaml", good)
    assert (reading.kind, recipe(reading)["tp"], reading.fragment["train"]) == ("automodel", 2, {"vision": "frozen"})
    with pytest.raises(InputError, match="trains a draft model for speculative decoding"):
        read(tmp_path, "a.yaml", good.replace("TrainFinetuneRecipeForVLM", "TrainEagle3Recipe"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trainer: !!python/object/apply:os.system ls\nmodel: {tensor_model_parallel_size: 2}", "not allowed"),
        (
            "trainer: &a [*a]\nmodel: {micro_batch_size: 2, tensor_model_parallel_size: 2}\n",
            "nested deeper|not valid YAML",
        ),
        ("model:\n  tensor_model_parallel_size: 2\n  tensor_model_parallel_size: 4\n", "stands twice"),
        ("trainer: {devices: 8, num_nodes: 1}\nmodel:\n  tensor_model_parallel_size: ???\n", "no line sets"),
    ],
)
def test_unsafe_or_unfinished_yaml_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read(tmp_path, "x.yaml", text)


WHOLE = {
    "deepspeed": ("m.json", DEEPSPEED),
    "torchtitan": ("m.toml", TITAN),
    "nemo": ("m.yaml", NEMO),
    "llama-factory": ("m.yaml", FACTORY),
}
PUT = ("", "{", "}", "[", '"', "'", ":", "=", "\n", "${a}", "${.}", "-1", "9" * 30, "null", "\x00", "é", "*x", "&x")


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(sorted(WHOLE)),
    at=st.integers(0, 700),
    drop=st.integers(0, 30),
    put=st.sampled_from(PUT),
)
def test_damaged_files_end_with_a_sentence_or_a_reading(
    tmp_path_factory: pytest.TempPathFactory, kind: str, at: int, drop: int, put: str
) -> None:
    name, text = WHOLE[kind]
    path = tmp_path_factory.mktemp("damaged") / name
    path.write_text(text[:at] + put + text[at + drop :])
    try:
        KINDS[kind].read([path])
    except InputError as error:
        assert error.file == path


def test_hybrid_shards_of_accelerate_are_told(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\nnum_processes: 16\n"
    reading = read(tmp_path, "accelerate.yaml", text)
    assert reading.fragment["technique"] == {"stack": "torch-2025", "sharding": "parameters"}
    assert "states are sharded inside nodes" in told(reading)


def test_a_talker_is_frozen_and_swift_freezes_encoders_and_projectors(tmp_path: Path) -> None:
    text = "model: Qwen/Qwen2.5-Omni-7B\ntuner_type: full\ntorch_dtype: bfloat16\nmax_length: 4096\n"
    reading = read(tmp_path, "swift.yaml", text + "per_device_train_batch_size: 1\n")
    assert isinstance(train := reading.fragment["train"], dict)
    assert set(train.values()) == {"frozen"}
    assert {"vision", "audio", "talker"} <= train.keys() and "llm" not in train
    assert reading.fragment["data"]["speech_tokens"] == 1  # type: ignore[index]
    assert "the talker is read as frozen" in told(reading)


def test_automodel_with_degrees_runs_on_torch(tmp_path: Path) -> None:
    text = (
        "recipe: TrainFinetuneRecipeForVLM\nstep_scheduler: {global_batch_size: 64, local_batch_size: 1}\n"
        "model: {pretrained_model_name_or_path: Qwen/Qwen2.5-VL-7B-Instruct, torch_dtype: torch.bfloat16}\n"
        "distributed: {strategy: fsdp2, dp_size: 8, tp_size: 2}\npacked_sequence: {packed_sequence_size: 4096}\n"
    )
    reading = read(tmp_path, "a.yaml", text)
    assert reading.fragment["technique"]["stack"] == "torch-2025"  # type: ignore[index]
    assert recipe(reading)["tp"] == 2 and "dp 8 = 16 devices" in told(reading)


def test_none_of_automodel_is_no_value(tmp_path: Path) -> None:
    text = "step_scheduler: {global_batch_size: 8, local_batch_size: 1}\ndistributed: {dp_size: none, tp_size: 2}\n"
    text += "model: {pretrained_model_name_or_path: Qwen/Qwen2.5-VL-7B-Instruct}\ndataset: {seq_length: 2048}\n"
    (tmp_path / "run.yaml").write_text(text)
    assert recipe(read_files(["automodel", str(tmp_path / "run.yaml")]))["tp"] == 2


def test_experts_of_swift_are_whole_where_nothing_splits_them(tmp_path: Path) -> None:
    arguments = "--tensor_model_parallel_size 2 --expert_model_parallel_size 8 --max_length 4096 --micro_batch_size 1"
    model = "--model Qwen/Qwen3-VL-30B-A3B-Instruct --global_batch_size 16 --pipeline_model_parallel_size 2"
    reading = read(tmp_path, "run.sh", f"NPROC_PER_NODE=8 NNODES=2 megatron sft {model} {arguments}\n")
    assert recipe(reading)["etp"] == 1
    assert "expert_tensor_parallel_size is not written: 1" in told(reading)


def test_two_precisions_at_once_are_refused_as_deepspeed_does(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fp16 and bf16 are both enabled"):
        read(tmp_path, "ds.json", DEEPSPEED.replace('"my_key": 1', '"fp16": {"enabled": true}'))


def test_a_pipeline_that_is_emptied_several_times_a_step_is_told(tmp_path: Path) -> None:
    text = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 8
global_batch_size = 512
seq_len = 8192
[parallelism]
pipeline_parallel_degree = 4
data_parallel_shard_degree = 4
"""
    reading = read(tmp_path, "t.toml", text)
    assert "after 8 of 128 microbatches, 16 times a step: its bubble is about 27%" in told(reading)  # 3 / 11
    assert "empties" not in told(read(tmp_path, "t.toml", text.replace("512", "32")))


@pytest.mark.parametrize(
    ("word", "way"), [("p2p", "ring"), ("all_gather", "gather"), ("a2a", "all-to-all"), ("a2a+p2p", "all-to-all")]
)
def test_megatron_names_how_keys_and_values_come_together(tmp_path: Path, word: str, way: str) -> None:
    text = f"""torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 \\
    --num-attention-heads 32 --context-parallel-size 2 --cp-comm-type {word} --seq-length 8192 \\
    --micro-batch-size 1 --global-batch-size 16"""
    assert read(tmp_path, "run.sh", text).fragment["technique"]["context_parallel"] == way  # type: ignore[index]
