"""Cases of the numerics that several processes run: each result is compared with one process by the tests."""

from collections.abc import Callable, Mapping
from typing import Any

from case_processes import meeting


def run_cases(rank: int, folder: str, size: int, cases: Mapping[str, Callable[[int], Any]]) -> None:
    """Save what each case returns on this rank."""
    with meeting(rank, folder, size) as results:
        results |= {name: case(rank) for name, case in cases.items()}
