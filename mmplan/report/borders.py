"""How tensors cross between unlike meshes, and what the other ways would take."""

from rich.table import Table

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.border import WAYS
from mmplan.planner.border_choice import BorderChoice, border_choices
from mmplan.planner.plan import Plan
from mmplan.report.tables import table
from mmplan.units import format_bytes, format_seconds


def plan_borders(plan: Plan) -> tuple[BorderChoice, ...]:
    """Of a plan with the costs of its own scenario."""
    return border_choices(plan, build_graph(plan.scenario), AnalyticCostModel(plan.scenario)) if plan.meshes else ()


def border_tables(plan: Plan) -> list[Table]:
    """Nothing where all modules share their ranks."""
    choices = plan_borders(plan)
    if not choices:
        return []
    result = table("Between meshes, there and back", "tensor", "crosses as", "a message", *WAYS, right=WAYS)
    for one in choices:
        seconds = [format_seconds(one.seconds[way]) if way in one.seconds else "" for way in WAYS]
        result.add_row(one.tensor, one.way, format_bytes(one.message_bytes), *seconds)
    return [result]
