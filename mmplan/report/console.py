"""Where output goes: results to stdout, progress and logs to stderr, `--json` documents to their file or stdout."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from mmplan.files import write_file


def stderr_console(*, quiet: bool = False) -> Console:
    return Console(stderr=True, quiet=quiet)


def emit(json_file: str | None, document: Mapping[str, Any], *parts: RenderableType) -> None:
    """Print `parts` and write `document`; `json_file` None prints only, `-` writes only the document, to stdout.

    Raises:
        InputError: the document cannot be written.
    """
    if json_file == "-":
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
        return
    if json_file is not None:
        write_file(Path(json_file), json.dumps(document, indent=1) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 120)
    for part in parts:
        console.print(part)
