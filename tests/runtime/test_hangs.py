"""The hangs that `mmplan check --runtime` explains happen, and do not with the fix: pairs of gloo processes."""

from pathlib import Path

import pytest
from case_processes import multiprocessing
from hang_cases import CASES, run_hang_case


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every process of every case wrote what happened with the fix and without it."""
    path = tmp_path_factory.mktemp("hangs")
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=run_hang_case, args=(case, rank, str(path))) for case in CASES for rank in range(2)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=150)
    finally:
        for process in processes:
            process.kill()
    return path


def outcomes(folder: Path, case: str, fix: str) -> list[str]:
    """Of both ranks; a process that the library has ended wrote nothing."""
    files = [folder / f"{case}-{rank}-{fix}" for rank in range(2)]
    return [file.read_text() if file.exists() else "ended by the library" for file in files]


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_both_ranks_end_with_the_fix_and_not_without(folder: Path, case: str) -> None:
    assert outcomes(folder, case, "with") == ["done", "done"]
    assert outcomes(folder, case, "without") != ["done", "done"]


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["fsdp", "text-only", "fixed-order"])
def test_some_rank_waits_for_ever_without_the_fix(folder: Path, case: str) -> None:
    assert "waits" in outcomes(folder, case, "without")
