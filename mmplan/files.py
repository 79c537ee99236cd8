"""Result files appear whole or not at all, and a folder that is not there is said before any work is done."""

import os
from pathlib import Path

from mmplan.errors import InputError


def write_file(path: Path, content: bytes | str) -> None:
    """Write a whole file or nothing; an existing file is replaced in one step, a device or pipe is written to.

    Raises:
        InputError: the folder is missing or not writable, or the disk is full.
    """
    data = content.encode() if isinstance(content, str) else content
    partial = path.parent / f".{path.name}.{os.getpid()}.partial"
    try:
        if path.exists() and not path.is_file():  # /dev/null, which root would replace for everybody
            path.write_bytes(data)
            return
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"cannot write: {error.strerror}", file=path) from error


def make_folder(path: Path) -> None:
    """Make a folder for results, in one that exists; InputError where that cannot be."""
    try:
        path.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise InputError(f"cannot write: folder '{path.parent}' does not exist", file=path) from error
    except OSError as error:
        raise InputError(f"cannot write there: {error.strerror}", file=path) from error


def require_folder(*paths: Path | None) -> None:
    """Raise InputError unless every given path can be made: it is no folder, and lies in one that can be written to."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise InputError(f"cannot write: folder '{path.parent}' does not exist", file=path)
        if path is not None and path.is_dir():
            raise InputError("cannot write: it is a folder", file=path)
        if path is not None and not os.access(path.parent, os.W_OK):
            raise InputError(f"cannot write: no permission to write in folder '{path.parent}'", file=path)
