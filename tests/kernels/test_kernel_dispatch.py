"""Which path is taken, and that everything works without Triton."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mmplan.kernels
from mmplan.kernels.dispatch import uses_triton

FOLDER = Path(mmplan.kernels.__file__).parent
MODULES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "__init__")


def test_without_triton_every_operator_takes_its_reference() -> None:
    code = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError, as where it is not installed
import torch
from mmplan.kernels import dispatch, fp8, grouped_projection, masked_norm, ragged, segment_moments, segment_norm
from mmplan.kernels import sign_pack, top_k
assert dispatch.triton is None and not dispatch.interpreted()
x, segment, weights = torch.randn(6, 16, requires_grad=True), torch.tensor([0, 1, 0, 1, 1, -1]), torch.ones(2, 16)
(y,) = grouped_projection.grouped_projection([x], [weights])
y = y.sum() + segment_norm.segment_layer_norm(x, segment, weights).square().sum()
y = y + segment_norm.segment_rms_norm(x, segment, weights).sum()
y = y + segment_norm.segment_normalize(
    x, segment, *segment_moments.statistics(segment_moments.segment_moments(x, segment, 2)), weights
).sum()
y = y + ragged.ragged_scatter([ragged.ragged_gather(x, segment)], [torch.arange(6)], 8).sum()
y.backward()
assert masked_norm.masked_squared_norm(x, segment, 2).isfinite().all()
assert top_k.top_k(x, 5).values.shape == (5,)
packed, lost = sign_pack.sign_pack(x)
torch.testing.assert_close(sign_pack.sign_unpack(packed, 96).view(6, 16) + lost, x.detach())
assert fp8.fp8_dequantize(fp8.fp8_quantize(x)).shape == x.shape
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_kernel_runs_on_one_gpu_only() -> None:
    assert not uses_triton(torch.ones(1))
    assert not uses_triton(torch.ones(1), torch.ones(1, device="meta"))


@pytest.mark.parametrize("module", MODULES)
def test_only_one_place_chooses_the_path(module: str) -> None:
    """No operator asks for the device type, Triton or the interpreter's variable by itself."""
    names = {
        node.attr
        for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text()))
        if isinstance(node, ast.Attribute)
    }
    if module != "dispatch":
        assert not names & {"is_cuda", "is_available", "environ"}
