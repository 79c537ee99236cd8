"""The command that says what is in a folder of checkpoints."""

from pathlib import Path
from typing import Annotated

import typer

from mmplan.commands.options import JsonFile, json_path
from mmplan.files import require_folder


def checkpoints(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What `execute --checkpoint` was given.")],
    json_file: JsonFile = None,
) -> None:
    """List the checkpoints of a run: step, time, size, plan, and whether every byte is as it was written."""
    from mmplan.report.checkpoints import checkpoints_document, checkpoints_table
    from mmplan.report.console import emit
    from mmplan.runtime.checkpoint.listing import list_checkpoints

    require_folder(json_path(json_file))
    found = list_checkpoints(folder)
    emit(json_file, checkpoints_document(found), checkpoints_table(found))
    raise typer.Exit(0 if all(one.damage is None for one in found) else 1)
