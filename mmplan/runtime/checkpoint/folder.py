"""The folder of a run's checkpoints: each appears whole, by one rename, or not at all.

While it is written a checkpoint is a hidden folder. Its files are on the disk before the rename, and their checksums
are of the bytes in memory: whatever the disk makes of them later is found out.
"""

import fcntl
import hashlib
import os
import re
import shutil
import socket
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from mmplan.errors import InputError
from mmplan.runtime.checkpoint.manifest import CHECKSUMS, MANIFEST, Manifest, manifest_json, manifest_of

_COMMITTED = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.step-\d{8,}\.\w+\.(partial|replaced)")
_CHECKSUM = re.compile(r"([0-9a-f]{64})  ([\w.-]+)")
_CHUNK_BYTES = 2**24
_MOST_BYTES = 1_000_000_000  # of a manifest: some 10 million pieces


class Damaged(Exception):
    """A checkpoint is not as it was written; the text says where."""


def committed(folder: Path) -> list[Path]:
    """Checkpoints, the newest first."""
    found = [path for path in _children(folder) if _COMMITTED.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def renamed(folder: Path) -> list[Path]:
    """Checkpoints that are not called as one: no run goes on from them."""
    others = [path for path in _children(folder) if not path.name.startswith(".")]
    return sorted(path for path in others if not _COMMITTED.fullmatch(path.name) and (path / MANIFEST).is_file())


def passed_over(checkpoint: Path) -> str:
    """Why no run goes on from a renamed checkpoint."""
    try:
        name = f"step-{read_manifest(checkpoint).step:08}"
    except Damaged as error:
        return f"it is not called step-... and damaged: {error}"
    return f"it is not called {name}, as it was written"


def partial_folder(folder: Path, step: int, attempt: str) -> Path:
    """Where an attempt writes a checkpoint; another attempt writes elsewhere."""
    return folder / f".step-{step:08}.{attempt}.partial"


def remove_unfinished(folder: Path) -> None:
    """What earlier attempts left."""
    for path in _children(folder):
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def commit(partial: Path, manifest: Manifest, checksums: Mapping[str, str]) -> Path:
    """Make what all ranks have written a checkpoint; returns its folder.

    Args:
        checksums: SHA-256 by file name, of all files but those written here.

    Raises:
        OSError: it cannot be written; then it does not exist.
    """
    text = manifest_json(manifest)
    checksums = {**checksums, MANIFEST: hashlib.sha256(text).hexdigest()}
    write_durably(partial / MANIFEST, text)
    lines = (f"{digest}  {name}\n" for name, digest in sorted(checksums.items()))
    write_durably(partial / CHECKSUMS, "".join(lines).encode())
    sync_folder(partial)
    final = partial.parent / f"step-{manifest.step:08}"
    if final.exists():  # damaged, or it would have been gone on from
        final.rename(partial.with_suffix(".replaced"))
    partial.rename(final)
    sync_folder(final.parent)
    return final


def prune(folder: Path, last: Path, keep: int) -> None:
    """Behind a commit of `last`: remove what is older than the newest `keep` up to it, and what is newer, which was
    damaged, or training would have gone on from there. What cannot be removed stays."""
    there = committed(folder)
    place = there.index(last)
    for old in (*there[:place], *there[place + keep :]):
        with suppress(OSError):
            old.rename(folder / f".{old.name}.old.replaced")  # at once, so that none is ever half there
    remove_unfinished(folder)


def lock(folder: Path) -> IO[bytes]:
    """Keep other runs from writing there, as long as the file is open.

    Raises:
        InputError: one does, or the folder cannot be written to.
    """
    try:
        file = (folder / ".lock").open("ab")
    except OSError as error:
        raise InputError(f"cannot write checkpoints there: {error.strerror}", file=folder) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise InputError("another run writes its checkpoints there", file=folder) from error
    except OSError:  # some network file systems have no locks
        pass
    return file


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint, itself as it was written.

    Raises:
        Damaged: it is not, or is of another version.
    """
    digests = _checksums(checkpoint)
    text = _read(checkpoint, MANIFEST)
    if hashlib.sha256(text).hexdigest() != digests.get(MANIFEST):
        raise Damaged(f"{MANIFEST} ({len(text):,} bytes) differs from its checksum")
    try:
        manifest = manifest_of(text)
    except ValueError as error:
        raise Damaged(str(error)) from error
    if digests.keys() != manifest.files.keys() | {MANIFEST}:
        raise Damaged(f"{CHECKSUMS} has {len(digests)} files, {MANIFEST} {len(manifest.files) + 1}")
    if (named := _COMMITTED.fullmatch(checkpoint.name)) is not None and int(named[1]) != manifest.step:
        raise Damaged(f"renamed: {MANIFEST} is of step {manifest.step:,}")
    return manifest


def require_sizes(checkpoint: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise Damaged unless these files are there with the bytes that were written; none is read."""
    for name in names:
        size = _size(checkpoint, name)
        if size != manifest.files[name]:
            raise Damaged(f"{name} has {size:,} bytes, {manifest.files[name]:,} were written")


def require_whole(checkpoint: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise Damaged unless these files are as they were written."""
    digests = _checksums(checkpoint)
    for name in names:
        require_sizes(checkpoint, manifest, [name])
        digest = hashlib.sha256()
        try:
            with (checkpoint / name).open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror}") from error
        if digest.hexdigest() != digests.get(name):
            raise Damaged(f"{name} differs from its checksum")


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that survives a crash of the machine."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """The names in a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"cannot read the folder of checkpoints: {error.strerror}", file=folder) from error


def _checksums(checkpoint: Path) -> dict[str, str]:
    """SHA-256 by file name."""
    *lines, end = _read(checkpoint, CHECKSUMS).decode(errors="replace").split("\n")
    found = [_CHECKSUM.fullmatch(line) for line in lines]
    if not lines or end or None in found:
        raise Damaged(f"{CHECKSUMS} has lines that are no checksums")
    return {match[2]: match[1] for match in found if match is not None}


def _read(checkpoint: Path, name: str) -> bytes:
    """A file that fits into memory."""
    size = _size(checkpoint, name)
    if size > _MOST_BYTES:
        raise Damaged(f"{name} has {size:,} bytes, more than {_MOST_BYTES:,}")
    try:
        return (checkpoint / name).read_bytes()
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from error


def _size(checkpoint: Path, name: str) -> int:
    """Of a plain file; whatever else has its name is never opened."""
    try:
        status = (checkpoint / name).stat()
    except FileNotFoundError as error:
        host = "" if checkpoint.is_dir() else f" on {socket.gethostname()}, and all hosts have to share the folder"
        raise Damaged(f"{name} is missing{host}") from error
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(f"{name} is no file")
    return status.st_size
