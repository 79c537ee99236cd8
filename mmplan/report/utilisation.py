"""Model FLOPs, padding and hardware FLOPs of a plan's step, per modality."""

from rich.table import Table

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.utilisation import Utilisation, utilisation
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import Prediction
from mmplan.report.tables import table
from mmplan.units import format_flops


def plan_utilisation(plan: Plan, prediction: Prediction) -> Utilisation | None:
    """FLOPs of the plan's step over its predicted time, on the devices it uses."""
    graph = build_graph(plan.scenario)
    layouts = {layer: plan.layout(stage) for layer, stage in plan.stage_of_layer().items()}
    return utilisation(plan.scenario, graph, layouts, plan.rank_count, prediction.step_time_s)


def utilisation_table(found: Utilisation | None) -> Table | str:
    """One row per modality, and what the whole step reaches of the dense peak."""
    if found is None:
        return "No utilisation: the device has no peak rate for this precision."
    numbers = ("model", "padding", "hardware")
    title = f"Utilisation: MFU {found.mfu:.1%}, HFU {found.hfu:.1%}, padding {found.padding_share:.1%}"
    result = table(title, "modality", *numbers, right=numbers)
    for entry in found.modalities:
        flops = (entry.model_flops, entry.padding_flops, entry.hardware_flops)
        result.add_row(entry.modality, *(format_flops(value) if value else "0" for value in flops))
    return result
