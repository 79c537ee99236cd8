"""Exports read back by a few lines of our own: what stands in the files is the plan, for every target.

A function per target: it raises AssertionError where a file says other than the plan, or than the plan as the target
runs it (`as_megatron_runs`, `titan_job`, whose changes the export tells as losses).
"""

import ast
import json
import math
import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mmplan.planner.formats.deepspeed import export_deepspeed
from mmplan.planner.formats.exported import Exported
from mmplan.planner.formats.language_chain import LanguageStage, language_stages, the_language_model
from mmplan.planner.formats.megatron import as_megatron_runs, export_megatron
from mmplan.planner.formats.megatron_mimo import export_megatron_mimo
from mmplan.planner.formats.torch_pipelining import export_torch_pipelining
from mmplan.planner.formats.torchtitan import export_torchtitan
from mmplan.planner.formats.torchtitan_job import titan_job
from mmplan.planner.formats.torchtitan_toml import export_torchtitan_toml
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.text import parse_schedule_csv, schedule_text
from mmplan.scenario.layer_ids import expand_ids
from mmplan.scenario.technique import SHARDINGS

EXPORTERS: dict[str, Callable[[Plan], Exported]] = {
    "megatron": export_megatron,
    "megatron-mimo": export_megatron_mimo,
    "torchtitan": export_torchtitan,
    "torchtitan-toml": export_torchtitan_toml,
    "torch-pipelining": export_torch_pipelining,
    "deepspeed": export_deepspeed,
}


def read_back(target: str, plan: Plan, made: Exported) -> None:
    """AssertionError unless the files of `made` hold the plan."""
    assert all(loss.step_s is not None and math.isfinite(loss.step_s) for loss in made.losses)
    {
        "megatron": _megatron,
        "megatron-mimo": _mimo,
        "torchtitan": _titan,
        "torchtitan-toml": _titan_toml,
        "torch-pipelining": _torch,
        "deepspeed": _deepspeed,
    }[target](plan, made)


def megatron_arguments(made: Exported) -> dict[str, str]:
    """Flag -> value ('' of a switch) of all arrays of the script."""
    words: list[str] = []
    for block in re.findall(r"^(?:MODEL|PARALLEL|TRAINING)=\((.*?)^\)", made.files["megatron.sh"], re.M | re.S):
        words += shlex.split(block)
    found: dict[str, str] = {}
    for place, word in enumerate(words):
        if word.startswith("--"):
            assert word not in found, word
            follows = words[place + 1] if place + 1 < len(words) else "--"
            found[word] = "" if follows.startswith("--") else follows
    return found


def layout_stages(text: str) -> list[LanguageStage]:
    """The stages of a Megatron layout."""
    text = re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), text)
    stages, first = [], 0
    for piece in text.split("|"):
        assert set(piece) <= set("EtL"), piece
        blocks = tuple(range(first, first + piece.count("t")))
        stages.append(LanguageStage(embedding="E" in piece, blocks=blocks, head="L" in piece, others=()))
        first += len(blocks)
    return stages


def _megatron(plan: Plan, made: Exported) -> None:
    module = the_language_model(plan, "Megatron-LM")
    run, read = as_megatron_runs(plan, module).plan, megatron_arguments(made)
    degrees = [int(read[f"--{name}-parallel-size"]) for name in ("tensor-model", "context", "pipeline-model")]
    assert degrees == [plan.tp, plan.cp, plan.pp]
    assert int(read["--global-batch-size"]) == plan.dp * plan.microbatches * int(read["--micro-batch-size"])
    stages = [replace(stage, others=()) for stage in language_stages(run, module)]
    if len(stages) > 1:
        assert layout_stages(read["--pipeline-model-parallel-layout"]) == stages
        assert len(stages) == plan.pp or plan.microbatches % plan.pp == 0  # interleaving; only the schedule raises
    assert int(read.get("--recompute-num-layers", "1")) <= max(len(stage.blocks) for stage in stages)
    assert int(read["--seq-length"]) % (plan.tp * plan.cp) == 0
    assert ("--sequence-parallel" in read) <= (plan.tp > 1)
    assert not ("--num-experts" in read and plan.tp > 1) or "--sequence-parallel" in read
    if read.get("--cp-comm-type") == "a2a":
        assert int(read["--num-attention-heads"]) % (plan.tp * plan.cp) == 0


def mimo_components(made: Exported) -> dict[str, dict[str, int]]:
    """Grid -> its degrees, from the words for the example scripts."""
    found = re.findall(r"^--component (\w+)=(\S+)$", made.files["components.args"], re.M)
    return {name: {k: int(v) for k, v in (pair.split("=") for pair in pairs.split(","))} for name, pairs in found}


def _mimo(plan: Plan, made: Exported) -> None:
    grids = mimo_components(made)
    spans = [(grid["rank_offset"], grid["tp"] * grid["pp"] * grid["cp"] * grid["dp"]) for grid in grids.values()]
    covered = sorted(rank for first, count in spans for rank in range(first, first + count))
    assert covered == list(range(plan.rank_count))
    assert [grids["language"][key] for key in ("tp", "cp", "dp")] == [plan.tp, plan.cp, plan.dp]
    assert all((plan.microbatch_size * plan.dp) % grid["dp"] == 0 for grid in grids.values())


def python_constants(text: str) -> dict[str, Any]:
    """Assignments of a Python file."""
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def _titan(plan: Plan, made: Exported) -> None:
    read = python_constants(made.files["torchtitan_plan.py"])
    assert read["WORLD_SIZE"] == plan.rank_count
    _titan_values(plan, made, read["PARALLELISM"], read["TRAINING"], before_0_3=False)


def _titan_toml(plan: Plan, made: Exported) -> None:
    read = tomllib.loads(made.files["plan.toml"])
    assert ("orders.csv" in made.files) == ("pipeline_parallel_schedule_csv" in read["parallelism"])
    _titan_values(plan, made, read["parallelism"], read["training"], before_0_3=True)


def _titan_values(
    plan: Plan, made: Exported, parallelism: dict[str, Any], training: dict[str, Any], *, before_0_3: bool
) -> None:
    job = titan_job(plan, "torchtitan", before_0_3=before_0_3)
    names = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel")
    replicate, shard, cp, tp = (parallelism[f"{name}_degree"] for name in names)
    assert replicate * shard * cp * tp * parallelism["pipeline_parallel_degree"] == plan.rank_count
    assert (replicate * shard, cp, tp) == (plan.dp, plan.cp, plan.tp) and min(replicate, shard) >= 1
    assert shard * cp * tp % parallelism["expert_parallel_degree"] == 0
    rounds = training["global_batch_size"] // (training["local_batch_size"] * plan.dp)
    assert rounds * training["local_batch_size"] == plan.microbatch_size * plan.microbatches
    parts = parallelism.get("module_fqns_per_model_part")
    if parts is not None:
        named = [name for part in parts for name in part]
        blocks = [name for name in named if name.startswith("layers.")]
        assert len(named) == len(set(named)) and blocks == [f"layers.{index}" for index in range(len(blocks))]
        counts = [sum(name.startswith("layers.") for name in part) for part in parts]
        assert counts == [len(part.blocks) for part in job.parts]
    if "orders.csv" in made.files:
        assert schedule_text(parse_schedule_csv(made.files["orders.csv"])).split("\n") == list(job.plan.orders)


def _torch(plan: Plan, made: Exported) -> None:
    document = json.loads(made.files["device_mesh.json"])
    assert math.prod(document["mesh_shape"]) == document["world_size"] == plan.rank_count
    orders, stages = parse_schedule_csv(made.files["orders.csv"]), document["stages"]
    if len(stages) == len(plan.stages):
        for index, stage in enumerate(stages):
            first, last = stage["ranks"]
            assert tuple(range(first, last + 1)) == plan.stage_ranks(index)
            assert tuple(expand_ids(stage["layers"])) == plan.stages[index].layers
            assert _rank_at(document["mesh_shape"], stage["pp"], plan.dp - 1, plan.cp - 1, plan.tp - 1) == last
    for kinds in ("F", "BI"):
        done = sorted((a.stage, a.microbatch) for order in orders for a in order if a.kind in kinds)
        assert done == [(stage, k) for stage in range(len(stages)) for k in range(plan.microbatches)]
    for row, order in enumerate(orders):
        assert {action.stage for action in order} == {stage["stage"] for stage in stages if stage["pp"] == row}


def _rank_at(shape: list[int], *place: int) -> int:
    """Row-major, as `init_device_mesh` numbers a world."""
    rank = 0
    for size, index in zip(shape, place, strict=True):
        rank = rank * size + index
    return rank


def _deepspeed(plan: Plan, made: Exported) -> None:
    read = json.loads(made.files["ds_config.json"])
    batch = read["train_micro_batch_size_per_gpu"] * read["gradient_accumulation_steps"] * plan.dp
    assert batch == read["train_batch_size"] == plan.scenario.global_batch
    stage = SHARDINGS.index(plan.sharding)
    assert read["zero_optimization"]["stage"] == (min(stage, 1) if plan.pp > 1 else stage)
    assert read.get("sequence_parallel_size", 1) == plan.cp
    assert read.get("expert_parallel", {}).get("autoep_size", 1) == plan.ep
    if plan.pp == 1:
        assert read.get("tensor_parallel", {}).get("autotp_size", 1) == plan.tp
    else:
        (told,) = (note for note in made.notes if "PipelineModule" in note)
        axes = {name: int(value) for name, value in re.findall(r"num_(\w+)=(\d+)", told)}
        assert axes == {"pp": plan.pp, "mp": plan.tp, "dp": plan.dp}
