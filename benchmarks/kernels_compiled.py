"""Compiles every launch of every kernel for three generations of GPU without having one: registers and spills.

    python benchmarks/kernels_compiled.py           # writes benchmarks/kernels_compiled.csv
    python benchmarks/kernels_compiled.py --check   # writes nothing; exit code 1 where registers are spilled

The operators run on small CPU inputs of real widths with Triton's launch replaced by a recorder, so what is compiled is
what would be launched: the same types, constants and alignments. ptxas is the one in Triton's wheel.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import triton
from kernel_cases import Case, cases, norms, projections
from measured import write_rows
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from mmplan.kernels import tuning

FILE = "kernels_compiled.csv"
CAPABILITIES = (80, 90, 100)  # A100, H100 and H200, B200
TOKENS = 576  # enough for one image; what is compiled depends on the widths only
_ONCE = (
    "two numbers, stored and loaded once per program and product, outside the loops over tiles and depth (read in SASS)"
)
_WIDE = "five rows of 16,384 numbers are more than the registers of 512 threads; without, x and dy would be read twice"
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What Triton specialises on: types, constants, which arguments are multiples of 16."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[int, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    def compiled(self, capability: int) -> Any:
        attributes = {(index,): [["tt.divisibility", 16]] for index in self.aligned}
        constants = {(index,): value for index, value in self.constants}
        source = ASTSource(self.kernel, dict(self.signature), constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(self.options))


def launch_of(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Launch:
    signature, constants, aligned = [], [], []
    for index, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        kind = "constexpr"
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            constants.append((index, value))
        elif isinstance(value, torch.Tensor):
            kind = "*" + _TYPES[value.dtype]
            aligned += [index] if value.data_ptr() % 16 == 0 else []
        elif isinstance(value, int):
            kind = "i32" if abs(value) < 2**31 else "i64"
            aligned += [index] if value % 16 == 0 else []
        else:
            kind = "fp32"
        signature.append((parameter.name, kind))
    return Launch(
        kernel=kernel,
        signature=tuple(signature),
        constants=tuple(constants),
        aligned=tuple(aligned),
        options=tuple(options.items()),
    )


def launches(case: Case) -> list[Launch]:
    """What the case would launch on a GPU, each once."""
    found: dict[Launch, None] = {}

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found[launch_of(kernel, arguments, options)] = None

    with ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", record))
        for module in [module for name, module in sys.modules.items() if name.startswith("mmplan.kernels.")]:
            if hasattr(module, "uses_triton"):
                stack.enter_context(patch.object(module, "uses_triton", lambda *tensors: True))
            if hasattr(module, "product_tile"):
                stack.enter_context(patch.object(module, "product_tile", _gpu_product_tile))
        case.prepare(case.function, torch.device("cpu"))()
    return list(found)


def _gpu_product_tile(device: torch.device, element_bytes: int, patched: bool) -> tuning.ProductTile:
    return tuning.PRODUCT_TILES[element_bytes, patched][None]


def compiled_with_log(launch: Launch, capability: int) -> tuple[Any, str]:
    """The kernel and what ptxas said of it, which Triton prints if asked; from scratch, as nothing is said of one that
    is in the cache."""
    with ExitStack() as stack:
        asked = {"TRITON_DUMP_PTXAS_LOG": "1", "TRITON_CACHE_DIR": stack.enter_context(TemporaryDirectory())}
        stack.enter_context(patch.dict(os.environ, asked))
        log = stack.enter_context(redirect_stdout(StringIO()))
        compiled = launch.compiled(capability)
    return compiled, log.getvalue()


def _variants() -> list[Case]:
    """What else is compiled: products of fp32, and rows as wide as the widest language models have."""
    return [
        *projections(TOKENS, torch.float32),
        *(case for case in norms(TOKENS, 16384) if case.name.endswith(" norm")),
    ]


def rows(chosen: Callable[[Case], bool] = lambda case: True) -> Iterator[dict[str, object]]:
    """One per launch and capability; a launch that several cases share once."""
    known: set[Launch] = set()
    for case in filter(chosen, [*cases(TOKENS), *_variants()]):
        for launch in launches(case):
            if launch in known:
                continue
            known.add(launch)
            for capability in CAPABILITIES:
                yield _row(case, launch, capability)


def accepted_spill(kernel: str, capability: int, case: Case) -> tuple[str, int]:
    """Why a kernel may spill registers, and how many bytes of a thread at most, stored and loaded."""
    if kernel == "_products_kernel" and capability == 100:
        return _ONCE, 32
    if kernel == "_backward_kernel" and "16384 wide" in case.name:
        return _WIDE, 4096
    return "", 0


def _row(case: Case, launch: Launch, capability: int) -> dict[str, object]:
    (compiled, log), name = compiled_with_log(launch, capability), launch.kernel.__name__
    registers = max(map(int, re.findall(r"Used (\d+) registers", log)))
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log)))
    reason, most = accepted_spill(name, capability, case)
    return {
        "triton": triton.__version__,
        "capability": capability,
        "operator": case.operator,
        "case": case.name,
        "kernel": name,
        "constants": " ".join(str(value) for _, value in launch.constants),
        "warps": compiled.metadata.num_warps,
        "registers": registers,
        "spilled_bytes": spilled,
        "shared_bytes": compiled.metadata.shared,
        "ptx_matrix_instructions": len(re.findall(r"\b(?:mma\.sync|wgmma\.mma|tcgen05\.mma)", compiled.asm["ptx"])),
        "note": reason if 0 < spilled <= most else "",
    }


def unexplained(table: list[dict[str, object]]) -> list[dict[str, object]]:
    return [row for row in table if row["spilled_bytes"] and not row["note"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    table = list(rows())
    for row in table:
        print(*row.values(), sep=", ")
    if not options.check:
        write_rows(FILE, table)
    return int(bool(unexplained(table)))


if __name__ == "__main__":
    sys.exit(main())
