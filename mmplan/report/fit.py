"""What `mmplan fit` prints: the verdict, the parts of every stage, the step, the largest tensors, what would help."""

from rich.markup import escape
from rich.table import Table

from mmplan.cost_models.memory_estimate import MemoryEstimate
from mmplan.planner.fit import Fit
from mmplan.planner.interval import estimate_interval
from mmplan.report.documents import Document, values
from mmplan.report.interval import interval_text, interval_values
from mmplan.report.tables import table
from mmplan.scenario.technique import SHARDINGS, Technique
from mmplan.units import format_bytes, format_seconds

_COLOURS = {"fits": "green", "tight": "yellow", "OOM": "red"}


def fit_tables(fit: Fit, explain: bool) -> list[Table | str]:
    """Everything in the order a reader asks: does it fit, where does memory go, how fast, what else."""
    colour = _COLOURS[fit.verdict.kind]
    kind, _, rest = fit.sentence.partition(":")
    parts: list[Table | str] = [
        f"[bold {colour}]{kind}[/bold {colour}]:{rest}",
        configuration_text(fit),
        parts_table(fit),
    ]
    if explain:
        parts += [formulas_table(fit.fullest), tensors_table(fit.fullest)]
    parts.append(step_text(fit, explain))
    if fit.fullest.host_parts:
        held = " + ".join(f"{part.name} {format_bytes(part.bytes)}" for part in fit.fullest.host_parts)
        parts.append(f"in host memory, per rank: {held}")
    if fit.changes:
        parts.append("after one of these changes it fits: " + "; ".join(_change(c.text, c.kind) for c in fit.changes))
    elif fit.verdict.kind != "fits":
        parts.append("no two changes of recompute, ZeRO stage, offload, microbatch or degrees make it fit")
    return parts


def _change(text: str, kind: str) -> str:
    return text if kind == "fits" else f"{text} (tight)"


def configuration_text(fit: Fit) -> str:
    """Degrees, batch and the software's choices."""
    d = fit.degrees
    experts = f" x ep {d.ep} (etp {d.etp})" if d.ep > 1 or d.etp > 1 else ""
    chunks = f", vp {d.vp}" if d.vp > 1 else ""
    batch = f"{d.microbatches} x {d.microbatch_size} sequences per replica, global batch {d.global_batch}"
    recipe = "".join(f"recipe {recipe.name} ({escape(recipe.source)})\n" for recipe in fit.scenario.recipes)
    product = f"tp {d.tp} x cp {d.cp} x pp {d.pp} x dp {d.dp} = {d.devices} devices"
    return (
        f"{recipe}{fit.scenario.name}: {product}{experts}{chunks}, "
        f"{d.schedule}, {batch}\n{technique_text(fit.scenario.technique, d.tp, d.cp)}"
    )


def technique_text(technique: Technique, tp: int, cp: int = 1) -> str:
    """The software's choices in the words users use."""
    recompute: str = technique.recompute
    if technique.recompute_layers is not None:
        recompute = f"full for {technique.recompute_layers} layers of a stage"
    zero = SHARDINGS.index(technique.sharding)
    words = [
        f"stack {technique.stack}",
        f"attention {technique.attention}",
        f"recompute {recompute}",
        f"sharding {technique.sharding} (ZeRO-{zero})",
        f"cross entropy {technique.cross_entropy}",
    ]
    words += ["sequence parallel"] if technique.sequence_parallel and tp > 1 else []
    words += [f"context parallel by {technique.context_parallel}"] if cp > 1 else []
    words += [f"fp8 {technique.fp8}"] if technique.fp8 != "none" else []
    words += [f"offload {technique.offload}"] if technique.offload != "none" else []
    words += ["dropout"] if technique.dropout else []
    words += ["frozen modules with gradient hooks"] if technique.frozen_hooks else []
    return ", ".join(words)


def parts_table(fit: Fit) -> Table:
    """One column per stage (equal neighbours together), one row per part at the peak, then the three totals."""
    columns = _distinct(fit.stages)
    titles = [title for title, _ in columns]
    result = table("Memory of a rank at its peak", "part", *titles, right=titles)
    names = list(dict.fromkeys(part.name for _, stage in columns for part in stage.parts))
    for name in names:
        result.add_row(name, *(format_bytes(stage.part_bytes(name)) for _, stage in columns))
    result.add_section()
    result.add_row("allocated (live tensors)", *(format_bytes(stage.allocated_bytes) for _, stage in columns))
    result.add_row("on the device (nvidia-smi)", *(format_bytes(stage.device_bytes) for _, stage in columns))
    limits = [f"{format_bytes(s.limit_bytes)} ({s.device_bytes / s.limit_bytes:.0%})" for _, s in columns]
    result.add_row("the device has", *limits)
    result.add_row("highest during", *(stage.peak.name for _, stage in columns))
    result.add_row("verdict", *(stage.verdict.kind for _, stage in columns))
    return result


def _distinct(stages: tuple[MemoryEstimate, ...], most: int = 5) -> list[tuple[str, MemoryEstimate]]:
    """First, last and fullest stage, and others while there is room."""
    if len(stages) <= most:
        chosen = list(stages)
    else:
        fullest = max(stages, key=lambda stage: stage.device_bytes)
        indices = sorted({0, 1, len(stages) - 2, len(stages) - 1, fullest.stage})
        chosen = [stages[index] for index in indices]
    return [(f"stage {stage.stage}" if len(stages) > 1 else "every rank", stage) for stage in chosen]


def formulas_table(stage: MemoryEstimate) -> Table:
    """Each part of the fullest stage with its arithmetic."""
    result = table(
        f"Arithmetic of stage {stage.stage}, the fullest", "moment", "part", "bytes", "how", right=("bytes",)
    )
    for moment in stage.moments:
        for part in moment.parts:
            result.add_row(moment.name, part.name, f"{part.bytes:,}", part.why)
        result.add_row(moment.name, "[bold]sum[/bold]", f"{moment.bytes:,}", "", end_section=True)
    return result


def tensors_table(stage: MemoryEstimate) -> Table:
    """The largest single tensors of the fullest stage."""
    result = table(f"Largest tensors of stage {stage.stage}", "tensor", "shape", "type", "size", right=("size",))
    for tensor in stage.largest:
        shape = " x ".join(f"{dim:,}" for dim in tensor.shape)
        result.add_row(tensor.name, shape, tensor.dtype, format_bytes(tensor.bytes))
    return result


def step_text(fit: Fit, explain: bool) -> str:
    """Seconds of a step and tokens per second; with `explain` its parts."""
    if fit.step is None:
        return f"step time: not priced: {fit.step_problem}"
    interval = estimate_interval(fit.scenario, fit.degrees)
    text = f"{fit.degrees.global_batch / fit.step.step_s:.4g} samples/s, {interval_text(interval)}"
    if explain:
        named = sorted(fit.step.named().items(), key=lambda item: -item[1])
        text += "\nparts: " + " + ".join(f"{name} {format_seconds(part_s)}" for name, part_s in named if part_s > 0)
    return text


def fit_document(fit: Fit) -> Document:
    """Verdict, step and the parts of every stage; `allocated`, `reserved` and `device` bytes are told apart."""
    stages = [
        {
            "stage": stage.stage,
            "verdict": values(stage.verdict),
            "allocated_bytes": stage.allocated_bytes,
            "reserved_bytes": stage.reserved_bytes,
            "device_bytes": stage.device_bytes,
            "limit_bytes": stage.limit_bytes,
            "moments": values(stage.moments),
            "host_parts": values(stage.host_parts),
            "largest_tensors": values(stage.largest),
        }
        for stage in fit.stages
    ]
    step = None
    if fit.step is not None:
        interval = interval_values(estimate_interval(fit.scenario, fit.degrees))
        step = {"step_time_s": fit.step.step_s, **interval, "parts_s": fit.step.named()}
    return {
        "schema": "mmplan.fit/1",
        "scenario": fit.scenario.name,
        "verdict": fit.verdict.kind,
        "decides": fit.verdict.decides,
        "sentence": fit.sentence,
        "degrees": values(fit.degrees),
        "technique": values(fit.scenario.technique),
        "step": step,
        "step_problem": fit.step_problem,
        "stages": stages,
        "changes_that_fit": values(fit.changes),
    }
