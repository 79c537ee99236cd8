"""A result file that cannot be written is refused before any work is done."""

import os
from pathlib import Path

import pytest

from mmplan.errors import InputError
from mmplan.files import require_folder, write_file


def test_a_missing_folder_and_a_folder_as_file_are_refused(tmp_path: Path) -> None:
    require_folder(None, tmp_path / "new.json")
    with pytest.raises(InputError, match=r"folder '.*no' does not exist"):
        require_folder(tmp_path / "no" / "new.json")
    with pytest.raises(InputError, match="it is a folder"):
        require_folder(tmp_path)


def test_a_folder_without_write_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # because root may write everywhere
    with pytest.raises(InputError, match="no permission to write in folder"):
        require_folder(tmp_path / "new.json")


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, "plan")
    assert os.read(reader, 10) == b"plan"
    os.close(reader)
    assert pipe.is_fifo()
