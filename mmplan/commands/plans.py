"""Commands on scenarios and plans: nothing here runs a model."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mmplan.commands.options import (
    Gap,
    JsonFile,
    LongestStep,
    ObjectiveWord,
    PlanFile,
    ScenarioFile,
    ScheduleSearch,
    Seed,
    TimeLimit,
    json_path,
)
from mmplan.errors import InputError
from mmplan.files import require_folder
from mmplan.planner.stopping import SCHEDULE_SEARCH_S, TIME_LIMIT_S, Deadline


def optimize(
    scenario: ScenarioFile,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Plan file; default: NAME.plan.json.")] = None,
    gap: Gap = 0.01,
    time_limit: TimeLimit = TIME_LIMIT_S,
    seed: Seed = 0,
    objective: ObjectiveWord = "step-time",
    deadline: LongestStep = None,
    schedule_search: ScheduleSearch = SCHEDULE_SEARCH_S,
    explain: Annotated[bool, typer.Option("--explain", help="Say why the runner-ups lose.")] = False,
    why_not: Annotated[
        list[str] | None,
        typer.Option(metavar="DEGREES", help="Say what other degrees would cost: 'tp=4 pp=2'; repeatable."),
    ] = None,
    zone_prices: Annotated[
        bool, typer.Option("--zone-prices", help="Solve without each no-split zone: what it costs per step.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with the layer graph, its stages and zones.")] = None,
    naive: Annotated[bool, typer.Option("--naive", help="Do not search: equal layer counts, as cut by hand.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Find the best plan of a scenario, with a proven gap. Ctrl-C keeps the best plan so far."""
    from mmplan.planner.interval import plan_interval
    from mmplan.planner.naive import naive_result
    from mmplan.planner.objective import objective_of, require_prices
    from mmplan.planner.pins import questions
    from mmplan.planner.plan import save_plan
    from mmplan.planner.repeated import Limits
    from mmplan.planner.shadow_price import zone_prices as zone_costs
    from mmplan.planner.why_not import why_not as why_not_plan
    from mmplan.report.alternatives import alternatives_tables, alternatives_values
    from mmplan.report.borders import border_tables
    from mmplan.report.console import emit
    from mmplan.report.documents import optimize_document
    from mmplan.report.progress import search_progress
    from mmplan.report.simulation import simulate_plan
    from mmplan.report.summary import summarise
    from mmplan.report.tables import execution_notes, optimize_tables
    from mmplan.runtime.requirements import why_not_executed
    from mmplan.scenario.load import load_scenario

    require_folder(output, html, json_path(json_file))
    wanted, loaded = objective_of(objective, deadline, searched=not naive), load_scenario(scenario)
    require_prices(wanted, loaded.cluster, scenario)
    asked = questions(loaded, why_not or (), zone_prices, by_step_time=not naive and objective == "step-time")
    ends = Deadline(limit_s=time_limit)
    with search_progress(loaded.name) as progress:
        limits = Limits(gap=gap, time_limit_s=time_limit, seed=seed, on_improvement=progress)
        own = replace(limits, objective=wanted, schedule_search_s=schedule_search)
        result = naive_result(loaded) if naive else own.solve(loaded)
        told = [why_not_plan(loaded, result.plan, pins, limits.until(ends)) for pins in asked]
        prices = zone_costs(loaded, result.plan.certificate, limits.until(ends)) if zone_prices else ()
    target = output or Path(f"{loaded.name}.plan.json")
    save_plan(result.plan, target)
    prediction = simulate_plan(result.plan)
    interval = plan_interval(result.plan, prediction.step_time_s)
    summary = summarise(loaded.name, result.plan, prediction, interval)
    refused = why_not_executed(result.plan)
    document = {**optimize_document(result, summary, interval), **alternatives_values(told, prices)}
    document["not_executed"] = refused
    tables = [*optimize_tables(result, summary, interval, target, explain), *alternatives_tables(told, prices)]
    tables += [*(border_tables(result.plan) if explain else ()), *execution_notes(refused)]
    if html is not None:
        from mmplan.report.plan_page import plan_page  # pictures take a fifth of a second to import

        plan_page(result.plan, prediction, tables, prices, html)
    emit(json_file, document, *tables)


def simulate(
    plan_file: PlanFile,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace for Perfetto.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a Gantt chart as PNG.")] = None,
    step: Annotated[
        int | None, typer.Option(help="Draw the samples of this step from the data; without it, mean samples.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help="Another schedule for the plan's stages; all: compare them.")
    ] = None,
    schedule_csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the schedule as CSV for torch.distributed.pipelining.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan with that schedule.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Simulate one optimizer step of a plan: time, bubble, bytes and memory of every rank."""
    from mmplan.planner.interval import plan_interval
    from mmplan.planner.plan import load_plan, save_plan
    from mmplan.report.borders import border_tables
    from mmplan.report.console import emit
    from mmplan.report.documents import schedules_document, simulate_document
    from mmplan.report.gantt import plot_gantt
    from mmplan.report.interval import interval_text
    from mmplan.report.perfetto import save_trace
    from mmplan.report.schedules import save_torch_csv, schedule_name, schedule_rows, schedule_table, under_schedule
    from mmplan.report.simulation import simulate_plan
    from mmplan.report.sparkline import busy_table
    from mmplan.report.tables import prediction_table, stage_table
    from mmplan.report.utilisation import plan_utilisation, utilisation_table

    require_folder(trace, plot, schedule_csv, output, json_path(json_file))
    if schedule == "all" and any(path is not None for path in (trace, plot, schedule_csv, output)):
        raise typer.BadParameter("--schedule all compares, and writes no file; name the schedule to write")
    plan = load_plan(plan_file)
    if schedule == "all":
        rows = schedule_rows(plan)
        emit(json_file, schedules_document(plan, rows), schedule_table(plan, rows))
        return
    if schedule is not None:
        plan = under_schedule(plan, schedule_name(schedule))
    if schedule_csv is not None:
        save_torch_csv(plan, schedule_csv)
    if output is not None:
        save_plan(plan, output)
    prediction = simulate_plan(plan, step)
    interval = plan_interval(plan, prediction.step_time_s)
    if trace is not None:
        save_trace(plan, prediction, trace)
    if plot is not None:
        plot_gantt(plan, prediction, plot)
    parts = stage_table(plan), prediction_table(prediction), utilisation_table(plan_utilisation(plan, prediction))
    document = simulate_document(plan, prediction, interval)
    emit(json_file, document, *parts, *border_tables(plan), busy_table(prediction), interval_text(interval))


def compare(
    plan_files: Annotated[list[Path], typer.Argument(metavar="PLAN...", help="One or more plan.json.")],
    expert: Annotated[
        bool,
        typer.Option("--expert", help="Beside them the recipes of the first plan's scenario, and the rule of thumb."),
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures that needs no network.")] = None,
    rank: Annotated[str | None, typer.Option(help="Order by the step time (p50) or its P90 (p90).")] = None,
    json_file: JsonFile = None,
) -> None:
    """Put plans side by side: time, bubble, memory, communication."""
    from mmplan.planner.plan import load_plan
    from mmplan.planner.rule_of_thumb import plan_experts
    from mmplan.report.console import emit
    from mmplan.report.documents import compare_document
    from mmplan.report.page import compare_page
    from mmplan.report.recipes import recipe_plans, recipe_tables
    from mmplan.report.simulation import simulate_plan
    from mmplan.report.summary import names_of, ranked, summarise
    from mmplan.report.tables import summary_table

    require_folder(html, json_path(json_file))
    plans = dict(zip(names_of(plan_files), map(load_plan, plan_files), strict=True))
    ours, first = next(iter(plans.items()))
    recipes = plan_experts(first) if expert else ()
    plans |= recipe_plans(recipes)
    predictions = {name: simulate_plan(plan) for name, plan in plans.items()}
    summaries = ranked([summarise(name, plan, predictions[name]) for name, plan in plans.items()], rank)
    told = recipe_tables(recipes, ours)
    if html is not None:
        compare_page(plans, predictions, summaries, html, told)
    emit(json_file, compare_document(summaries, recipes), summary_table(summaries), *told)


def check(
    plan_file: PlanFile,
    runtime: Annotated[
        str, typer.Option(help="Whose rules decide about hangs: mmplan, fsdp, zero3, zero2 or megatron-pp.")
    ] = "mmplan",
    job: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your own model and data: also whether `execute --job` runs them so."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="MANIFEST", help="With --job: rows that its `collate` makes batches of.")
    ] = None,
    gradients: Annotated[
        bool,
        typer.Option(
            "--gradients", help="Run its first step here, a process for each rank, and hold loss and gradients to one."
        ),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Check a plan independently of the planner: layers, memory, zones, degrees, deadlocks, hangs by missing images."""
    from mmplan.planner.check import check_plan
    from mmplan.planner.check_hangs import check_hangs, runtime_name
    from mmplan.planner.plan import load_plan
    from mmplan.report.console import emit
    from mmplan.report.documents import check_document
    from mmplan.report.gradients import gradients_text
    from mmplan.report.tables import execution_notes, findings_table
    from mmplan.runtime.requirements import why_not_executed

    if data is not None and job is None:
        raise InputError("a manifest holds the data of a job's model: name the job too", file=data)
    plan = load_plan(plan_file)
    findings = check_plan(plan) or check_hangs(plan, runtime_name(runtime))
    refused: str | None = None
    notes: tuple[str, ...] = ()
    if job is not None and not findings:
        from mmplan.runtime.ghost.before_run import why_not_run  # takes torch and the job's own libraries

        refused, notes = why_not_run(plan, job, data)
    elif not findings:
        refused = why_not_executed(plan)
    compared = None
    if gradients and not findings and refused is None:
        from mmplan.runtime.against_one_process import compare_with_one_process  # takes torch

        compared = compare_with_one_process(plan, job, data)
    tables = findings_table(plan, findings), *execution_notes(refused, notes), *gradients_text(compared)
    emit(json_file, check_document(plan, findings, refused, notes, compared), *tables)
    wrong = ((job is not None or gradients) and refused is not None) or (compared is not None and not compared.passed)
    raise typer.Exit(1 if findings or wrong else 0)


def fit(
    scenario: Annotated[
        Path | None, typer.Argument(metavar="SCENARIO", help="A scenario YAML file; or --model.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Instead of a scenario: a config.json or a bundled name.")] = None,
    gpu: Annotated[str | None, typer.Option(help="A device of `mmplan hardware`.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="How many.")] = None,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence, images included (with --model).")
    ] = None,
    images: Annotated[int, typer.Option(min=0, help="Images in a sequence (with --model).")] = 0,
    image_size: Annotated[int, typer.Option(min=1, help="Their side in pixels (with --model).")] = 448,
    freeze: Annotated[list[str] | None, typer.Option(help="A module not to train (with --model); repeatable.")] = None,
    lora: Annotated[int | None, typer.Option(min=1, help="Rank of LoRA on the language model (with --model).")] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="A recipe of the scenario; its only one needs no naming.")
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor parallel degree.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline stages.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Replicas; default: all devices.")] = None,
    cp: Annotated[int | None, typer.Option(min=1, help="Context parallel degree.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert parallel degree.")] = None,
    etp: Annotated[int | None, typer.Option(min=1, help="Tensor parallel degree inside an expert.")] = None,
    vp: Annotated[int | None, typer.Option(min=1, help="Chunks of layers per stage (interleaving).")] = None,
    mbs: Annotated[int | None, typer.Option(min=1, help="Sequences in a microbatch.")] = None,
    gbs: Annotated[int | None, typer.Option(min=1, help="Global batch; default: the scenario's.")] = None,
    schedule: Annotated[str | None, typer.Option(help="1f1b, gpipe, interleaved, zb-1p, zb-2p or zb-v.")] = None,
    stack: Annotated[str | None, typer.Option(help="Software stack, e.g. nemo-2025, deepspeed-2024.")] = None,
    zero: Annotated[int | None, typer.Option(min=0, max=3, help="ZeRO stage; 2 and 3 are FSDP's too.")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective, full, or layers per stage.")] = None,
    attention: Annotated[str | None, typer.Option(help="math, flash1, flash2, flash3 or cudnn.")] = None,
    offload: Annotated[
        str | None,
        typer.Option(help="none, optimizer, parameters, activations or optimizer+activations: on the host."),
    ] = None,
    sequence_parallel: Annotated[
        bool | None, typer.Option("--sp/--no-sp", help="Sequence parallel; default: the stack's.")
    ] = None,
    fp8: Annotated[str | None, typer.Option(help="none, tensor, block or mx.")] = None,
    cross_entropy: Annotated[str | None, typer.Option(help="plain, fused or chunked.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show every formula with its numbers.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Say whether one configuration fits, without search: memory by part and stage, step time, what would help."""
    options = {name: value for name, value in locals().items() if name not in ("explain", "json_file", "freeze")}
    from mmplan.planner.fit import fit
    from mmplan.planner.fit_job import Question, job_of
    from mmplan.report.console import emit
    from mmplan.report.fit import fit_document, fit_tables

    require_folder(json_path(json_file))
    result = fit(*job_of(Question(freeze=tuple(freeze or ()), **options)))
    emit(json_file, fit_document(result), *fit_tables(result, explain))
    raise typer.Exit(1 if result.verdict.kind == "OOM" else 0)


def data(
    scenario: ScenarioFile,
    plan_file: Annotated[Path | None, typer.Argument(metavar="[PLAN]", help="A plan.json of the scenario.")] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps to draw for step times.")] = 64,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan with the advice.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture as PNG.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Say what the data brings: tokens per module, and of a plan the step times of each way to compose microbatches."""
    from mmplan.planner.data_study import save_advised_plan, study_data
    from mmplan.planner.token_counts import token_counts
    from mmplan.report.console import emit
    from mmplan.report.data import data_document, data_tables, plot_data
    from mmplan.scenario.load import load_scenario

    require_folder(output, plot, json_path(json_file))
    loaded = load_scenario(scenario)
    study = study_data(loaded, plan_file, steps)
    counts = token_counts(loaded, microbatch_size=study.microbatch_size, replicas=study.replicas)
    if plot is not None:
        plot_data(loaded, counts, study.times, plot)
    if output is not None:
        save_advised_plan(study, output)
    emit(json_file, data_document(loaded, counts, study), *data_tables(loaded, counts, study))
