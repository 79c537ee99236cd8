"""The command that says what is wrong with a training run or a checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from mmplan.commands.options import JsonFile, json_path
from mmplan.errors import InputError
from mmplan.files import require_folder


def doctor(
    target: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="health.jsonl, run.json, or a checkpoint.")
    ],
    job: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Python file with `model` and `batches`, to try a checkpoint.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="MANIFEST", help="Images and captions (.jsonl, .csv, .tsv) for retrieval.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="CHECKPOINT", help="With --data: is TARGET worse than this one?")
    ] = None,
    plan: Annotated[Path | None, typer.Option(metavar="PLAN", help="The plan of a run.json, for its timing.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a batch of the job.")] = 8,
    images: Annotated[int | None, typer.Option(min=2, help="Take so many first images of --data.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures that needs no network.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Put what fired on the timeline of `execute --trace`.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Say what is wrong with a run or a checkpoint, the cause before its symptoms; exit code 1 when something is."""
    from mmplan.report.console import emit
    from mmplan.report.health import alignment_table, doctor_document, findings_text, health_page
    from mmplan.report.health_trace import add_to_trace
    from mmplan.runtime.health.diagnosis import diagnose
    from mmplan.runtime.health.doctor import examine
    from mmplan.runtime.health.rules import RULES

    require_folder(html, json_path(json_file))
    if data is not None and job is None:
        raise InputError("--data needs the encoders of --job FILE")
    if against is not None and data is None:
        raise InputError("--against compares retrieval: give --data MANIFEST too")
    seen = examine(target, job=job, data=data, against=against, plan=plan, batch_size=batch_size, images=images)
    findings = (*diagnose(seen.readings, RULES), *seen.findings)
    tables = [alignment_table(seen.alignment, seen.difference)] if seen.alignment is not None else []
    if html is not None:
        health_page(html, target, seen.readings, findings, RULES, seen.silent, tables)
    if trace is not None:
        add_to_trace(seen.readings, trace)
    document = doctor_document(target, seen.readings, findings, seen.silent, seen.alignment, seen.difference)
    emit(json_file, document, findings_text(target, seen.readings, findings, seen.silent), *tables)
    raise typer.Exit(1 if findings else 0)
