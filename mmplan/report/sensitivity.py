"""What `mmplan sensitivity` shows: a table of layers, the zones and how stable they are, a picture, a JSON document."""

import json
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from mmplan.files import write_file
from mmplan.report.documents import values
from mmplan.report.palette import BACKWARD
from mmplan.report.pictures import new_figure, save_png
from mmplan.report.tables import table
from mmplan.runtime.hessian.result import LayerValue, Measured, sensitivity_document
from mmplan.runtime.hessian.settings import Question
from mmplan.runtime.hessian.told import Estimate
from mmplan.runtime.hessian.values import DOUBTFUL
from mmplan.units import format_seconds

SCHEMA = "mmplan.sensitivity-report/1"
_ZONE = "#F6D5A8"  # behind bars; light, so that bars of every hue stand out


def save_sensitivity(found: Measured, question: Question) -> None:
    """Write the file; then nothing is left unfinished."""
    write_file(question.output, json.dumps(sensitivity_document(found), indent=1) + "\n")
    question.partial.unlink(missing_ok=True)


def sensitivity_tables(found: Measured, output: Path) -> list[Table | Text]:
    """One row per layer and modality, then what there is to say."""
    matrix = found.source.get("matrix", "Hessian")
    numbers = ("largest eigenvalue", "95 % interval", "least", *(("trace",) if _has_trace(found) else ()), "steps")
    heads = ("layer", "modality", *numbers, "zone")
    rows = table(f"{matrix} of {found.source.get('scenario', '')} by layer", *heads, right=numbers)
    sensitive = found.sensitive()
    for one in found.values:
        cells = [one.layer + (" (frozen)" if one.frozen else ""), one.modality, f"{one.value:.4g}", _interval(one)]
        cells += [f"{one.least:.3g}", *([_trace(one)] if _has_trace(found) else [])]
        cells.append(f"{one.iterations}" if one.converged else f"{one.iterations}, off by up to {one.residual:.1%}")
        rows.add_row(*cells, "zone" if one.layer in sensitive else "")
    return [rows, Text("\n".join(_told(found, output)), no_wrap=True)]


def estimate_text(estimate: Estimate) -> str:
    """`34 values of 10 to 50 products each, about 1,088 forwards; one product ... about 41 s, at most 3 min`."""
    spread = f"{estimate.usual}" if estimate.usual == estimate.most else f"{estimate.usual} to {estimate.most}"
    usual, most = (duration_text(estimate.seconds(products)) for products in (estimate.usual, estimate.most))
    return (
        f"{estimate.values:,} values of {spread} products each, about {estimate.forwards:,} forwards; one product at "
        f"the first layer took {format_seconds(estimate.product_s)}: about {usual}, at most {most}"
    )


def duration_text(seconds: float) -> str:
    """To two digits, in minutes and hours where it is long."""
    for size, name in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {name}" if seconds < 10 * size else f"{seconds / size:,.0f} {name}"
    return format_seconds(seconds)


def sensitivity_report(found: Measured | None, estimate: Estimate | None, output: Path) -> dict[str, Any]:
    """The document of `--json`; a dry run has an estimate alone."""
    told = {"schema": SCHEMA, "file": str(output), "estimate": values(estimate)}
    if found is None:
        return {**told, "measured": None}
    zones = [{"zone": name, "layers": list(layers)} for name, layers in found.zones]
    return {**told, "measured": {**values(found), "zones": zones}}


def plot_sensitivity(found: Measured, path: Path) -> None:
    """Write a PNG: bars by layer and modality with their intervals, zones shaded."""
    layers = list(dict.fromkeys(one.layer for one in found.values))
    modalities = list(dict.fromkeys(one.modality for one in found.values))
    figure = new_figure(max(6.0, 0.42 * len(layers) + 2), 4.2)
    axes = figure.subplots()
    sensitive = found.sensitive()
    for place, layer in enumerate(layers):
        if layer in sensitive:
            axes.axvspan(place - 0.5, place + 0.5, color=_ZONE, lw=0, label="zone" if layer == min(sensitive) else None)
    width = 0.8 / len(modalities)
    for index, modality in enumerate(modalities):
        own = [one for one in found.values if one.modality == modality]
        places = [layers.index(one.layer) + (index - (len(modalities) - 1) / 2) * width for one in own]
        below = [max(0.0, one.value - (one.low if one.low is not None else one.value)) for one in own]
        above = [max(0.0, (one.high if one.high is not None else one.value) - one.value) for one in own]
        heights = [one.value for one in own]
        colour = BACKWARD.get(modality, BACKWARD["mixed"])
        axes.bar(places, heights, width, yerr=[below, above], color=colour, label=modality, error_kw={"lw": 0.8})
    axes.set_xticks(range(len(layers)), layers, rotation=60, ha="right", fontsize=8)
    axes.set_ylabel("largest eigenvalue")
    axes.set_title(f"{found.source.get('matrix', 'Hessian')} by layer; zones by {found.rule}", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    save_png(figure, path)


def _has_trace(found: Measured) -> bool:
    return any(one.trace is not None for one in found.values)


def _interval(one: LayerValue) -> str:
    return "-" if one.low is None or one.high is None else f"{one.low:.3g} to {one.high:.3g}"


def _trace(one: LayerValue) -> str:
    if one.trace is None:
        return "-"
    mean, low, high = one.trace
    return f"{mean:.3g}" if low is None or high is None else f"{mean:.3g} +- {(high - low) / 2:.2g}"


def _told(found: Measured, output: Path) -> list[str]:
    zones = ", ".join(name for name, _ in found.zones) or "none"
    lines = [f"zones by {found.rule}: {zones}"]
    known = {name: value for name, value in found.rank_correlation.items() if value is not None}
    if known:
        agreement = ", ".join(f"{name} {value:.2f}" for name, value in known.items())
        shared = (
            "" if found.zone_overlap is None else f"; sensitive in all seeds: {found.zone_overlap:.0%} of those in any"
        )
        lines.append(f"rank correlation between seeds: {agreement}{shared}")
    losses = ", ".join(f"{name} {value:.4f}" for name, value in found.losses.items())
    lines.append(f"loss: {losses}")
    late = [one for one in found.values if not one.converged]
    if late:
        names = ", ".join(dict.fromkeys(one.layer for one in late))
        lines.append(f"not converged, and so too small: {names}; give more --iterations")
    doubtful = [one for one in found.values if one.difference is not None and one.difference > DOUBTFUL]
    if doubtful:
        worst = max(doubtful, key=lambda one: one.difference or 0.0)
        names = ", ".join(dict.fromkeys(one.layer for one in doubtful))
        lines.append(
            f"doubtful: differences of gradients give other values for {names} (by {worst.difference:.0%} for "
            f"{worst.layer}): the loss has kinks, is drawn at random, or an operator's second derivative is wrong"
        )
    if found.missing:
        lines.append(f"without a value, because no sample reaches them: {', '.join(found.missing)}")
    return [*lines, f"sensitivity: {output}"]
