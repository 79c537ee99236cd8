"""An error as the user gets it: one sentence, and its document where `--json` asked for one."""

import json
import sys
from contextlib import suppress
from itertools import pairwise

from mmplan.commands.options import json_path
from mmplan.errors import InputError
from mmplan.files import write_file
from mmplan.runtime.torchrun import first_to_report


def report_error(status: str, message: str, *, document: bool = True) -> None:
    """The sentence to stderr, and its document, once for all processes of a run."""
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    if document:
        write_error(status, message)


def write_error(status: str, message: str) -> None:
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
