"""`mmplan sensitivity`: which layers the loss reacts to most, by the Hessian; `optimize` makes zones of them."""

from pathlib import Path
from typing import Annotated

import typer

from mmplan.commands.options import JsonFile, ScenarioFile, json_path
from mmplan.errors import InputError
from mmplan.files import require_folder
from mmplan.runtime.torchrun import is_main_process


def sensitivity(
    scenario: ScenarioFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="The sensitivity file.")] = Path("sensitivity.json"),
    job: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your own model and data: a Python file with `model` and `batches`."),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="A checkpoint of `execute`, or safetensors of the job's model."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Other data: a manifest, or with --job a Python file with `batches`."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of one batch.")] = 8,
    batches: Annotated[int, typer.Option(min=1, help="Batches of each seed; they give the interval.")] = 3,
    seeds: Annotated[int, typer.Option(min=1, help="Repeat with other batches and starts; ranks are compared.")] = 2,
    microbatch: Annotated[
        int | None, typer.Option(min=1, help="Samples of one forward; default: all alike, of a job 1.")
    ] = None,
    layers: Annotated[
        list[str] | None, typer.Option(metavar="LAYERS", help="Only these: llm.0-3, vision; repeatable.")
    ] = None,
    rule: Annotated[
        str, typer.Option(help="What makes zones: percentile:85, top:3, above:2.5 or gap.")
    ] = "percentile:85",
    gauss_newton: Annotated[
        bool, typer.Option("--gauss-newton", help="The Gauss-Newton matrix: without the model's own curvature.")
    ] = False,
    trace: Annotated[int, typer.Option(min=0, help="Also estimate the trace by so many random vectors.")] = 0,
    skip_frozen: Annotated[
        bool, typer.Option("--skip-frozen", help="Leave frozen parameters out (they matter for quantisation).")
    ] = False,
    iterations: Annotated[int, typer.Option(min=1, help="Lanczos steps of one value, at most.")] = 50,
    tolerance: Annotated[float, typer.Option(min=1e-6, max=0.5, help="Error bound of a value, as a fraction.")] = 0.01,
    recompute: Annotated[bool, typer.Option("--recompute", help="Keep no graphs: less memory, more time.")] = False,
    local: Annotated[int | None, typer.Option(min=1, help="Share the work over so many processes here.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: CUDA where there is one.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it costs.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Do not go on from an unfinished measurement.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the values as PNG.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure the largest Hessian eigenvalue of the loss by layer and modality. What is interrupted goes on."""
    from mmplan.report.console import emit
    from mmplan.report.sensitivity import (
        estimate_text,
        plot_sensitivity,
        save_sensitivity,
        sensitivity_report,
        sensitivity_tables,
    )
    from mmplan.report.sensitivity_progress import sensitivity_progress
    from mmplan.runtime.hessian.processes import sensitivity as measure
    from mmplan.runtime.hessian.settings import Question, Settings
    from mmplan.scenario.zone_rules import parse_rule

    if is_main_process():
        require_folder(output, plot, json_path(json_file))
    try:
        wanted = str(parse_rule(rule))
    except ValueError as error:
        raise InputError(f"--rule: {error}") from None
    settings = Settings(
        samples=samples,
        batches=batches,
        seeds=seeds,
        microbatch=microbatch,
        layers=tuple(layers or ()),
        rule=wanted,
        gauss_newton=gauss_newton,
        trace=trace,
        skip_frozen=skip_frozen,
        iterations=iterations,
        tolerance=tolerance,
        recompute=recompute,
    )
    question = Question(
        scenario=scenario,
        job=job,
        weights=weights,
        data=data,
        output=output,
        restart=restart,
        device=device,
        settings=settings,
    )
    with sensitivity_progress(shown=is_main_process(), dry_run=dry_run) as progress:
        found = measure(question, local=local, dry_run=dry_run, listener=progress)
    if not is_main_process():
        return
    document = sensitivity_report(found, progress.last, output)
    if found is None:
        emit(json_file, document, *([] if progress.last is None else [estimate_text(progress.last)]))
        return
    save_sensitivity(found, question)
    if plot is not None:
        plot_sensitivity(found, plot)
    emit(json_file, document, *sensitivity_tables(found, output))
