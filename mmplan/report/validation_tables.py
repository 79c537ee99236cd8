"""What `mmplan validate` prints: verdicts, where the difference comes from, where each rank's step went."""

from collections.abc import Callable, Sequence

from rich.table import Table

from mmplan.planner.plan import Plan
from mmplan.planner.step_parts import RankParts
from mmplan.report.tables import table
from mmplan.runtime.decompose import Decomposition
from mmplan.runtime.explain import ComputePrice
from mmplan.runtime.validate import Validation
from mmplan.scenario.layer_ids import shorten_ids
from mmplan.units import format_bytes, format_seconds

_TOLD_RATIO = 1.05  # a stage's computes that are so much off are named


def validation_tables(plan: Plan, validation: Validation) -> list[Table | str]:
    """Verdicts, the decomposition with a sentence, and the parts of each rank."""
    parts: list[Table | str] = [validation_table(validation), decomposition_table(validation.decomposition)]
    said = advice(plan, validation)
    return [*parts, *([said] if said else []), parts_table(validation)]


_QUANTITY: dict[str, tuple[str, Callable[[float], str]]] = {
    "bubble": ("bubble", lambda v: f"{v:.1%}"),
    "sent_bytes": ("sent", format_bytes),
    "reduce_bytes": ("reduced", format_bytes),
    "tensor_bytes": ("exchanged in layers", format_bytes),
    "steps_sent_bytes": ("sent, every step", format_bytes),
    "steps_reduce_bytes": ("reduced, every step", format_bytes),
    "steps_tensor_bytes": ("exchanged in layers, every step", format_bytes),
    "communication_s": ("communication", format_seconds),
    "overlap": ("communication overlapped", lambda v: f"{v:.1%}"),
    "step_time_s": ("step time", format_seconds),
    "peak_memory_bytes": ("peak memory", format_bytes),
}


def validation_table(validation: Validation) -> Table:
    """Predicted beside measured; `ok` and `missed` where a threshold stands, empty where none does."""
    numbers = ("planned", "replayed", "measured", "difference", "allowed")
    title = "Measured against predicted: " + ("ok" if validation.passed else "missed")
    result = table(title, "quantity", "rank", *numbers, "verdict", right=numbers)
    for row in validation.rows:
        name, text = _QUANTITY[row.quantity]
        exact = row.quantity.endswith(("sent_bytes", "reduce_bytes", "tensor_bytes"))
        points = row.quantity in ("bubble", "overlap")
        difference = (
            f"{row.difference:+.0f} B"
            if exact
            else f"{100 * row.difference:+.1f} points"
            if points
            else f"{row.difference:+.1%}"
        )
        allowed = (
            ""
            if row.threshold is None
            else "exact"
            if exact
            else f"{100 * row.threshold:.0f} points"
            if points
            else f"{row.threshold:.0%}"
        )
        verdict = {True: "ok", False: "missed", None: ""}[row.passed]
        rank = "all" if row.rank is None else str(row.rank)
        result.add_row(
            name, rank, text(row.planned), text(row.replayed), text(row.measured), difference, allowed, verdict
        )
    return result


def decomposition_parts(found: Decomposition) -> tuple[tuple[str, float, str], ...]:
    """Name, seconds and meaning of each part, in their order."""
    return (
        ("compute", found.compute_s, "computes and updates took longer or shorter in total"),
        ("bubble", found.bubble_s, "they were shared out otherwise: ranks waited more or less for each other"),
        ("communication", found.communication_s, "transfers and reductions"),
        ("other", found.other_s, "host, launches, other processes, clocks"),
    )


def decomposition_table(found: Decomposition) -> Table:
    """From the planned to the measured step."""
    numbers = ("seconds", "of planned")
    result = table("From the predicted to the measured step", "", *numbers, "why", right=numbers)
    result.add_row("predicted", format_seconds(found.planned_s), "100.0%", "")
    for name, seconds, why in decomposition_parts(found):
        result.add_row(name, signed(seconds), f"{seconds / found.planned_s:+.1%}", why)
    measured = f"{found.measured_s / found.planned_s:.1%}"
    result.add_row("measured", format_seconds(found.measured_s), measured, "")
    return result


def signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + format_seconds(abs(seconds))


def advice(plan: Plan, validation: Validation) -> str:
    """Which computes are off most, in one sentence; empty where all are near."""
    computes = [price for price in validation.prices if price.kind != "STEP" and price.planned_s > 0]
    if not computes or validation.rehearsed:
        return ""
    worst = max(computes, key=lambda price: abs(price.measured_s - price.planned_s) * price.count)
    ratio = worst.measured_s / worst.planned_s
    if 1 / _TOLD_RATIO < ratio < _TOLD_RATIO:
        return ""
    layers = ", ".join(shorten_ids(plan.stages[worst.stage].layers))
    return (
        f"Most of it: {_KINDS[worst.kind]} of stage {worst.stage} ({layers}) took {ratio:.2f} times the predicted "
        f"{format_seconds(worst.planned_s)}; `mmplan validate --calibrate` lets this run correct the prices."
    )


_KINDS = {"F": "forwards", "B": "backwards", "I": "input gradients", "W": "weight gradients", "STEP": "updates"}

_PARTS: tuple[tuple[str, Callable[[RankParts], float]], ...] = (
    ("compute", lambda part: part.compute_s),
    ("update", lambda part: part.update_s),
    ("bubble", lambda part: part.bubble_s),
    ("of it reorderable", lambda part: part.reorderable_s),
    ("exposed communication", lambda part: part.exposed_s),
    ("overhead", lambda part: part.overhead_s),
)


def parts_table(validation: Validation) -> Table:
    """Planned and measured seconds of each rank, by what it did or waited for."""
    names = tuple(name for name, _ in _PARTS)
    title = "Where the step of each rank went, predicted and measured"
    result = table(title, "rank", *names, right=names)
    for index, part in enumerate(validation.parts):
        cells = (
            f"{format_seconds(seconds(part.planned))} / {format_seconds(seconds(part.measured))}"
            for _, seconds in _PARTS
        )
        result.add_row(str(index), *cells)
    return result


def prices_table(plan: Plan, prices: Sequence[ComputePrice]) -> Table:
    """What one compute of each stage and kind takes."""
    numbers = ("count", "predicted", "measured", "ratio")
    result = table("Computes by stage", "stage", "layers", "kind", *numbers, right=numbers)
    for price in prices:
        ratio = f"{price.measured_s / price.planned_s:.2f}" if price.planned_s > 0 else "-"
        result.add_row(
            str(price.stage),
            ", ".join(shorten_ids(plan.stages[price.stage].layers)),
            _KINDS[price.kind],
            str(price.count),
            format_seconds(price.planned_s),
            format_seconds(price.measured_s),
            ratio,
        )
    return result
