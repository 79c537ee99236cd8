"""What `mmplan calibrate` prints: every number with its range, beside the catalogue's."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from mmplan.report.documents import Document, values
from mmplan.report.tables import table
from mmplan.runtime.reprice import Repriced
from mmplan.scenario.catalogue import catalogue_device
from mmplan.scenario.cluster import Device
from mmplan.scenario.profile import Measured, Profile, profile_document
from mmplan.units import format_bytes_per_s, format_flops, format_seconds

_KEPT = ("base", "device", "parameters", "link", "modules")


def calibrate_document(profile: Profile, path: Path) -> Document:
    """The profile, and where it was written; its own schema name becomes this document's."""
    return {**profile_document(profile), "schema": "mmplan.calibrate/1", "profile": str(path)}


def calibration_tables(profile: Profile, path: Path) -> list[Table | str]:
    numbers = ("value", "P10", "P90", "catalogue", "samples", "residual")
    quick = ", quick" if profile.quick else ""
    refined = f", refined by {profile.refined_by}" if profile.refined_by else ""
    title = f"{profile.device} as {profile.base}{quick}{refined}"
    result = table(title, "parameter", *numbers, "source", right=numbers)
    base = catalogue_device(profile.base).device
    for name, item in profile.parameters.items():
        known = _catalogue(base, name)
        result.add_row(name, *_cells(name, item), "-" if known is None else _text(name, known), *_found(item))
    for name, item in profile.link.items():
        result.add_row(f"link {name}", *_cells(name, item), "", *_found(item))
    for name, item in profile.modules.items():
        result.add_row(f"pace of {name}", *_cells(name, item), "", *_found(item))
    return [result, f"profile: {path}"]


def repriced_table(rows: Sequence[Repriced]) -> Table:
    """Predicted step times with the old and the new prices."""
    numbers = ("measured", "predicted before", "off", "predicted after", "off ")
    result = table("Predicted before and after calibration", "run", *numbers, right=numbers)
    for row in rows:
        result.add_row(
            f"{row.name}, held out" if row.held_out else f"{row.name}, calibrated by it",
            format_seconds(row.measured_s),
            format_seconds(row.before_s),
            f"{row.error_before:+.1%}",
            format_seconds(row.after_s),
            f"{row.error_after:+.1%}",
        )
    return result


def repriced_document(rows: Sequence[Repriced], profile: Profile, path: Path) -> Document:
    """The profile and the predictions before and after, as part of `mmplan.validate/1`."""
    runs = [{**values(row), "error_before": row.error_before, "error_after": row.error_after} for row in rows]
    return {"profile": str(path), "runs": runs, **{k: v for k, v in profile_document(profile).items() if k in _KEPT}}


def _cells(name: str, item: Measured) -> tuple[str, ...]:
    return tuple(_text(name, value) for value in (item.value, item.p10, item.p90))


def _found(item: Measured) -> tuple[str, str, str]:
    return (str(item.n) if item.n else "earlier", f"{item.residual:.0%}" if item.n else "", item.source)


def _text(name: str, value: float) -> str:
    if name.endswith("_flops_per_s"):
        return f"{format_flops(value)}/s"
    if name.endswith("bytes_per_s"):
        return format_bytes_per_s(value)
    return format_seconds(value) if name.endswith("_s") else f"{value:.3f}"


def _catalogue(base: Device, name: str) -> float | None:
    if name.startswith("attention."):
        return dict(base.attention).get(name.removeprefix("attention."))
    value: float | None = getattr(base, name)
    return value
