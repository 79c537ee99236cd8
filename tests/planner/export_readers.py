"""What an exported file says, read back and held against the plan; the targets' own parsers are in tests/interop."""

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import yaml
from jax_reading import local_size, parameters_by_layer, read_module
from launcher_stubs import rank_places, run_manifests, run_slurm

from mmplan.planner.formats.cornstarch import read_templates
from mmplan.planner.formats.exported import Exported
from mmplan.planner.plan import Plan
from mmplan.scenario.layer_ids import expand_ids


def same_by_accelerate(plan: Plan, made: Exported) -> bool:
    """Processes, degrees and batch."""
    values = yaml.safe_load(made.files["accelerate.yaml"])
    training = json.loads(made.files["training.json"])
    degrees = values.get("parallelism_config", {})
    prefix = "parallelism_config_"
    tp, cp = degrees.get(f"{prefix}tp_size", 1), degrees.get(f"{prefix}cp_size", 1)
    batch = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"]
    written = (values["num_processes"], tp, cp, batch * values["num_processes"] // (tp * cp))
    return written == (plan.rank_count, plan.tp, plan.cp, plan.scenario.global_batch)


def same_by_jax(plan: Plan, made: Exported) -> bool:
    """Layers and ranks of stages, each parameter divisible, the same layers with parameters as in the plan."""
    names = read_module(made.files["jax_plan.py"])
    layers = parameters_by_layer(names)
    for parameters in layers.values():
        for entry in parameters.values():
            for which in ("weights", "gradients", "state"):
                local_size(entry, names["AXES"], which)
    held = [(expand_ids(stage["layers"]), stage["ranks"]) for stage in names["STAGES"]]
    if plan.pp == 1:
        return Counter(x for ids, _ in held for x in ids) == Counter(x for s in plan.stages for x in s.layers)
    ranks = [plan.stage_ranks(stage) for stage in range(len(plan.stages))]
    own = [(s.layers, (r[0], r[-1] + 1)) for s, r in zip(plan.stages, ranks, strict=True)]
    return held == own and set(layers) == set(plan.stage_of_layer())


def same_by_cornstarch(plan: Plan, made: Exported) -> bool:
    """Layers and first ranks of stages, degrees."""
    document = read_templates(made.files["templates.json"])
    stages = [stage for template in document["templates"] for stage in template["modules_per_stage"]]
    held = [(stage["layers"], stage["ranks"][0]) for stage in sorted(stages, key=lambda one: one["ranks"])]
    degrees = (document["tp_size"], document["sp_size"], document["dp_size"])
    own = [(stage.layers, plan.rank(index, 0)) for index, stage in enumerate(plan.stages)]
    return held == own and degrees == (plan.tp, plan.cp, plan.dp)


def places(plan: Plan) -> list[tuple[int, int]]:
    """(node, place in it) of every rank of the plan."""
    nodes = [plan.scenario.cluster.node_of(rank) for rank in range(plan.rank_count)]
    return [(node, rank - nodes.index(node)) for rank, node in enumerate(nodes)]


def same_by_slurm(plan: Plan, made: Exported) -> bool:
    """Where every rank starts."""
    with tempfile.TemporaryDirectory() as folder:
        return rank_places(run_slurm(made.files["job.sbatch"], Path(folder), places(plan)[-1][0] + 1)) == places(plan)


def same_by_kubernetes(plan: Plan, made: Exported) -> bool:
    """Where every rank starts, by each of the files."""
    with tempfile.TemporaryDirectory() as folder:
        return all(rank_places(run_manifests(text, Path(folder))) == places(plan) for text in made.files.values())


READERS: dict[str, Callable[[Plan, Exported], bool]] = {
    "accelerate": same_by_accelerate,
    "jax": same_by_jax,
    "cornstarch": same_by_cornstarch,
    "slurm": same_by_slurm,
    "kubernetes": same_by_kubernetes,
}
