"""A plan's orders as CSV for `torch.distributed.pipelining`."""

from mmplan.cost_models.build import build_graph
from mmplan.planner.formats.exported import Exported
from mmplan.planner.plan import Plan
from mmplan.planner.schedules.torch_export import torch_csv


def export_torch_pipelining(plan: Plan) -> Exported:
    """One row per pipeline rank.

    Raises:
        CheckError: the plan's orders are not sound, or torch's runtime has no place for its stages.
    """
    files = {"orders.csv": torch_csv(plan, build_graph(plan.scenario))}
    note = '_PipelineScheduleRuntime(stages, n_microbatches, loss_fn)._load_csv("orders.csv", "compute_only") reads it'
    return Exported(target="torch-pipelining", version="torch 2.9 to 2.13", files=files, notes=(note,))
