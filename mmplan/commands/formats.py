"""Files of others: what people already have, and what other frameworks run."""

from pathlib import Path
from typing import Annotated

import typer

from mmplan.commands.options import JsonFile, PlanFile, json_path
from mmplan.errors import InputError
from mmplan.files import require_folder, write_file

# Their exporters are imported inside the command; a test keeps this list equal to theirs.
TARGET_NAMES = (
    "accelerate, cornstarch, deepspeed, jax, kubernetes, megatron, megatron-mimo, slurm, torch-pipelining, torchtitan, "
    "torchtitan-toml"
)
TARGET_HELP = f"The framework to write for: {TARGET_NAMES}."


def import_(
    words: Annotated[
        list[str], typer.Argument(metavar="[KIND] FILE...", help="The files; KIND is guessed when it is left out.")
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the YAML; default: to stdout.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Read files that you already have into parts of a scenario, and say what was read, what not, and why."""
    from mmplan.commands.import_kinds import read_files
    from mmplan.report.console import emit
    from mmplan.report.formats import reading_document, reading_parts, reading_text

    require_folder(output, json_path(json_file))
    reading = read_files(words)
    if output is not None:
        write_file(output, reading_text(reading, output))
    emit(json_file, reading_document(reading), *reading_parts(reading, output))


def export(
    plan_file: PlanFile,
    to: Annotated[str | None, typer.Option("--to", metavar="TARGET", help=TARGET_HELP)] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Write nothing: say what of the plan each framework can run.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File, or folder where the target takes several.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Write a plan for another framework, and say what that framework cannot do and what that costs."""
    from mmplan.commands.export_targets import exported, matrix_of
    from mmplan.planner.plan import load_plan
    from mmplan.report.console import emit
    from mmplan.report.formats import export_document, export_parts, write_export
    from mmplan.report.matrix import matrix_document, matrix_parts

    require_folder(json_path(json_file))
    if matrix == (to is not None) or (matrix and output is not None):
        raise InputError("expected --to TARGET, with -o FILE if it is to be written, or --matrix alone")
    if to is None:
        found = matrix_of(load_plan(plan_file))
        emit(json_file, matrix_document(found), *matrix_parts(found))
        return
    made = exported(load_plan(plan_file), to)
    written = write_export(made, output)
    emit(json_file, export_document(made, written), *export_parts(made, written))
