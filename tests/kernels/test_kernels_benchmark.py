"""benchmarks/kernels.py without a GPU: it runs through on references, and a kernel that fails or is wrong is a row."""

from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = spec_from_file_location("benchmark_of_kernels", BENCHMARKS / "kernels.py")  # `kernels` may be this folder
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(kernels: Any, **changes: Any) -> dict[str, str]:
    case = replace(next(case for case in kernels.cases(64) if case.operator == "fp8"), **changes)
    return {row["implementation"]: row["status"] for row in kernels.measured(case, CPU, (1.0, 1.0), 1, True)}


def test_every_case_is_right_and_timed(kernels: Any) -> None:
    for case in kernels.cases(8):
        table = list(kernels.measured(case, CPU, (1e9, 1e9), 1, True))
        assert [row["status"] for row in table] == ["done", "done"], case
        assert all(row["fraction_of_roof"] for row in table)


def test_a_kernel_that_fails_or_is_wrong_is_a_row_and_ends_nothing(kernels: Any) -> None:
    def failing(*arguments: Any) -> None:
        raise RuntimeError("CUDA error:\n out of luck")

    assert rows_of(kernels, function=failing) == {
        kernels.OURS: "failed: RuntimeError: CUDA error: out of luck",
        "torch": "done",
    }
    assert rows_of(kernels, function=torch.zeros_like)[kernels.OURS] == "wrong: differs from the reference"


def test_a_call_has_inputs_that_the_cache_does_not_hold(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_bytes = 50 * 2**20
    cuda = torch.device("cuda")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("H100", (), {"L2_cache_size": cache_bytes})
    )
    for case in kernels.cases():
        case = replace(case, prepare=lambda function, device: None)
        sets = len(kernels.sets_of_inputs(case, None, cuda))
        assert sets >= 2 and sets * case.moved_bytes >= 2 * cache_bytes, case
