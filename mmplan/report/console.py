"""Where output goes: results to stdout, progress and logs to stderr, `--json` documents to their file or stdout."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from mmplan.files import write_file


def stderr_console(*, quiet: bool = False) -> Console:
    return Console(stderr=True, quiet=quiet)


class _Stdout(Console):
    """A console that leaves a closed pipe to its caller; rich would end the process with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def emit(json_file: str | None, document: Mapping[str, Any], *parts: RenderableType) -> None:
    """Print `parts` and write `document`; `json_file` None prints only, `-` writes only the document, to stdout.

    A reader who closes the pipe early (`| head`) has seen enough: the command goes on to its own exit code.

    Raises:
        InputError: the document cannot be written.
    """
    if json_file not in (None, "-"):
        write_file(Path(str(json_file)), json.dumps(document, indent=1) + "\n")
    try:
        if json_file == "-":
            sys.stdout.write(json.dumps(document, indent=1) + "\n")
        else:
            console = _Stdout(width=None if sys.stdout.isatty() else 120)
            for part in parts:  # a text that must not be wrapped, such as the content of a file, is printed as it is
                console.print(part, soft_wrap=isinstance(part, Text) and part.no_wrap is True)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or closing stdout fails again at exit
