"""The page of one plan: numbers, the layer graph with its zones and what they cost, one step as a chart."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.table import Table
from rich.text import Text

from mmplan.planner.plan import Plan
from mmplan.planner.prediction import Prediction
from mmplan.planner.shadow_price import ZonePrice
from mmplan.report.gantt import plot_gantt
from mmplan.report.layer_graph import plot_layers
from mmplan.report.page import heading, html_table, paragraph, picture, write_page


def plan_page(
    plan: Plan, prediction: Prediction, told: Sequence[Table | str], prices: Sequence[ZonePrice], path: Path
) -> None:
    """Write the page of `mmplan optimize --html`.

    Args:
        told: what the terminal shows.
        prices: of zones, where they were asked for.
    """
    name = plan.scenario.name
    with TemporaryDirectory() as folder:
        layers, step = Path(folder) / "layers.png", Path(folder) / "step.png"
        plot_layers(plan, prices, layers)
        plot_gantt(plan, prediction, step, title=name)
        parts = [
            *(html_table(one) if isinstance(one, Table) else paragraph(Text.from_markup(one).plain) for one in told),
            heading("Layers, stages and zones"),
            picture(layers, f"layer graph of {name} by stage, zones framed"),
            heading("One step"),
            picture(step, f"one step of {name}"),
        ]
    write_page(path, f"Plan for {name}", parts)
