"""The cases of all kernels (case_*.py), in a process of their own: whether Triton interprets is settled when it is
imported first, and nothing of that may reach the rest of the suite."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

HERE = Path(__file__).parent
CASES = sorted(HERE.glob("case_*.py"))


def run_cases(environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, CASES)]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_INTERPRET")} | environment
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE.parents[1], env=variables)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_every_kernel_equals_its_reference_in_the_interpreter() -> None:
    """Sizes around the tile, empty inputs, strides, three types, gradients."""
    told = run_cases({"TRITON_INTERPRET": "1", "TEST_DEVICE": "cpu"})
    assert "skipped" not in told and "passed" in told


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_kernel_equals_its_reference_on_the_gpu() -> None:
    assert "passed" in run_cases({"TEST_DEVICE": "cuda"})
