"""Commands that run plans, or hold predictions against what was measured."""

from pathlib import Path
from typing import Annotated

import typer

from mmplan.commands.failures import report_error
from mmplan.commands.options import (
    ALLOWED,
    AllowedOption,
    JsonFile,
    PlanFile,
    SecondsOption,
    json_path,
    refuse_without_effect,
)
from mmplan.files import require_folder
from mmplan.runtime.checkpoint.options import DEFAULT_KEEP, Checkpoints
from mmplan.runtime.health.run_interval import DEFAULT_HEALTH_INTERVAL
from mmplan.runtime.on_nan import DEFAULT_MAX_SKIPS, OnNan
from mmplan.runtime.thresholds import Thresholds
from mmplan.runtime.torchrun import is_main_process


def execute(
    context: typer.Context,
    plan_file: PlanFile,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 10,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the run is written.")] = Path("run.json"),
    local: Annotated[int | None, typer.Option(help="Start that many processes on this machine.")] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Sleep instead of computing; communicate for real.")
    ] = False,
    unit: Annotated[float, SecondsOption(help="Mean sleep of a forward in a rehearsal.")] = 0.03,
    timeout: Annotated[
        float | None,
        SecondsOption(help="A rank that waits longer ends the run; default: 1 min, or 4 predicted steps if longer."),
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your own model and data: a Python file with `model` and `batches`."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="MANIFEST", help="With --job: rows that its `collate` makes batches of (.jsonl, .csv)."),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="safetensors files with the weights of the job's model; default: drawn."),
    ] = None,
    save_weights: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where the job's weights are saved at the end, as its library saves them."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write checkpoints there; one at the end in any case.")
    ] = None,
    every: Annotated[int | None, typer.Option(min=1, help="Steps between two checkpoints.")] = None,
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest checkpoints stay.")] = DEFAULT_KEEP,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint of --checkpoint, if there is one.")
    ] = False,
    resume_from: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Go on from the newest whole checkpoint there.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all steps of all ranks for ui.perfetto.dev.")
    ] = None,
    health: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write readings of its health, for `mmplan doctor`.")
    ] = None,
    health_interval: Annotated[
        int, typer.Option(min=1, help="Steps between those in which all monitors of --health take a reading.")
    ] = DEFAULT_HEALTH_INTERVAL,
    share_devices: Annotated[
        bool, typer.Option("--share-devices", help="Let processes share GPUs, over gloo: a check, not a training.")
    ] = False,
    on_nan: Annotated[
        OnNan, typer.Option(help="A loss or gradient that is no number: end the run, or leave the update out.")
    ] = "stop",
    max_skips: Annotated[
        int, typer.Option(min=0, help="So many updates in a row may be left out.")
    ] = DEFAULT_MAX_SKIPS,
    step_timeout: Annotated[
        float | None,
        SecondsOption(help="A longer step ends the run; default: 10 times --timeout."),
    ] = None,
    inject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FAULT", help="Rehearse a fault: 'kill rank=1 step=3 action=B2'; raise, stall, stop, nan."
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Run a plan: under torchrun (torchrun ... -m mmplan execute PLAN), or here with --local N."""
    from mmplan.planner.plan import load_plan
    from mmplan.report.console import emit
    from mmplan.report.documents import execute_document
    from mmplan.report.progress import run_progress
    from mmplan.report.tables import checkpoint_text, loss_text, run_table
    from mmplan.runtime.inject import parse_injection
    from mmplan.runtime.launch import execute
    from mmplan.runtime.measurement import require_last_checkpoint, save_run

    refuse_without_effect(
        context,
        {
            "resume": (checkpoint is not None, "--checkpoint FOLDER, whose checkpoints it goes on from"),
            "every": (checkpoint is not None, "--checkpoint FOLDER"),
            "keep": (checkpoint is not None, "--checkpoint FOLDER"),
            "unit": (rehearse, "--rehearse"),
            "health_interval": (health is not None, "--health FILE"),
            "max_skips": (on_nan == "skip", "--on-nan skip"),
        },
    )
    if is_main_process():  # other hosts need no such folder
        require_folder(output, trace, health, json_path(json_file))
    plan = load_plan(plan_file)
    checkpoints = Checkpoints(
        folder=checkpoint,
        every=every,
        keep=keep,
        resume=resume_from or (checkpoint if resume else None),
        required=resume_from is not None,
    )
    with run_progress(plan.scenario.name, steps, shown=is_main_process()) as (on_step, on_note):
        run = execute(
            plan,
            local=local,
            steps=steps,
            rehearse=rehearse,
            unit_s=unit,
            timeout_s=timeout,
            job=job,
            data=data,
            weights=weights,
            save_weights=save_weights,
            checkpoints=checkpoints,
            trace=trace,
            health=health,
            health_interval=health_interval,
            share_devices=share_devices,
            on_nan=on_nan,
            max_skips=max_skips,
            step_timeout_s=step_timeout,
            inject=[parse_injection(text) for text in inject or ()],
            failure_file=output.with_suffix(".failure.txt"),
            on_step=on_step,
            on_note=on_note,
            on_failure=lambda message: report_error("failed", message),
        )
    if run is not None:  # on rank 0 alone
        save_run(run, output)
        saved = checkpoint_text(run)
        emit(json_file, execute_document(run), run_table(run), loss_text(run), *saved, f"run: {output}")
        require_last_checkpoint(run)


def validate(
    context: typer.Context,
    plan_file: PlanFile,
    run_file: Annotated[Path, typer.Argument(metavar="RUN", help="The run.json of that plan.")],
    bubble: Annotated[float, AllowedOption(help="Allowed difference of the bubble rate of a run.")] = ALLOWED.bubble,
    rehearsed_bubble: Annotated[float, AllowedOption(help="The same of a rehearsal.")] = ALLOWED.rehearsed_bubble,
    step_time: Annotated[
        float, AllowedOption(help="Allowed relative difference of the step time.")
    ] = ALLOWED.step_time,
    memory: Annotated[float, AllowedOption(help="Allowed relative difference of peak memory.")] = ALLOWED.memory,
    communication: Annotated[
        float | None,
        AllowedOption(help="Allowed relative difference of communication time; default: no verdict."),
    ] = ALLOWED.communication,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures that needs no network.")] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Let the run correct the prices; predict again with them.")
    ] = False,
    output: Annotated[Path, typer.Option("-o", "--output", help="Profile file of --calibrate.")] = Path(
        "calibrated.profile.yaml"
    ),
    held_out: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="PLAN RUN", help="With --calibrate: predict this run too, which it has not seen."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Put a run beside its prediction, per rank and in total; exit code 1 when a threshold is missed."""
    from mmplan.planner.plan import load_plan
    from mmplan.report.calibration import calibration_tables, repriced_document, repriced_table
    from mmplan.report.console import emit
    from mmplan.report.documents import validate_document
    from mmplan.report.validation import validation_page
    from mmplan.report.validation_tables import validation_tables
    from mmplan.runtime.measurement import load_run
    from mmplan.runtime.refine import refine
    from mmplan.runtime.reprice import reprice_files
    from mmplan.runtime.run_check import require_consistent
    from mmplan.runtime.validate import validate
    from mmplan.scenario.profile import save_profile

    require_folder(html, json_path(json_file), output if calibrate else None)
    refuse_without_effect(
        context,
        {"output": (calibrate, "--calibrate"), "held_out": (calibrate, "--calibrate, which has not seen that run")},
    )
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
    document, tables = validate_document(validation), validation_tables(plan, validation)
    if calibrate:
        profile = refine(plan, run, run_file)
        rows = reprice_files((plan, run, run_file), [held_out] if held_out else [], profile, output)
        save_profile(profile, output)
        document["calibration"] = repriced_document(rows, profile, output)
        tables += [repriced_table(rows), *calibration_tables(profile, output)]
    emit(json_file, document, *tables)
    raise typer.Exit(0 if validation.passed else 1)


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
