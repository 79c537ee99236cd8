"""Which path is taken, and that everything works without Triton."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mmplan.kernels
from mmplan.kernels.dispatch import uses_triton

FOLDER = Path(mmplan.kernels.__file__).parent
MODULES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "__init__")


SCRIPT = """
import sys
if sys.argv[1] == "hidden":
    sys.modules["triton"] = None  # importing it raises ImportError, as where it is not installed
import torch
from mmplan.kernels import dispatch, fp8, grouped_projection, masked_norm, ragged, segment_moments, segment_norm
from mmplan.kernels import sign_pack, top_k

assert dispatch.triton is None if sys.argv[1] == "hidden" else dispatch.interpreted()
generator = torch.Generator().manual_seed(0)

def random(*shape):
    return torch.randn(shape, generator=generator)

leaves = x, weights, biases, image, filters = [
    random(*shape).requires_grad_() for shape in ((6, 16), (2, 16), (2, 16), (2, 3, 8, 8), (5, 48))
]
segment = torch.tensor([0, 1, 0, 1, 1, -1])
moments = segment_moments.segment_moments(x, segment, 2)
found = [
    *grouped_projection.grouped_projection(
        [grouped_projection.Patches(image=image, patch=4), x], [filters, weights]
    ),
    segment_norm.segment_layer_norm(x, segment, weights, biases),
    segment_norm.segment_rms_norm(x, segment, weights),
    moments,
    segment_norm.segment_normalize(x, segment, *segment_moments.statistics(moments), weights, biases),
    ragged.ragged_gather(x, segment),
    ragged.ragged_scatter([x, random(2, 16)], [torch.arange(6), torch.tensor([7, 6])], 9),
]
found += torch.autograd.grad(sum(y.square().sum() for y in found), leaves)
found.append(masked_norm.masked_squared_norm(x.detach(), segment, 2))
numbers = random(3000)
packed, lost = sign_pack.sign_pack(numbers)
exact = [*top_k.top_k(numbers, 77), *packed, lost, sign_pack.sign_unpack(packed, 3000)]
for kind in (fp8.E4M3, fp8.E5M2):
    quantized = fp8.fp8_quantize(numbers, kind)
    exact += [quantized.values.view(torch.uint8), quantized.scales, fp8.fp8_dequantize(quantized)]
torch.save(([y.detach() for y in found], exact), sys.argv[2])
"""


def test_without_triton_every_operator_gives_what_its_kernel_does(tmp_path: Path) -> None:
    """Sums to rounding; what is chosen and packed to the bit."""
    pytest.importorskip("triton")
    results = []
    for way, interpret in (("hidden", "0"), ("interpreted", "1")):
        file = tmp_path / f"{way}.pt"
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT, way, str(file)]
        variables = os.environ | {"TRITON_INTERPRET": interpret}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(torch.load(file))
    (found, exact), (by_kernel, exact_by_kernel) = results
    torch.testing.assert_close(found, by_kernel, rtol=2e-6, atol=2e-5)
    torch.testing.assert_close(exact, exact_by_kernel, rtol=0, atol=0)


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
