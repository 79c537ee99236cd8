"""How tensors cross between unlike meshes, and rows between ranks of one; and what the other ways would take."""

from rich.table import Table

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.planner.border import WAYS
from mmplan.planner.border_choice import BorderChoice, border_choices
from mmplan.planner.plan import Plan
from mmplan.planner.row_handovers import ROW_WAYS, RowHandover, row_handovers
from mmplan.report.tables import table
from mmplan.units import format_bytes, format_seconds


def plan_borders(plan: Plan) -> tuple[BorderChoice, ...]:
    """Of a plan with the costs of its own scenario."""
    return border_choices(plan, build_graph(plan.scenario), AnalyticCostModel(plan.scenario)) if plan.meshes else ()


def plan_handovers(plan: Plan) -> tuple[RowHandover, ...]:
    """The same; nothing where no module is cut along patches."""
    if not any(plan.layout(stage).patches for stage in range(len(plan.stages))):
        return ()
    return row_handovers(plan, build_graph(plan.scenario), AnalyticCostModel(plan.scenario))


def border_tables(plan: Plan) -> list[Table]:
    """Nothing where all modules share their ranks, and each of these has all rows."""
    return [*_between_meshes(plan), *_over_ranks(plan)]


def _between_meshes(plan: Plan) -> list[Table]:
    choices = plan_borders(plan)
    if not choices:
        return []
    result = table("Between meshes, there and back", "tensor", "crosses as", "a message", *WAYS, right=WAYS)
    for one in choices:
        seconds = [format_seconds(one.seconds[way]) if way in one.seconds else "" for way in WAYS]
        result.add_row(one.tensor, one.way, format_bytes(one.message_bytes), *seconds)
    return [result]


def _over_ranks(plan: Plan) -> list[Table]:
    found = plan_handovers(plan)
    if not found:
        return []
    result = table("Rows over ranks, there and back", "rows", "handed over", "bytes", *ROW_WAYS, right=ROW_WAYS)
    for one in found:
        seconds = [format_seconds(one.seconds[way]) if way in one.seconds else "" for way in ROW_WAYS]
        result.add_row(one.tensor, one.way, format_bytes(one.moved_bytes), *seconds)
    return [result]
