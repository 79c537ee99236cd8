"""What compressed gradients save in a plan, in seconds and bytes, and what they cost in error, in one sentence each."""

from collections import Counter
from dataclasses import replace

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.compressed_bytes import FORMATS, MEASURED_ERRORS, GradientFormat, MeasuredError
from mmplan.cost_models.layout import trained_on_rank
from mmplan.planner.durations import replicas_per_node
from mmplan.planner.lower import reduced_bytes, stage_trained
from mmplan.planner.plan import Plan
from mmplan.planner.ties import share_bytes, tied_tables
from mmplan.scenario.scenario import DTYPE_BYTES
from mmplan.units import format_bytes, format_seconds

_VALUES = {"sign4": "a sign and 4 bits", "fp8": "FP8"}


def compression_price(plan: Plan) -> tuple[str, ...]:
    """Against the same plan without; nothing where the plan compresses nothing."""
    compression = plan.scenario.technique.compression
    form = FORMATS.get(compression)
    if form is None:
        return ()
    if why := why_unchanged(plan):
        return (f"compression: {compression} is allowed and changes nothing: {why}",)
    (sent, sum_s), (whole, whole_s) = _reduction(plan), _reduction(_uncompressed(plan))
    left = _travels_whole(plan)
    saved_s = whole_s - sum_s
    words = "saves" if saved_s >= 0 else "costs"
    said = (
        f"compression: {compression} {words} {format_seconds(abs(saved_s))} of the slowest stage's reduction "
        f"({format_seconds(whole_s)} without): a rank gives it {format_bytes(sent)} instead of {format_bytes(whole)}",
        _error(form, MEASURED_ERRORS[compression]),
    )
    return (*said, left) if left else said


def why_unchanged(plan: Plan) -> str:
    """Why compression changes nothing that ranks send; empty where it does."""
    if _reduction(plan)[0] != _reduction(_uncompressed(plan))[0]:
        return ""
    return _travels_whole(plan) or "no stage has replicas whose gradients it could compress"


def _error(form: GradientFormat, measured: MeasuredError) -> str:
    """The largest fraction f of all elements has at least f of the squared norm (arXiv 1809.07599, definition 2.1)."""
    share, steps = f"{form.fraction:.0%}", f"{1 / form.fraction:.0f}"
    lost = f"{measured.loss:+.2f} ± {measured.loss_half_width:.2f} of loss"
    points = f"{measured.top1_points:+.1f} ± {measured.top1_half_width:.1f} points of top-1 accuracy"
    return (
        f"its price in error: a step says the largest {share} of the elements in {_VALUES[form.values]}, at least "
        f"{share} of the squared norm before rounding; the rest is said later, {steps} steps on average; on a small "
        f"task (benchmarks/compression.csv) it ended with {lost} and {points} against none; measure yours, "
        "docs/compression.md says how"
    )


def _travels_whole(plan: Plan) -> str:
    """Gradients that go as they are, and why; empty where all are compressed."""
    if plan.sharding != "none":
        return (
            f"gradients travel whole: sharding={plan.sharding} sums shares of them, and messages about shares are not "
            "planned (constraints.sharding: none)"
        )
    graph = build_graph(plan.scenario)
    element_bytes = DTYPE_BYTES[plan.scenario.optimizer.gradient_dtype]
    elements = Counter[str]()
    for stage, part in enumerate(plan.stages):
        layout = plan.layout(stage)
        for layer in map(graph.layer, part.layers):
            trained = trained_on_rank(layer, layout)
            elements["spread modules, summed over all ranks of a stage"] += trained.spread
            elements["experts, held by other ranks than the rest"] += trained.experts
            kept = "layers in zones" if layer.whole_gradient else "parameters that all tp ranks hold alike"
            elements[kept] += trained.kept
    for tied in tied_tables(plan, graph):
        elements["tables on two stages, summed over these"] += share_bytes(plan, graph, tied) // element_bytes
    parts = [f"{format_bytes(count * element_bytes)} of {what}" for what, count in elements.items() if count]
    return f"gradients that travel whole: {'; '.join(parts)}" if parts else ""


def _uncompressed(plan: Plan) -> Plan:
    technique = replace(plan.scenario.technique, compression="none")
    return replace(plan, scenario=replace(plan.scenario, technique=technique))


def _reduction(plan: Plan) -> tuple[int, float]:
    """Largest payload of a rank, and seconds of the slowest reduction."""
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    stages = range(len(plan.stages))
    seconds = [
        costs.reduce_s(stage_trained(plan, graph, stage), plan.layout(stage), replicas_per_node(plan, stage))
        for stage in stages
    ]
    return max(reduced_bytes(plan, graph, stage) for stage in stages), max(seconds)
