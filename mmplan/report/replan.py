"""Tables and document of `mmplan replan`."""

from pathlib import Path
from typing import Any

from rich.table import Table

from mmplan.planner.plan import plan_document
from mmplan.planner.replan import Replan
from mmplan.report.alternatives import degrees_text
from mmplan.report.documents import values
from mmplan.report.tables import table
from mmplan.scenario.document import counted
from mmplan.units import format_bytes, format_seconds


def replan_tables(result: Replan, old_degrees: str, doubt: str, plan_file: Path) -> list[Table | str]:
    """What drifted, what each plan takes now, what the switch costs, and the advice."""
    numbers = ("forward before", "now", "ratio")
    modules = table("What drifted", "module", *numbers, "present plan", "new plan", right=numbers)
    for change in result.modules:
        ratio = f"{change.now_s / change.before_s:.3f}" if change.before_s > 0 else "-"
        before, now = format_seconds(change.before_s), format_seconds(change.now_s)
        modules.add_row(change.module, before, now, ratio, change.old_strategy, change.new_strategy)
    plans = table("Plans at the new prices", "", "present", "new", right=("present", "new"))
    plans.add_row("degrees", old_degrees, degrees_text(result.plan))
    plans.add_row("step time, simulated", format_seconds(result.old_step_s), format_seconds(result.new_step_s))
    plans.add_row("... at the old prices", format_seconds(result.planned_step_s), "")
    plans.add_row("gap", "", f"{result.plan.certificate.gap:.2%} ({result.plan.certificate.status})")
    plans.add_row("moved to switch", "", format_bytes(result.switch.moved_bytes))
    plans.add_row("... by the busiest rank", "", format_bytes(result.switch.busiest_bytes))
    plans.add_row("seconds to switch", "", format_seconds(result.switch.seconds))
    steps = "never" if result.break_even_steps is None else counted(result.break_even_steps, "step")
    plans.add_row("pays after", "", steps)
    advice = f"[bold]{result.advice}[/bold]: {result.reason}"
    return [modules, plans, advice, *([doubt] if doubt else []), f"new plan: {plan_file}"]


def replan_document(result: Replan, doubt: str) -> dict[str, Any]:
    """All of it, the new plan as in plan.json."""
    return {
        "schema": "mmplan.replan/1",
        "scenario": result.plan.scenario.name,
        **values(result),
        "plan": plan_document(result.plan),
        "doubt": doubt,
    }
