"""Terminal tables of plans and predictions."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from mmplan.planner.compression_price import compression_price
from mmplan.planner.finding import Finding
from mmplan.planner.interval import StepInterval
from mmplan.planner.not_searched import not_searched
from mmplan.planner.plan import Plan
from mmplan.planner.plan_cost import cost_of
from mmplan.planner.pool_order import IN_HOST_MEMORY
from mmplan.planner.prediction import Prediction
from mmplan.planner.result import Considered, OptimizeResult
from mmplan.report.interval import interval_text
from mmplan.report.summary import PlanSummary
from mmplan.runtime.measurement import Measurement
from mmplan.scenario.catalogue import CatalogueDevice
from mmplan.scenario.document import counted
from mmplan.scenario.layer_ids import shorten_ids
from mmplan.scenario.scenario import Scenario
from mmplan.units import format_bytes, format_bytes_per_s, format_flops, format_seconds


def table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table in the house style; `right` names the columns aligned to the right."""
    result = Table(title=title, title_justify="left", title_style="bold", header_style="bold cyan", expand=False)
    for column in columns:
        result.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return result


def stage_table(plan: Plan) -> Table:
    """One row per stage: layers, ranks, seconds per microbatch, memory per rank against what it may use."""
    numbers = ("forward", "backward", "load", "in flight", "memory", "of usable")
    result = table(f"Stages of {plan.scenario.name}", "stage", "layers", "ranks", *numbers, right=numbers)
    slowest_s = max(stage.forward_s + stage.backward_s for stage in plan.stages)
    for index, stage in enumerate(plan.stages):
        ranks = plan.stage_ranks(index)
        result.add_row(
            str(index),
            ", ".join(shorten_ids(stage.layers)),
            str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}",
            format_seconds(stage.forward_s),
            format_seconds(stage.backward_s),
            f"{(stage.forward_s + stage.backward_s) / slowest_s:.0%}",
            str(stage.in_flight),
            format_bytes(stage.memory_bytes),
            f"{stage.memory_bytes / stage.capacity_bytes:.0%}",
        )
    return result


def prediction_table(prediction: Prediction) -> Table:
    """One row per rank: what it does in one optimizer step."""
    numbers = ("busy", "bubble", "sent", "received", "reduced", "on links", "peak memory")
    title = f"One step: {format_seconds(prediction.step_time_s)}, bubble {prediction.bubble:.1%}"
    result = table(title, "rank", "stage", "replica", *numbers, right=numbers)
    for rank in prediction.ranks:
        result.add_row(
            str(rank.rank),
            str(rank.stage),
            str(rank.replica),
            format_seconds(rank.busy_s),
            f"{rank.bubble:.1%}",
            format_bytes(rank.sent_bytes),
            format_bytes(rank.received_bytes),
            format_bytes(rank.reduce_bytes),
            format_seconds(rank.transfer_s),
            format_bytes(rank.peak_memory_bytes),
        )
    return result


_ZERO = {
    "optimizer": "optimizer state (ZeRO-1)",
    "gradients": "optimizer state, gradients (ZeRO-2)",
    "parameters": "all states (ZeRO-3, FSDP)",
}

_METRICS: tuple[tuple[str, Callable[[PlanSummary], str]], ...] = (
    ("step time, simulated", lambda s: format_seconds(s.step_time_s)),
    ("... P10 to P90", lambda s: f"{format_seconds(s.step_time_p10_s)} to {format_seconds(s.step_time_p90_s)}"),
    ("... bound of any schedule", lambda s: "" if s.any_schedule_s is None else format_seconds(s.any_schedule_s)),
    ("... gap to it", lambda s: "" if s.any_schedule_gap is None else f"{s.any_schedule_gap:.2%}"),
    ("step time, closed form", lambda s: format_seconds(s.objective_s)),
    ("... proven lower bound of it", lambda s: format_seconds(s.bound_s) if s.bound_s > 0 else "none"),
    ("... gap", lambda s: f"{s.gap:.2%} ({s.status})" if s.bound_s > 0 else s.status),
    ("samples/s", lambda s: f"{s.samples_per_s:.4g}"),
    (
        "tokens/s per device",
        lambda s: f"{s.tokens_per_s_per_device:,.0f}" if s.tokens_per_s_per_device else "not known",
    ),
    ("cost of a million tokens", lambda s: cost_text(s.cost_per_million_tokens)),
    ("... of a step", lambda s: cost_text(s.cost_per_step)),
    ("bubble", lambda s: f"{s.bubble:.1%}"),
    ("pp x dp x cp x tp", lambda s: "" if s.meshes else f"{s.pp} x {s.dp} x {s.cp} x {s.tp} = {s.devices} devices"),
    ("devices", lambda s: f"{s.devices} in {len(s.meshes)} meshes{_idle(s)}" if s.meshes else ""),
    ("... pp x dp x cp x tp of each", lambda s: "; ".join(s.meshes)),
    ("experts", lambda s: f"ep {s.ep}, etp {s.etp}" if s.ep > 1 else ""),
    ("split over replicas", lambda s: "" if s.dp * s.cp == 1 else _ZERO.get(s.sharding, "")),
    ("products in FP8", lambda s: s.fp8.replace("none", "")),
    ("sequence parallel", lambda s: "yes" if s.sequence_parallel else ""),
    ("gradients compressed", lambda s: s.compression.replace("none", "")),
    ("in host memory", lambda s: IN_HOST_MEMORY[s.offload]),
    ("spread over samples", lambda s: ", ".join(name for name in s.spread if name not in s.patches)),
    ("cut along patches", lambda s: ", ".join(s.patches)),
    ("a step ahead", lambda s: ", ".join(s.prefetch)),
    ("microbatches at once", lambda s: f"{s.batch_factor} of {', '.join(s.together)}" if s.together else ""),
    ("recomputed", lambda s: _recompute_text(s.recompute)),
    ("microbatches x samples", lambda s: f"{s.microbatches} x {s.microbatch_size}"),
    ("schedule", lambda s: s.schedule),
    ("... gap, for this cut", lambda s: "" if s.schedule_gap is None else f"{s.schedule_gap:.2%}"),
    ("fullest rank", lambda s: f"{format_bytes(s.worst_memory_bytes)} of {format_bytes(s.capacity_bytes)}"),
    ("sent between stages", lambda s: format_bytes(s.stage_bytes)),
    ("... of it gradients", lambda s: format_bytes(s.gradient_stage_bytes)),
    ("gradients reduced", lambda s: format_bytes(s.reduce_bytes)),
    ("communication overlapped", lambda s: f"{s.overlap_rate:.1%}"),
)


def cost_text(cost: float | None) -> str:
    """Four digits, in the currency of the prices; empty without prices."""
    return "" if cost is None else f"{cost:,.4g}"


def _idle(summary: PlanSummary) -> str:
    return f", and {counted(summary.idle_ranks, 'rank')} between them idle" if summary.idle_ranks else ""


def _recompute_text(levels: Sequence[str]) -> str:
    """`full in 2 of 4 stages, half in 1`; empty where nothing is recomputed."""
    counts = Counter(level for level in levels if level != "none")
    if not counts:
        return ""
    if len(levels) == 1:
        return next(iter(counts))
    first, *others = (f"{level} in {count}" for level, count in counts.most_common())
    return ", ".join([f"{first} of {len(levels)} stages", *others])


def summary_table(summaries: Sequence[PlanSummary]) -> Table:
    """Plans side by side, the first one as the reference for the speed ratio."""
    result = table("Plans side by side" if len(summaries) > 1 else "The plan", "", *(s.name for s in summaries))
    for label, text in _METRICS:
        cells = [text(summary) for summary in summaries]
        if any(cells):
            result.add_row(label, *(cell or "none" for cell in cells))
    if len(summaries) > 1:
        first_s = summaries[0].step_time_s
        ratios = [f"{s.step_time_s / first_s:.3f}" for s in summaries]
        result.add_row(f"step time / {summaries[0].name}", *ratios)
    return result


def findings_table(plan: Plan, findings: Sequence[Finding]) -> Table | str:
    """What a check found, or one line that the plan is sound."""
    if not findings:
        return f"[green]sound[/green]: {plan.scenario.name}, {len(plan.stages)} stages on {plan.rank_count} devices"
    result = table(f"{len(findings)} findings", "rule", "finding")
    for finding in findings:
        result.add_row(finding.rule, escape(finding.message))  # tensors stand in brackets
    return result


def execution_notes(refused: str | None, notes: Sequence[str] = ()) -> list[Table | str]:
    """A line that the runtime refuses a plan, with its reason, none where it runs it; and what a run would note."""
    lines: list[Table | str] = [] if refused is None else [f"[yellow]priced, not executed[/yellow]: {escape(refused)}"]
    return lines + [escape(note) for note in notes]


def optimize_tables(
    result: OptimizeResult, summary: PlanSummary, interval: StepInterval, plan_file: Path, explain: bool
) -> list[Table | str]:
    """The plan, its certificate, and on demand why the runner-ups lose."""
    counts = result.considered
    proof = f"; cut proved by {' and '.join(result.proofs)}" if result.proofs else ""
    step = format_seconds(result.plan.certificate.objective_s)
    lines = [
        f"[bold]{result.status}[/bold]: {step} per step by the closed form{_of_one_chunk(result.plan)}, "
        f"proven bound of it {format_seconds(result.bound_s)}, gap {result.gap:.2%}, in {result.wall_s:.1f} s",
        f"{counts.enumerated:,} configurations{_in_chunks(counts)}: {counts.out_of_memory:,} out of memory, "
        f"{counts.bounded_away:,} bounded away, {counts.solved:,} solved{proof}{_unread(counts)}",
    ]
    lines += _cost_line(result)
    lines += _fewer_line(result)
    lines += _simulated_lines(result.plan, summary, by_step=result.objective in ("step-time", "p90-time"))
    if result.status == "given":
        lines = [f"[bold]given[/bold]: {format_seconds(result.plan.certificate.objective_s)} per step, not searched"]
    parts: list[Table | str] = [stage_table(result.plan), summary_table([summary]), *lines, interval_text(interval)]
    if explain:
        parts += [runner_up_table(result), *compression_price(result.plan)]
    if result.status != "given":
        parts += _unsearched_lines(result.plan.scenario)
    return [*parts, f"plan: {plan_file}"]


def _in_chunks(counts: Considered) -> str:
    return f", {counts.in_chunks:,} of them with several chunks per rank" if counts.in_chunks else ""


def _unread(counts: Considered) -> str:
    """What the limit left out, which the bound covers all the same."""
    if not counts.unread:
        return ""
    orders = counted(counts.unread, "order")
    return f"; the limit left {orders} of pools and techniques unread, bounded by their matrix products alone"


def _cost_line(result: OptimizeResult) -> list[str]:
    """What was proved of the cost, where that was minimised."""
    found, least = cost_of(result.plan, result.plan.certificate.objective_s), cost_of(result.plan, result.bound_s)
    if result.objective != "cost" or found is None or least is None:
        return []
    return [
        f"{cost_text(found.per_million_tokens)} per million tokens by the closed form, and no plan costs less than "
        f"{cost_text(least.per_million_tokens)}; of a step {cost_text(found.per_step)} and {cost_text(least.per_step)}"
    ]


def _of_one_chunk(plan: Plan) -> str:
    return "" if plan.chunk_certificate is None else " with one chunk of layers per rank"


def _simulated_lines(plan: Plan, summary: PlanSummary, *, by_step: bool) -> list[str]:
    """The simulated step against what is proved of any schedule; that the plan has several chunks per rank."""
    if summary.any_schedule_s is None or summary.any_schedule_gap is None:
        return []
    chunked = plan.chunk_certificate is not None
    what = f"faster in {plan.vp} chunks per rank, {plan.schedule}" if chunked else "simulated"
    step, floor = format_seconds(summary.step_time_s), format_seconds(summary.any_schedule_s)
    within = "" if by_step else f" on at most {counted(summary.devices, 'device')}"
    return [
        f"{what}: {step} per step; under any schedule, in any number of chunks, no plan of the space searched{within} "
        f"takes less than {floor}, gap {summary.any_schedule_gap:.2%}"
    ]


def _fewer_line(result: OptimizeResult) -> list[str]:
    """What was proved of fewer devices, where they were minimised."""
    fewer, used = result.fewer, counted(result.plan.rank_count, "device")
    if fewer is None:
        return []
    within = f"within {format_seconds(fewer.deadline_s)} by the closed form"
    near = ""
    if fewer.step_bound_s is not None:
        over_s = fewer.step_bound_s - fewer.deadline_s
        step = f"on fewer than {used} a step takes at least {format_seconds(fewer.step_bound_s)}"
        near = f": {step}, {format_seconds(over_s)} ({over_s / fewer.deadline_s:.1%}) too long"
    elif not fewer.fits:
        near = ": nothing fits into their memory"
    if fewer.least == result.plan.rank_count:
        return [f"fewer than {used} are proved impossible {within}{near}"]
    return [f"open: {used} do {within}, and only fewer than {fewer.least:,} are proved impossible"]


def _unsearched_lines(scenario: Scenario) -> list[str]:
    """Axes of the search that have to be asked for."""
    told = [f"{axis.says} ({axis.constraint})" for axis in not_searched(scenario)]
    return [escape(f"not searched unless constraints ask: {'; '.join(told)}")] if told else []


def runner_up_table(result: OptimizeResult) -> Table:
    """Why other configurations lose: their step time and the terms that make it longer than the winner's."""
    numbers = ("step time", "repeat", "fill", "finish")
    runner_ups = table("Why the runner-ups lose", "configuration", *numbers, "reason", right=numbers)
    for other in result.runner_ups:
        terms = (other.repeat_more_s, other.fill_more_s, other.finish_more_s)
        known = other.objective_s is not None
        step_time = "-" if other.objective_s is None else format_seconds(other.objective_s)
        runner_ups.add_row(
            str(other.configuration), step_time, *(_more(t) if known else "-" for t in terms), other.reason
        )
    return runner_ups


def _more(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + format_seconds(abs(seconds))


def hardware_table(devices: Sequence[CatalogueDevice]) -> Table:
    """The catalogue, one row per device."""
    numbers = ("memory", "bandwidth", "bf16", "fp32")
    result = table("Devices", "name", *numbers, "node link", "network", "source", right=numbers)
    for row in devices:
        device = row.device
        bf16 = "-" if device.bf16_flops_per_s is None else f"{format_flops(device.bf16_flops_per_s)}/s"
        fp32 = f"{format_flops(device.fp32_flops_per_s)}/s"
        bandwidth = format_bytes_per_s(device.memory_bytes_per_s)
        sizes = (format_bytes(device.memory_bytes), bandwidth, bf16, fp32)
        result.add_row(device.name, *sizes, row.node_link, row.network, device.source)
    return result


def run_table(run: Measurement) -> Table:
    """One row per rank of the recorded step of a run."""
    numbers = ("busy", "bubble", "activations sent", "gradients sent", "reduced", "waited", "peak memory")
    kind = "rehearsed" if run.rehearsed else "ran"
    before = 0 if run.resumed is None else run.resumed.step
    behind = f" behind the {before} of a checkpoint" if before else ""
    count = f"{kind} {len(run.steps) - before} steps{behind}"
    step = f"{count} on {run.device}; fastest (step {run.recorded_step})"
    title = f"{step}: {format_seconds(run.step_time_s)}, bubble {run.bubble:.1%}"
    result = table(title, "rank", "stage", "replica", *numbers, right=numbers)
    for rank in run.ranks:
        result.add_row(
            str(rank.rank),
            str(rank.stage),
            str(rank.replica),
            format_seconds(rank.busy_s),
            f"{rank.bubble:.1%}",
            format_bytes(rank.activation_bytes),
            format_bytes(rank.gradient_bytes),
            format_bytes(rank.reduce_bytes),
            format_seconds(rank.wait_s),
            format_bytes(rank.peak_memory_bytes),
        )
    return result


def checkpoint_text(run: Measurement) -> tuple[str, ...]:
    """How many checkpoints there are, and how long training stood still; nothing where there were to be none."""
    there = [saved for saved in run.checkpoints if saved.problem is None]
    if not run.checkpoints:
        return ()
    missing = len(run.checkpoints) - len(there)
    text = f"{counted(len(there), 'checkpoint')} written" + (f", {missing} left out" if missing else "")
    if there:
        text += f", the last behind step {there[-1].step:,} ({format_bytes(there[-1].bytes)})"
    while_training = [saved.stall_s for saved in run.checkpoints[:-1]]  # the end waits for the last one
    if while_training:
        text += f"; training stood still {format_seconds(sum(while_training) / len(while_training))} for each before it"
    return (text,)


def loss_text(run: Measurement) -> str:
    """First and last loss of each loss module."""
    taken = [step.losses for step in run.steps if not step.skipped]
    skipped = len(run.steps) - len(taken)
    left_out = f"; {skipped} left out, because a number was none" if skipped else ""
    parts = [f"{module}: {loss:.4f} -> {taken[-1][module]:.4f}" for module, loss in taken[0].items()] if taken else []
    told = f"loss over {len(run.steps)} steps  " + ", ".join(parts) if parts else "no loss"
    return told + left_out if parts or skipped else "no loss in a rehearsal"
