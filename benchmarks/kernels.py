"""Every kernel on the GPU that is here: time, bytes and operations per second as a fraction of what the GPU reaches.

    python benchmarks/kernels.py                       # writes benchmarks/kernels.csv, with torch.compile beside
    python benchmarks/kernels.py --quick               # without torch.compile and with fewer repeats
    python benchmarks/kernels.py --tune                # the tiles of mmplan/kernels/tuning.py: kernels_tuned.csv
    python benchmarks/kernels.py --device cpu --quick  # tries the script on references; writes nothing

The roof is measured in the same run: the bytes per second of a copy of 1 GiB, and the operations per second of a bf16
product of 8192 x 8192 x 8192. A time is the median of CUDA events around single calls; calls go round over as many sets
of inputs as fill the L2 cache twice, so that none finds its inputs there, and the GPU is kept busy until a call is
launched, so that Python's time is none of it. Before it is timed a kernel's result is compared with the reference's;
one that fails is a row and ends nothing. Without a GPU the rows say "not measured".
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where mmplan is not installed

import torch
from kernel_cases import DTYPE, TOKENS, Case, Run, cases
from measured import write_rows
from torch import Tensor

from mmplan.kernels import dispatch, tuning

FILE, TUNED = "kernels.csv", "kernels_tuned.csv"
OURS = "mmplan"
NOT_MEASURED = "not measured: torch sees no CUDA device here"
_TOLERANCE = 0.02  # of bf16 results, relative to the largest number
_MOST_SETS_BYTES = 2**34  # of inputs at a time
_AHEAD_CYCLES = 1_000_000  # half a millisecond, in which Python has launched the call whose kernels are timed

Row = dict[str, object]


def median_s(runs: Sequence[Run], repeats: int, device: torch.device) -> float:
    """Of single calls, each on the next set of inputs."""
    for run in runs[:3]:
        run()
    if device.type != "cuda":
        started = time.perf_counter()
        runs[0]()
        return time.perf_counter() - started
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize(device)
    for index, (before, after) in enumerate(events):
        torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        before.record()
        runs[index % len(runs)]()
        after.record()
    torch.cuda.synchronize(device)
    return statistics.median(before.elapsed_time(after) for before, after in events) / 1000


def roof(device: torch.device, repeats: int) -> tuple[float, float]:
    """Bytes per second of a copy (read and written) and operations per second of a product."""
    numbers, side = (2**29, 8192) if device.type == "cuda" else (2**20, 256)
    source = torch.ones(numbers, dtype=DTYPE, device=device)
    target = torch.empty_like(source)
    copied_s = median_s([lambda: target.copy_(source)], repeats, device)
    a, b = torch.randn(2, side, side, dtype=DTYPE, device=device)
    return 2 * source.nbytes / copied_s, 2 * side**3 / median_s([lambda: a @ b], repeats, device)


def sets_of_inputs(case: Case, function: Callable[..., object], device: torch.device) -> list[Run]:
    """Enough that all of them together are twice the L2 cache: at least two, fewer only if memory ends."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    sets = max(2, -(-2 * cache // max(1, case.moved_bytes)))
    sets = min(sets, max(1, _MOST_SETS_BYTES // max(1, case.moved_bytes)))
    return [case.prepare(function, device) for _ in range(sets)]


def is_right(case: Case, device: torch.device) -> bool:
    """The kernel's result is the reference's on the same inputs, to what bf16 holds."""
    results = []
    for function in (case.function, case.reference):
        torch.manual_seed(0)
        results.append(_tensors(case.prepare(function, device)()))
    mine, expected = results
    pairs = zip(mine, expected, strict=True)
    return all(x.shape == y.shape and _near(x.double(), y.double()) for x, y in pairs)


def _near(x: Tensor, y: Tensor) -> bool:
    largest = max(float(y.abs().max()), 1e-30) if y.numel() else 1.0
    return y.numel() == 0 or float((x - y).abs().max()) <= _TOLERANCE * largest


def _tensors(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [tensor for item in result for tensor in _tensors(item)] if isinstance(result, (list, tuple)) else []


def measured(case: Case, device: torch.device, top: tuple[float, float], repeats: int, quick: bool) -> Iterator[Row]:
    """Rows of the kernel, the reference and the compiled reference."""
    right = ""
    try:
        right = "done" if is_right(case, device) else "wrong: differs from the reference"
    except Exception as error:
        yield row(device, case, OURS, status=_failure(error))
    implementations = {OURS: case.function, "torch": case.reference}
    if not quick:
        implementations["torch.compile"] = torch.compile(case.reference)
    for name, function in implementations.items():
        if name == OURS and not right:
            continue
        try:
            took_s = median_s(sets_of_inputs(case, function, device), repeats, device)
        except Exception as error:  # a compiler's failure, or memory's end, is a row and ends nothing
            yield row(device, case, name, status=_failure(error))
            continue
        yield row(device, case, name, took_s=took_s, top=top, status=right if name == OURS else "done")


def _failure(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:100]}"


def row(
    device: torch.device,
    case: Case,
    implementation: str,
    *,
    took_s: float | None = None,
    top: tuple[float, float] = (1.0, 1.0),
    status: str,
) -> Row:
    bounds = {"copy": case.moved_bytes / top[0], "product": case.flops / top[1]}
    bound = max(bounds, key=lambda name: bounds[name])
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "torch": torch.__version__,
        "triton": "" if dispatch.triton is None else dispatch.triton.__version__,
        "operator": case.operator,
        "case": case.name,
        "implementation": implementation,
        "moved_bytes": case.moved_bytes,
        "flops": case.flops,
        "median_s": "" if took_s is None else f"{took_s:.4g}",
        "bytes_per_s": "" if took_s is None else f"{case.moved_bytes / took_s:.4g}",
        "flops_per_s": "" if took_s is None or not case.flops else f"{case.flops / took_s:.4g}",
        "bound_by": "" if took_s is None else bound,
        "fraction_of_roof": "" if took_s is None else f"{bounds[bound] / took_s:.3f}",
        "status": status,
    }


def tuned(case: Case, device: torch.device, repeats: int) -> Iterator[Row]:
    """The time under every candidate tile of the case's operator."""
    if case.operator in tuning.TILES:
        for tile in tuning.TILE_CANDIDATES:
            with patch.dict(tuning.TILES, {case.operator: {None: tile}}):
                yield _tuned_row(case, device, repeats, str(tile))
    elif case.operator == "grouped_projection":
        for product in tuning.PRODUCT_CANDIDATES:
            table = {key: {None: product} for key in tuning.PRODUCT_TILES}
            with patch.dict(tuning.PRODUCT_TILES, table):
                yield _tuned_row(case, device, repeats, str(product))


def _tuned_row(case: Case, device: torch.device, repeats: int, tile: str) -> Row:
    try:
        took_s = f"{median_s(sets_of_inputs(case, case.function, device), repeats, device):.4g}"
        status = "done"
    except Exception as error:  # too much shared memory, say: this tile is none for this device
        took_s, status = "", f"failed: {type(error).__name__}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {
        "device": name,
        "operator": case.operator,
        "case": case.name,
        "tile": tile,
        "median_s": took_s,
        "status": status,
    }


def not_measured() -> None:
    """Rows that say so, unless rows of a device are there already."""
    for name in (FILE, TUNED):
        path = Path(__file__).parent / name
        if path.exists() and "done" in path.read_text():
            continue
        nothing = torch.device("cpu")
        table = [row(nothing, case, OURS, status=NOT_MEASURED) for case in cases()]
        if name == TUNED:
            keep = ("device", "operator", "case", "median_s", "status")
            table = [{key: entry[key] for key in keep} for entry in table if entry["operator"] != "segment_norm"]
        write_rows(name, table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", action="store_true", help="rows on stdout, one a line, and no file")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(NOT_MEASURED)
        if not options.json:
            not_measured()
        return 0
    device, repeats = torch.device(options.device), 20 if options.quick else 50
    chosen = cases(TOKENS if device.type == "cuda" else 64)
    top = roof(device, repeats)
    table: list[Row] = []
    for case in chosen:
        made = tuned(case, device, repeats) if options.tune else measured(case, device, top, repeats, options.quick)
        for entry in made:
            table.append(entry)
            print(json.dumps(entry) if options.json else ", ".join(map(str, entry.values())), flush=True)
    if device.type == "cuda" and not options.json:
        write_rows(TUNED if options.tune else FILE, [*_roof_rows(device, top, options.tune), *table])
    return int(any(str(entry["status"]).startswith("wrong") for entry in table))


def _roof_rows(device: torch.device, top: tuple[float, float], tune: bool) -> list[Row]:
    if tune:
        return []
    empty = replace(cases(64)[0], operator="roof", name="copy", moved_bytes=round(top[0]), flops=0)
    product = replace(empty, name="product", moved_bytes=0, flops=round(top[1]))
    return [row(device, case, "torch", took_s=1.0, top=top, status="done") for case in (empty, product)]


if __name__ == "__main__":
    sys.exit(main())
