"""Launch files become scenarios whose recipe is the run they start; what they leave open is told or asked for."""

from pathlib import Path

import pytest
import yaml

from mmplan.commands.export_targets import exported
from mmplan.commands.import_kinds import read_files
from mmplan.errors import InputError
from mmplan.planner.fit import fit
from mmplan.planner.fit_job import Question, job_of
from mmplan.planner.recipes import plan_recipe
from mmplan.report.formats import fragment_text
from mmplan.scenario.formats.reading import Reading
from mmplan.scenario.load import load_scenario

GPT = """#!/bin/bash
# on 16 A100-SXM4-80GB
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \\
  --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --group-query-attention --num-query-groups 4 \\
  --ffn-hidden-size 5504 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \\
  --position-embedding-type rope --seq-length 4096 --vocab-size 32000 --micro-batch-size 2 --global-batch-size 128 \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 6 \\
  --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --bf16 --attention-backend fused \\
  --recompute-granularity selective --attention-dropout 0.0 --hidden-dropout 0.0 --lr 1e-4
"""


def reading(tmp_path: Path, **files: str) -> Reading:
    paths = []
    for name, text in files.items():
        path = tmp_path / name.replace("__", ".")
        path.write_text(text)
        paths.append(str(path))
    return read_files(paths)


def told(read: Reading) -> str:
    return "\n".join((*read.read, *read.warnings))


def test_a_megatron_script_is_a_scenario_with_its_run_as_recipe(tmp_path: Path) -> None:
    read = reading(tmp_path, run__sh=GPT)
    assert (read.kind, read.document) == ("megatron", "scenario")
    fragment = read.fragment
    assert fragment["name"] == "run"
    assert fragment["model"]["modules"]["llm"] == {  # type: ignore[index]
        "kind": "language_model", "layers": 24, "hidden": 2048, "heads": 16, "ffn": 5504, "kv_heads": 4,
        "vocabulary": 32000, "pad_vocabulary": 128,
    }  # fmt: skip
    recipe = fragment["recipes"]["present"]  # type: ignore[index]
    assert {key: recipe[key] for key in ("tp", "pp", "vp", "microbatch", "sharding", "recompute")} == {
        "tp": 2, "pp": 2, "vp": 2, "microbatch": 2, "sharding": "optimizer", "recompute": "selective",
    }  # fmt: skip
    assert fragment["cluster"] == {"device": "a100-sxm-80", "nodes": 2, "devices_per_node": 8}
    assert (fragment["batch"], fragment["precision"], fragment["data"]) == (
        {"global": 128},
        "bf16",
        {"text_tokens": 4096},
    )
    assert "tp 2 x cp 1 x pp 2 x dp 4 = 16 devices, 2 chunks per rank; global batch 128 = 16 x 2 x dp 4" in told(read)


def test_fit_prices_the_imported_run_without_options_and_options_change_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(fragment_text(reading(tmp_path, run__sh=GPT)))
    scenario, degrees = job_of(Question(scenario=path))
    assert (degrees.tp, degrees.pp, degrees.vp, degrees.dp, degrees.microbatch_size) == (2, 2, 2, 4, 2)
    assert (scenario.technique.sharding, scenario.technique.attention, scenario.technique.overlap_dp) == (
        "optimizer", "cudnn", True,
    )  # fmt: skip
    assert fit(scenario, degrees).step is not None
    assert job_of(Question(scenario=path, tp=4))[1].dp == 2
    with pytest.raises(InputError, match="has no recipe 'presnt'; did you mean 'present'"):
        job_of(Question(scenario=path, recipe="presnt"))


def test_parts_of_what_is_recomputed_and_offloaded_are_told(tmp_path: Path) -> None:
    more = "--recompute-modules mlp moe_act --optimizer-cpu-offload --optimizer-offload-fraction 0.5"
    read = reading(tmp_path, run__sh=GPT.replace("--bf16", f"--bf16 {more} --main-grads-dtype bf16"))
    assert "--recompute-modules mlp moe_act: selective recomputation is priced as of attention alone" in told(read)
    assert "--optimizer-offload-fraction 0.5: the whole optimizer is priced as offloaded" in told(read)
    assert read.fragment["optimizer"] == {"gradient_dtype": "bf16"}
    quiet = GPT.replace("--bf16", "--bf16 --recompute-modules core_attn --optimizer-offload-fraction 1.0")
    assert "priced as" not in told(reading(tmp_path, run__sh=quiet))


def test_the_imported_run_is_a_baseline_beside_plans(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(fragment_text(reading(tmp_path, run__sh=GPT)))
    scenario = load_scenario(path)
    assert not scenario.technique.overlap_dp  # plans do not price it; the recipe has it for `mmplan fit`
    planned = plan_recipe(scenario, scenario.recipes[0])
    assert planned.plan is not None
    assert (planned.plan.tp, planned.plan.dp, planned.plan.sharding) == (2, 4, "optimizer")
    assert "plans do not price overlap_dp true; mmplan fit does" in planned.note


def test_an_exported_plan_is_imported_with_its_degrees(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    script = GPT.replace("--num-layers-per-virtual-pipeline-stage 6", "")
    path.write_text(fragment_text(reading(tmp_path, run__sh=script)))
    scenario = load_scenario(path)
    plan = plan_recipe(scenario, scenario.recipes[0]).plan
    assert plan is not None
    (launch,) = [text for text in exported(plan, "megatron").files.values() if "--num-layers" in text]
    again = reading(tmp_path, again__sh=launch)
    recipe = again.fragment["recipes"]["present"]  # type: ignore[index]
    assert (recipe["tp"], recipe["pp"], recipe["microbatch"]) == (plan.tp, plan.pp, plan.microbatch_size)
    assert again.fragment["batch"] == {"global": scenario.global_batch}
    llm = again.fragment["model"]["modules"]["llm"]  # type: ignore[index]
    assert {key: llm[key] for key in ("layers", "hidden", "heads", "kv_heads", "ffn")} == {
        "layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 4, "ffn": 5504,
    }  # fmt: skip


def test_a_needed_variable_that_no_line_sets_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--tensor-model-parallel-size \$\{TP\}.*no line sets") as caught:
        reading(tmp_path, run__sh=GPT.replace("parallel-size 2 --pipe", "parallel-size ${TP} --pipe"))
    assert caught.value.line == 7


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--tokenizer-type GPT2BPETokenizer\n--input a.json\n--output-prefix b\n", "preprocesses data"),
        ("--num-layers 2\n--hidden-size 8\n--out-seq-length 20\n--micro-batch-size 4\n", "text generation"),
        ("--encoder-num-layers 2\n--decoder-num-layers 2\n--hidden-size 8\n--micro-batch-size 4\n", "T5"),
        ("--num-layers 2\n--hybrid-layer-pattern MEM*\n--hidden-size 8\n--micro-batch-size 4\n", "Mamba"),
        ("--nproc_per_node 8\n--nnodes 2\n--recipe ${NAME}\n", "no degrees, batch or sizes"),
    ],
)
def test_what_does_not_train_is_refused_for_what_it_is(tmp_path: Path, arguments: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        reading(tmp_path, tool__args=arguments)


def test_degrees_that_need_more_devices_than_the_script_starts_are_told(tmp_path: Path) -> None:
    read = reading(
        tmp_path, run__sh=GPT.replace("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 12")
    )
    assert read.fragment["cluster"]["nodes"] == 3  # type: ignore[index]
    assert "tp 2 x cp 1 x pp 12 = 24 devices, the file starts 16: 24 are taken" in told(read)


def test_vision_arguments_are_a_tower_with_its_projector(tmp_path: Path) -> None:
    vision = "--vision-model-type internvit --img-h 448 --patch-dim 14 --pixel-shuffle --freeze-ViT --freeze-LM --lr"
    read = reading(tmp_path, run__sh=GPT.replace("--lr", vision))
    modules = read.fragment["model"]["modules"]  # type: ignore[index]
    assert modules["vision"]["hidden"] == 3200
    assert (modules["projector"]["dims"], modules["projector"]["merge"]) == ([12800, 2048, 2048], 4)
    assert read.fragment["train"] == {"vision": "frozen", "llm": "frozen"}
    assert read.fragment["data"] == {"text_tokens": 4096 - 256, "images": 1}  # 32 x 32 patches, four joined


def test_latent_attention_keeps_the_norms_of_its_own(tmp_path: Path) -> None:
    """DeepSeek's scripts write --qk-layernorm beside --multi-latent-attention: the norms of the latents."""
    latent = "--multi-latent-attention --q-lora-rank 512 --kv-lora-rank 256 --qk-layernorm --lr"
    llm = reading(tmp_path, run__sh=GPT.replace("--lr", latent)).fragment["model"]["modules"]["llm"]  # type: ignore[index]
    assert (llm["mla"]["kv_lora"], "qk_norm" in llm) == (256, False)
    llm = reading(tmp_path, run__sh=GPT.replace("--lr", "--qk-layernorm --lr")).fragment["model"]["modules"]["llm"]  # type: ignore[index]
    assert llm["qk_norm"]


TRAINER = """deepspeed --num_gpus 8 train.py --deepspeed ds.json --model_name_or_path Qwen/Qwen2.5-VL-7B-Instruct \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --bf16 True --model_max_length 4096 \\
  --gradient_checkpointing True
"""


@pytest.mark.parametrize(
    ("arguments", "frozen"),
    [
        ("--tune_mm_vision False --tune_mm_mlp True --tune_mm_llm True", {"vision"}),
        ("--tune_mm_mlp True", {"vision", "llm"}),  # the other switches are off by default
        ("--mm_tunable_parts mm_mlp_adapter", {"vision", "llm"}),
        ("--mm_tunable_parts=mm_mlp_adapter,mm_language_model", {"vision"}),
        ("--mm_tunable_parts=mm_vision_tower,mm_mlp_adapter,mm_language_model", set()),
    ],
)
def test_parts_that_a_script_tunes_leave_the_others_frozen(tmp_path: Path, arguments: str, frozen: set[str]) -> None:
    read = reading(tmp_path, run__sh=TRAINER.replace("--bf16", f"{arguments} --bf16"))
    assert read.fragment.get("train", {}) == dict.fromkeys(sorted(frozen, reverse=True), "frozen")


@pytest.mark.parametrize(
    ("tower", "sizes", "known"),
    [
        ("google/siglip-so400m-patch14-384", (1152, 14, 378), True),  # 27 whole patches
        ("google/siglip2-so400m-patch16-512", (1152, 16, 512), True),
        ("openai/clip-vit-large-patch14", (1024, 14, 224), True),
        ("google/siglip-base-patch16-224", (1024, 16, 224), False),
    ],
)
def test_a_tower_is_its_name_whole_and_no_other(
    tmp_path: Path, tower: str, sizes: tuple[int, int, int], known: bool
) -> None:
    model = TRAINER.replace("Qwen/Qwen2.5-VL-7B-Instruct", f"Qwen/Qwen2-7B-Instruct --vision_tower {tower}")
    read = reading(tmp_path, run__sh=model)
    vision = read.fragment["model"]["modules"]["vision"]  # type: ignore[index]
    assert tuple(vision[key] for key in ("hidden", "patch", "image_size")) == sizes
    assert (f"the sizes of the vision tower '{tower}' are not known" in told(read)) != known


def test_the_most_pixels_of_a_script_are_the_side_of_its_images(tmp_path: Path) -> None:
    read = reading(tmp_path, run__sh=TRAINER.replace("--bf16", "--max_pixels 50176 --bf16"))
    assert read.fragment["data"] == {"text_tokens": 4096 - 64, "images": 1, "image_size": 224}  # (224 / 28)^2 tokens


def test_a_script_and_its_deepspeed_file_are_one_run(tmp_path: Path) -> None:
    settings = (
        '{"train_micro_batch_size_per_gpu": "auto", '
        '"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'
    )
    read = reading(tmp_path, run__sh=TRAINER, ds__json=settings)
    assert read.document == "scenario"
    assert read.fragment["model"] == {"hf_config": "qwen2.5-vl-7b"}
    assert read.fragment["batch"] == {"global": 64}
    recipe = read.fragment["recipes"]["present"]  # type: ignore[index]
    assert "give it beside this one" not in told(read)
    assert recipe["sharding"] == "gradients"
    assert recipe["technique"] == {"offload": "optimizer", "overlap_dp": True}


def test_files_that_contradict_each_other_are_told_with_both_places(tmp_path: Path) -> None:
    settings = '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}'
    read = reading(tmp_path, run__sh=TRAINER, ds__json=settings)
    assert (
        "run.sh:2 --per_device_train_batch_size = '2' and ds.json:1 train_micro_batch_size_per_gpu = 4 contradict"
        in told(read)
    )


def test_scripts_of_two_runs_are_refused(tmp_path: Path) -> None:
    other = GPT.replace("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4")
    with pytest.raises(InputError, match=r"these are two runs: a\.sh:7 --tensor-model-parallel-size = '2', here '4'"):
        reading(tmp_path, a__sh=GPT, b__sh=other)


def test_a_config_beside_a_script_gives_its_model(tmp_path: Path) -> None:
    config = '{"model_type": "qwen2_vl", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, ' \
             '"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "vision_config": ' \
             '{"hidden_size": 1536}}'  # fmt: skip
    script = TRAINER.replace("Qwen/Qwen2.5-VL-7B-Instruct", "/checkpoints/ours")
    alone = reading(tmp_path, run__sh=script)
    assert alone.document == "part of a scenario"
    assert "the sizes of '/checkpoints/ours'" in told(alone)
    both = reading(tmp_path, run__sh=script, config__json=config)
    assert both.document == "scenario"
    assert both.fragment["model"] == {"hf_config": str((tmp_path / "config.json").resolve())}


def test_the_degrees_of_a_model_that_is_not_known_give_devices_and_batch(tmp_path: Path) -> None:
    settings = (
        '[model]\nname = "mystery"\nflavor = "77B"\n[training]\nlocal_batch_size = 2\nseq_len = 8192\n'
        "[parallelism]\ndata_parallel_shard_degree = 8\ntensor_parallel_degree = 4\npipeline_parallel_degree = 2\n"
    )
    read = reading(tmp_path, job__toml=settings)
    assert read.fragment["cluster"] == {"nodes": 8, "devices_per_node": 8}
    assert read.fragment["batch"] == {"global": 16}
    assert "8 replicas = 64 devices" in told(read)
    assert "give its config.json too; the GPU" in told(read)


def test_files_of_the_machines_fill_what_the_launch_leaves_open(tmp_path: Path) -> None:
    script = GPT.replace("--nnodes 2", "").replace("# on 16 A100-SXM4-80GB\n", "")
    alone = reading(tmp_path, run__sh=script)
    assert alone.fragment["cluster"]["nodes"] == 1  # type: ignore[index]
    hosts = "".join(f"node{index} slots=8\n" for index in range(4))
    both = reading(tmp_path, run__sh=script, hostfile=hosts)
    assert both.fragment["cluster"] == {"device": "h100-sxm", "nodes": 4, "devices_per_node": 8}


def test_files_of_the_machines_alone_are_one_cluster_and_unlike_counts_are_told(tmp_path: Path) -> None:
    matrix = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV12\t0-15\nGPU1\tNV12\t X \t0-15\n"
    topology = f"GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-1)\n{matrix}"
    same = reading(tmp_path, topo__txt=topology, hostfile="a slots=2\nb slots=2\n")
    assert dict(same.fragment["cluster"]) == {  # type: ignore[call-overload]
        "device": "a100-sxm-80", "nodes": 2, "devices_per_node": 2, "node_link": "nvlink3",
    }  # fmt: skip
    assert "which is taken" not in told(same)
    other = reading(tmp_path, topo__txt=topology, hostfile="a slots=4\nb slots=4\n")
    assert "devices_per_node: nvidia-topo says 2, another file of the machines 4, which is taken" in told(other)
    with pytest.raises(InputError, match="hosts gives pools of unlike nodes: import each file alone"):
        reading(tmp_path, topo__txt=topology, hostfile="a slots=2\nb slots=4\n")


def test_a_layout_counts_the_chunks_of_a_rank(tmp_path: Path) -> None:
    layout = '--pipeline-model-parallel-layout "Et*3|(tt|)*9tL"'  # 1 + 9 + 1 parts
    with pytest.raises(InputError, match=r"11 stages of the layout / pp 2 = 5\.5 per rank"):
        reading(tmp_path, run__sh=GPT.replace("--num-layers-per-virtual-pipeline-stage 6", layout))
    read = reading(
        tmp_path, run__sh=GPT.replace("--num-layers-per-virtual-pipeline-stage 6", layout.replace("*9tL", "*8tL"))
    )
    assert read.fragment["recipes"]["present"]["vp"] == 5  # type: ignore[index]


def test_the_text_of_a_fragment_reads_back_as_the_fragment(tmp_path: Path) -> None:
    read = reading(tmp_path, run__sh=GPT)
    assert yaml.safe_load(fragment_text(read)) == dict(read.fragment)


MATRIX = """\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\t0-31\t0
GPU1\tNV18\t X \t0-31\t0
"""
BATCH_JOB = """#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --gres=gpu:{gpu}:2
srun --nodes=1 hostname
srun torchrun --nnodes 2 --nproc_per_node 2 pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 \\
  --micro-batch-size 1 --global-batch-size 8 --seq-length 512 --bf16
"""


def test_the_device_of_a_batch_job_tells_which_nvlinks_a_topology_counts(tmp_path: Path) -> None:
    found = reading(tmp_path, job=BATCH_JOB.format(nodes=2, gpu="b200"), topology=MATRIX)
    cluster = found.fragment["cluster"]
    assert isinstance(cluster, dict) and (cluster["device"], cluster["node_link"]) == ("b200", "nvlink5")
    assert "write cluster.device" not in told(found)


def test_a_gpu_of_several_memory_sizes_and_two_numbers_of_nodes_are_told(tmp_path: Path) -> None:
    warnings = told(reading(tmp_path, job=BATCH_JOB.format(nodes=4, gpu="a100")))
    assert "does not say which of a100-pcie-40, a100-pcie-80, a100-sxm-40, a100-sxm-80" in warnings
    assert "line 5 --nnodes = 2, line 2 --nodes = 4 contradict each other" in warnings
    warnings = told(reading(tmp_path, job=BATCH_JOB.format(nodes=2, gpu="a100_80gb")))
    assert "does not say which" not in warnings and "contradict" not in warnings


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="an empty file"):
        reading(tmp_path, nothing=" \n")
