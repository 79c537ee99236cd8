"""What whole runs of several files share."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
from run_pool import RunPool


@pytest.fixture(scope="session")
def run_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunPool]:
    pool = RunPool(lambda: tmp_path_factory.mktemp("pool"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def at_hand(run_pool: RunPool) -> Iterator[None]:
    """Runs that `execute` starts in this file have processes that are there already."""
    with patch("mmplan.runtime.launch._run_processes", run_pool.run):
        yield


@pytest.fixture
def at_hand_once(run_pool: RunPool) -> Iterator[None]:
    """Those of this test, in a file whose others start torchrun."""
    with patch("mmplan.runtime.launch._run_processes", run_pool.run):
        yield
