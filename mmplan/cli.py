"""The command line: each command is a straight line from files to output.

Heavy imports stand inside the commands, so that `mmplan --help` answers at once. Results go to stdout, progress to
stderr; every command also writes one versioned document with `--json FILE` (`-` for stdout, and nothing else there).
Exit codes: 0 done, 1 a threshold or check missed, 2 bad input, 3 proved infeasible, 4 no plan within the limit.
"""

import json
import os
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from mmplan.errors import CheckError, InfeasibleError, InputError, MmplanError, NoPlanFoundError, RunError
from mmplan.files import require_folder, write_file
from mmplan.planner.stopping import SCHEDULE_SEARCH_S, TIME_LIMIT_S
from mmplan.runtime.thresholds import Thresholds
from mmplan.runtime.torchrun import first_to_report, is_main_process, under_torchrun
from mmplan.units import parse_seconds

app = typer.Typer(
    name="mmplan",
    help="Certified parallel plans for multimodal training: optimize, simulate, compare, check, execute, validate.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 1 threshold or check missed, 2 bad input, 3 proved infeasible, 4 no plan in the limit.",
)


def seconds(text: str | float) -> float:
    """An option such as `30 ms`, in seconds."""
    try:
        return text if isinstance(text, float) else parse_seconds(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def json_path(json_file: str | None) -> Path | None:
    """The file of `--json`, None when there is none or it is stdout."""
    return None if json_file in (None, "-") else Path(str(json_file))


JsonFile = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write a JSON document; - for stdout.")]
ALLOWED = Thresholds()
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")]
ScenarioFile = Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario YAML file.")]


def main() -> None:
    """Run a command and turn errors that a user can cause into one sentence and an exit code."""
    try:
        app()
    except SystemExit as stop:
        if stop.code == 130:
            sys.stderr.write("interrupted: nothing was written\n")
        if stop.code == 2:  # the parser has told the user what is wrong
            _write_error("bad_input", "wrong options or arguments, see --help of the command")
        raise
    except MmplanError as error:
        status = {InfeasibleError: "infeasible", NoPlanFoundError: "no_plan", CheckError: "failed", RunError: "failed"}
        _report_error(status.get(type(error), "bad_input"), str(error))
        _exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or closing stdout fails again at exit
        sys.exit(0)


def _exit(code: int) -> None:
    """Straight out under torchrun: threads of a communication library must not keep a failed process alive."""
    if not under_torchrun():
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report_error(status: str, message: str) -> None:
    """The sentence to stderr, and its document, once for all processes of a run."""
    sys.stderr.write(f"error: {message}\n")
    _write_error(status, message)


def _write_error(status: str, message: str) -> None:
    """The document of an error where `--json` asked for one."""
    arguments = sys.argv[1:]
    targets = [a.partition("=")[2] for a in arguments if a.startswith("--json=")]
    targets += [after for option, after in pairwise(arguments) if option == "--json"]
    if targets and first_to_report():
        text = json.dumps({"schema": "mmplan.error/1", "status": status, "message": message}, indent=1) + "\n"
        target = json_path(targets[-1])
        if target is None:
            sys.stdout.write(text)
        else:
            with suppress(InputError):  # a place that cannot be written to may be the very error
                write_file(target, text)


@app.command()
def backtest(
    tables: Annotated[
        list[Path] | None, typer.Argument(metavar="[DATA.csv ...]", help="Measured steps; default: the shipped table.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write predicted against measured as PNG.")] = None,
    explain: Annotated[str | None, typer.Option(metavar="ROW", help="Show where the time of one row goes.")] = None,
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="Predict each group by a fit to the others.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Predict step times that others measured and published; errors per source, ranking inside sweeps."""
    import mmplan.planner.backtest as measured
    from mmplan.planner.leave_one_out import leave_one_out as fitted_to_others
    from mmplan.planner.memory_backtest import memory_backtest
    from mmplan.report.backtest import backtest_document, backtest_tables, explain_table, plot_backtest
    from mmplan.report.console import emit

    require_folder(plot, json_path(json_file))
    result = measured.backtest(tables or [measured.SHIPPED])
    memory = memory_backtest(result.rows())
    left_out = fitted_to_others(result) if leave_one_out else None
    parts = (explain_table(result, explain),) if explain else backtest_tables(result, memory, left_out)
    if plot is not None:
        plot_backtest(result, plot)
    emit(json_file, backtest_document(result, memory, left_out), *parts)


@app.command()
def calibrate(
    plan_file: Annotated[Path | None, typer.Argument(metavar="[PLAN]", help="With --from: the plan that ran.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Profile file.")] = Path("device.profile.yaml"),
    run_file: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Refine by a run.json, measure nothing.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: CUDA where there is one.")] = None,
    base: Annotated[str | None, typer.Option(help="Catalogue device whose peaks apply; default: by name.")] = None,
    local: Annotated[int | None, typer.Option(help="Also measure links between so many processes here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and repeats.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure what this device reaches of its peaks, or refine it by a run; a scenario can name the profile."""
    from mmplan.report.calibration import calibrate_document, calibration_tables
    from mmplan.report.console import emit
    from mmplan.report.progress import calibration_progress
    from mmplan.runtime.calibrate import calibrate
    from mmplan.runtime.refine import refined_profile
    from mmplan.scenario.profile import save_profile

    require_folder(output, json_path(json_file))
    with calibration_progress() as progress:
        if run_file is not None or plan_file is not None:
            profile = refined_profile(plan_file, run_file)
        else:
            profile = calibrate(device=device, base=base, quick=quick, local=local, on_progress=progress)
    save_profile(profile, output)
    emit(json_file, calibrate_document(profile, output), *calibration_tables(profile, output))


@app.command()
def schema(json_file: JsonFile = None) -> None:
    """Print the JSON Schema of scenario files, for editors."""
    from mmplan.scenario.schema import scenario_json_schema

    text, target = json.dumps(scenario_json_schema(), indent=1) + "\n", json_path(json_file)
    if target is None:
        sys.stdout.write(text)
    else:
        write_file(target, text)


@app.command()
def hardware(json_file: JsonFile = None) -> None:
    """List the devices of the bundled hardware catalogue with their sources."""
    from mmplan.report.console import emit
    from mmplan.report.documents import hardware_document
    from mmplan.report.tables import hardware_table
    from mmplan.scenario.catalogue import catalogue_device, device_names

    devices = [catalogue_device(name) for name in device_names()]
    emit(json_file, hardware_document(devices), hardware_table(devices))


@app.command()
def optimize(
    scenario: ScenarioFile,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Plan file; default: NAME.plan.json.")] = None,
    gap: Annotated[float, typer.Option(min=0.0, max=1.0, help="Stop when this gap is proven.")] = 0.01,
    time_limit: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which the best plan so far is kept.")
    ] = TIME_LIMIT_S,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Same input and seed, same plan.")] = 0,
    schedule_search: Annotated[
        float, typer.Option(min=0.0, help="Seconds to look for a better schedule of the best cut; 0: keep 1F1B.")
    ] = SCHEDULE_SEARCH_S,
    explain: Annotated[bool, typer.Option("--explain", help="Say why the runner-ups lose.")] = False,
    naive: Annotated[bool, typer.Option("--naive", help="Do not search: equal layer counts, as cut by hand.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Find the best plan of a scenario, with a proven gap. Ctrl-C keeps the best plan so far."""
    from mmplan.planner.interval import plan_interval
    from mmplan.planner.naive import naive_result
    from mmplan.planner.plan import save_plan
    from mmplan.planner.search import optimize
    from mmplan.report.console import emit
    from mmplan.report.documents import optimize_document
    from mmplan.report.progress import search_progress
    from mmplan.report.simulation import simulate_plan
    from mmplan.report.summary import summarise
    from mmplan.report.tables import optimize_tables
    from mmplan.scenario.load import load_scenario

    require_folder(output, json_path(json_file))
    loaded = load_scenario(scenario)
    with search_progress(loaded.name) as progress:
        if naive:
            result = naive_result(loaded)
        else:
            result = optimize(
                loaded,
                gap=gap,
                time_limit_s=time_limit,
                seed=seed,
                schedule_search_s=schedule_search,
                on_improvement=progress,
            )
    target = output or Path(f"{loaded.name}.plan.json")
    save_plan(result.plan, target)
    summary = summarise(loaded.name, result.plan, simulate_plan(result.plan))
    interval = plan_interval(result.plan, summary.step_time_s)
    tables = optimize_tables(result, summary, interval, target, explain)
    emit(json_file, optimize_document(result, summary, interval), *tables)


@app.command()
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
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan with that schedule.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Simulate one optimizer step of a plan: time, bubble, bytes and memory of every rank."""
    from mmplan.planner.interval import plan_interval
    from mmplan.planner.plan import load_plan, save_plan
    from mmplan.report.console import emit
    from mmplan.report.documents import schedules_document, simulate_document
    from mmplan.report.gantt import plot_gantt
    from mmplan.report.interval import interval_text
    from mmplan.report.perfetto import save_trace
    from mmplan.report.schedules import schedule_name, schedule_rows, schedule_table, under_schedule
    from mmplan.report.simulation import simulate_plan
    from mmplan.report.sparkline import busy_table
    from mmplan.report.tables import prediction_table, stage_table
    from mmplan.report.utilisation import plan_utilisation, utilisation_table

    require_folder(trace, plot, output, json_path(json_file))
    plan = load_plan(plan_file)
    if schedule == "all":
        rows = schedule_rows(plan)
        emit(json_file, schedules_document(plan, rows), schedule_table(plan, rows))
        return
    if schedule is not None:
        plan = under_schedule(plan, schedule_name(schedule))
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
    emit(json_file, document, *parts, busy_table(prediction), interval_text(interval))


@app.command()
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


@app.command()
def compare(
    plan_files: Annotated[list[Path], typer.Argument(metavar="PLAN...", help="Two or more plan.json.")],
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures that needs no network.")] = None,
    rank: Annotated[str | None, typer.Option(help="Order by the step time (p50) or its P90 (p90).")] = None,
    json_file: JsonFile = None,
) -> None:
    """Put plans side by side: time, bubble, memory, communication."""
    from mmplan.planner.plan import load_plan
    from mmplan.report.console import emit
    from mmplan.report.documents import compare_document
    from mmplan.report.page import compare_page
    from mmplan.report.simulation import simulate_plan
    from mmplan.report.summary import names_of, ranked, summarise
    from mmplan.report.tables import summary_table

    require_folder(html, json_path(json_file))
    plans = dict(zip(names_of(plan_files), map(load_plan, plan_files), strict=True))
    predictions = {name: simulate_plan(plan) for name, plan in plans.items()}
    summaries = ranked([summarise(name, plan, predictions[name]) for name, plan in plans.items()], rank)
    if html is not None:
        compare_page(plans, predictions, summaries, html)
    emit(json_file, compare_document(summaries), summary_table(summaries))


@app.command()
def check(
    plan_file: PlanFile,
    runtime: Annotated[
        str, typer.Option(help="Whose rules decide about hangs: mmplan, fsdp, zero3, zero2 or megatron-pp.")
    ] = "mmplan",
    json_file: JsonFile = None,
) -> None:
    """Check a plan independently of the planner: layers, memory, zones, degrees, deadlocks, hangs by missing images."""
    from mmplan.planner.check import check_plan
    from mmplan.planner.check_hangs import check_hangs, runtime_name
    from mmplan.planner.plan import load_plan
    from mmplan.report.console import emit
    from mmplan.report.documents import check_document
    from mmplan.report.tables import findings_table

    plan = load_plan(plan_file)
    findings = check_plan(plan) or check_hangs(plan, runtime_name(runtime))
    emit(json_file, check_document(plan, findings), findings_table(plan, findings))
    raise typer.Exit(1 if findings else 0)


@app.command()
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
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel degree.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    dp: Annotated[int | None, typer.Option(min=1, help="Replicas; default: all devices.")] = None,
    cp: Annotated[int, typer.Option(min=1, help="Context parallel degree.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert parallel degree.")] = 1,
    etp: Annotated[int, typer.Option(min=1, help="Tensor parallel degree inside an expert.")] = 1,
    vp: Annotated[int, typer.Option(min=1, help="Chunks of layers per stage (interleaving).")] = 1,
    mbs: Annotated[int, typer.Option(min=1, help="Sequences in a microbatch.")] = 1,
    gbs: Annotated[int | None, typer.Option(min=1, help="Global batch; default: the scenario's.")] = None,
    schedule: Annotated[str | None, typer.Option(help="1f1b, gpipe, interleaved, zb-1p, zb-2p or zb-v.")] = None,
    stack: Annotated[str | None, typer.Option(help="Software stack, e.g. nemo-2025, deepspeed-2024.")] = None,
    zero: Annotated[int | None, typer.Option(min=0, max=3, help="ZeRO stage; 2 and 3 are FSDP's too.")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective, full, or layers per stage.")] = None,
    attention: Annotated[str | None, typer.Option(help="math, flash1, flash2, flash3 or cudnn.")] = None,
    offload: Annotated[
        str | None, typer.Option(help="none, optimizer or parameters: what lives in host memory.")
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


@app.command()
def execute(
    plan_file: PlanFile,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 10,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the run is written.")] = Path("run.json"),
    local: Annotated[int | None, typer.Option(help="Start that many processes on this machine.")] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Sleep instead of computing; communicate for real.")
    ] = False,
    unit: Annotated[float, typer.Option(parser=seconds, help="Mean sleep of a forward in a rehearsal.")] = 0.03,
    timeout: Annotated[
        float | None,
        typer.Option(
            parser=seconds,
            help="A rank that waits longer ends the run; default: 1 min, or 4 predicted steps if longer.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Run a plan: under torchrun (torchrun ... -m mmplan execute PLAN), or here with --local N."""
    from mmplan.planner.plan import load_plan
    from mmplan.report.console import emit
    from mmplan.report.documents import execute_document
    from mmplan.report.progress import run_progress
    from mmplan.report.tables import loss_text, run_table
    from mmplan.runtime.launch import execute
    from mmplan.runtime.measurement import save_run

    if is_main_process():  # other hosts need no such folder
        require_folder(output, json_path(json_file))
    plan = load_plan(plan_file)
    with run_progress(plan.scenario.name, steps, shown=is_main_process()) as progress:
        run = execute(
            plan,
            local=local,
            steps=steps,
            rehearse=rehearse,
            unit_s=unit,
            timeout_s=timeout,
            on_step=progress,
        )
    if run is not None:  # on rank 0 alone
        save_run(run, output)
        emit(json_file, execute_document(run), run_table(run), loss_text(run), f"run: {output}")


@app.command()
def validate(
    plan_file: PlanFile,
    run_file: Annotated[Path, typer.Argument(metavar="RUN", help="The run.json of that plan.")],
    bubble: Annotated[float, typer.Option(help="Allowed difference of the bubble rate of a run.")] = ALLOWED.bubble,
    rehearsed_bubble: Annotated[float, typer.Option(help="The same of a rehearsal.")] = ALLOWED.rehearsed_bubble,
    step_time: Annotated[float, typer.Option(help="Allowed relative difference of the step time.")] = ALLOWED.step_time,
    memory: Annotated[float, typer.Option(help="Allowed relative difference of peak memory.")] = ALLOWED.memory,
    communication: Annotated[
        float | None, typer.Option(help="Allowed relative difference of communication time; default: no verdict.")
    ] = ALLOWED.communication,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures that needs no network.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Put a run beside its prediction, per rank and in total; exit code 1 when a threshold is missed."""
    from mmplan.planner.plan import load_plan
    from mmplan.report.console import emit
    from mmplan.report.documents import validate_document
    from mmplan.report.tables import validation_table
    from mmplan.report.validation import validation_page
    from mmplan.runtime.measurement import load_run
    from mmplan.runtime.run_check import require_consistent
    from mmplan.runtime.validate import validate

    require_folder(html, json_path(json_file))
    plan, run = load_plan(plan_file), load_run(run_file)
    require_consistent(run, run_file)
    limits = Thresholds(
        bubble=bubble,
        rehearsed_bubble=rehearsed_bubble,
        step_time=step_time,
        memory=memory,
        communication=communication,
    )
    validation = validate(plan, run, limits)
    if html is not None:
        validation_page(plan, run, validation, html)
    emit(json_file, validate_document(validation), validation_table(validation))
    raise typer.Exit(0 if validation.passed else 1)
