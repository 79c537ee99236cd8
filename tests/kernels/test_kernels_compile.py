"""Every kernel compiles for A100, H100 and B200 without any of them, spills no registers, and uses the matrix units."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# In a process of its own: Triton's settings are variables of the environment, some read only when it is imported.
SCRIPT = """
import json, sys
import kernels_compiled
chosen = json.loads(sys.argv[1])
print(json.dumps(list(kernels_compiled.rows(lambda case: case.operator in chosen and "fp32" not in case.name))))
"""


def compiled(*operators: str) -> list[dict[str, object]]:

    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(operators)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=BENCHMARKS)
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, object]] = json.loads(done.stdout)
    return rows


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    return compiled(
        "grouped_projection", "segment_norm", "segment_moments", "masked_norm", "top_k", "sign_pack", "fp8", "ragged"
    )


def test_every_kernel_compiles_for_three_generations(rows: list[dict[str, object]]) -> None:
    kernels = {row["kernel"] for row in rows}
    sources = "".join(file.read_text() for file in (BENCHMARKS.parent / "mmplan" / "kernels").glob("*.py"))
    assert kernels == set(re.findall(r"^@jit\n@no_type_check\ndef (_\w+_kernel)\(", sources, re.MULTILINE))
    assert {(row["kernel"], row["capability"]) for row in rows} == {(k, c) for k in kernels for c in (80, 90, 100)}


def test_no_registers_are_spilled_without_a_reason(rows: list[dict[str, object]]) -> None:
    assert [row for row in rows if row["spilled_bytes"] and not row["note"]] == []
    assert all(1 < int(str(row["registers"])) <= 255 for row in rows)


def test_every_kernel_fits_the_shared_memory_of_a_block(rows: list[dict[str, object]]) -> None:
    """163 and 227 KiB (CUDA C++ programming guide, table of technical specifications per compute capability)."""
    limits = {80: 163 * 2**10, 90: 227 * 2**10, 100: 227 * 2**10}
    assert [row for row in rows if int(str(row["shared_bytes"])) > limits[int(str(row["capability"]))]] == []


def test_products_run_on_matrix_units(rows: list[dict[str, object]]) -> None:
    products = [row for row in rows if row["operator"] == "grouped_projection"]
    assert products and all(int(str(row["ptx_matrix_instructions"])) > 0 for row in products)


def test_the_committed_report_has_the_kernels_of_today(rows: list[dict[str, object]]) -> None:
    """Registers may differ with another Triton; what is launched may not."""
    keys = ("capability", "operator", "case", "kernel", "constants")
    with (BENCHMARKS / "kernels_compiled.csv").open(newline="") as file:
        committed = {tuple(row[key] for key in keys) for row in csv.DictReader(file)}
    assert {tuple(str(row[key]) for key in keys) for row in rows} <= committed
