"""A plan for `torch.distributed`: orders as CSV of its pipelining runtime, meshes as JSON.

`device_mesh.json` holds what `init_device_mesh` takes and what it does not check (a mesh smaller than the world is
accepted there), and which layers and ranks each stage has.
"""

import json
import math

from mmplan.cost_models.build import build_graph
from mmplan.planner.check import require_structure
from mmplan.planner.formats.exported import Exported
from mmplan.planner.formats.linearised import Draft, each_alone, require_fit
from mmplan.planner.formats.serial_chain import is_chain, serial_orders, serial_price
from mmplan.planner.formats.simple_schedule import under_1f1b
from mmplan.planner.formats.unsaid import unsaid
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.text import schedule_csv
from mmplan.planner.schedules.torch_export import refuse_stages_without_backward, torch_csv
from mmplan.planner.stage_graph import StageGraph, build_stage_graph
from mmplan.scenario.layer_ids import shorten_ids

TARGET = "torch's pipelining"
SHARDED = {
    "none": "replicate",
    "optimizer": "ZeroRedundancyOptimizer",
    "gradients": "fully_shard",
    "parameters": "fully_shard",
}


def export_torch_pipelining(plan: Plan) -> Exported:
    """`orders.csv`, one row per pipeline rank, and `device_mesh.json`.

    Raises:
        CheckError: the plan is not sound, or torch's runtime has no place for its stages.
    """
    require_structure(plan)
    draft, csv = _orders(plan)
    text = json.dumps(mesh_document(draft.plan), indent=1) + "\n"
    reads = '_PipelineScheduleRuntime(stages, n_microbatches, loss_fn)._load_csv("orders.csv", "compute_only") reads it'
    return Exported(
        target="torch-pipelining",
        version="torch 2.9 to 2.13",
        files={"orders.csv": csv, "device_mesh.json": text},
        losses=(*draft.losses, *unsaid(plan, "pytorch")),
        notes=(reads, "init_device_mesh(device, mesh_shape, mesh_dim_names=mesh_dim_names) of device_mesh.json"),
    )


def _orders(plan: Plan) -> tuple[Draft, str]:
    draft, graph = each_alone(plan, TARGET), build_graph(plan.scenario)
    if is_chain(_stages(plan)):
        return draft, torch_csv(draft.plan, graph)
    draft = under_1f1b(draft, TARGET, chunks=False)
    made, stages = draft.plan, _stages(draft.plan)
    require_fit(made, TARGET)
    if is_chain(stages):
        return draft, torch_csv(made, graph)
    refuse_stages_without_backward(made, stages)
    loss = serial_price(made, stages, TARGET)
    return Draft(plan=made, losses=(*draft.losses, loss)), schedule_csv(serial_orders(made))


def _stages(plan: Plan) -> StageGraph:
    return build_stage_graph([stage.layers for stage in plan.stages], build_graph(plan.scenario))


def mesh_document(plan: Plan) -> dict[str, object]:
    """Axes from the slowest to the fastest, as ranks are numbered; ranks of stages as (first, last)."""
    shape = {"pp": plan.pp, "dp": plan.dp, "cp": plan.cp, "tp": plan.tp}
    assert math.prod(shape.values()) == plan.rank_count
    document: dict[str, object] = {
        "world_size": plan.rank_count,
        "mesh_dim_names": list(shape),
        "mesh_shape": list(shape.values()),
        "n_microbatches": plan.microbatches,
        "microbatch_size": plan.microbatch_size,
        "sharding": {"over": ["dp", "cp"], "by": SHARDED[plan.sharding], "reshard": plan.sharding == "parameters"},
        "stages": [
            {
                "stage": index,
                "pp": plan.row(index),
                "ranks": [plan.stage_ranks(index)[0], plan.stage_ranks(index)[-1]],
                "recompute": stage.recompute,
                "layers": list(shorten_ids(stage.layers)),
            }
            for index, stage in enumerate(plan.stages)
        ],
    }
    if plan.ep > 1:
        experts = {"pp": plan.pp, "edp": plan.dp * plan.width // (plan.ep * plan.etp), "ep": plan.ep, "etp": plan.etp}
        document["experts"] = {"mesh_dim_names": list(experts), "mesh_shape": list(experts.values())}
    if plan.scenario.technique.offload == "parameters":
        document["offload_policy"] = "CPUOffloadPolicy"
    if plan.spread:
        document["spread"] = list(plan.spread)
    if plan.patches:
        document["patches"] = list(plan.patches)
    return document
