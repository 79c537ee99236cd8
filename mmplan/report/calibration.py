"""What `mmplan calibrate` prints: every number with its range, beside the catalogue's."""

from pathlib import Path

from rich.table import Table

from mmplan.report.documents import Document
from mmplan.report.tables import table
from mmplan.scenario.catalogue import catalogue_device
from mmplan.scenario.cluster import Device
from mmplan.scenario.profile import Measured, Profile, profile_document
from mmplan.units import format_bytes_per_s, format_flops, format_seconds


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
    return [result, f"profile: {path}"]


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
