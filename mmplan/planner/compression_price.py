"""What compressed gradients save in a plan, in seconds and bytes, and what they cost in error, in one sentence each."""

from dataclasses import replace

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.compressed_bytes import FORMATS, GradientFormat
from mmplan.planner.durations import replicas_per_node
from mmplan.planner.lower import reduced_bytes, stage_trained
from mmplan.planner.plan import Plan
from mmplan.units import format_bytes, format_seconds

_VALUES = {"sign4": "a sign and 4 bits", "fp8": "FP8"}


def compression_price(plan: Plan) -> tuple[str, ...]:
    """Against the same plan without; nothing where the plan compresses nothing."""
    compression = plan.scenario.technique.compression
    form = FORMATS.get(compression)
    if form is None:
        return ()
    (sent, sum_s), (whole, whole_s) = _reduction(plan), _reduction(_uncompressed(plan))
    if sent == whole:
        return (f"compression: {compression} is allowed, and no stage has replicas whose gradients it could compress",)
    saved_s = whole_s - sum_s
    words = "saves" if saved_s >= 0 else "costs"
    return (
        f"compression: {compression} {words} {format_seconds(abs(saved_s))} of the slowest stage's reduction "
        f"({format_seconds(whole_s)} without): a rank gives it {format_bytes(sent)} instead of {format_bytes(whole)}",
        _error(form),
    )


def _error(form: GradientFormat) -> str:
    """The largest fraction f of all elements has at least f of the squared norm (arXiv 1809.07599, definition 2.1)."""
    share, steps = f"{form.fraction:.0%}", f"{1 / form.fraction:.0f}"
    return (
        f"its price in error: a step says the largest {share} of the elements in {_VALUES[form.values]}, at least "
        f"{share} of the squared norm before rounding; the rest is said later, {steps} steps on average; what that "
        "cost in loss on a small task is in docs/compression.md"
    )


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
