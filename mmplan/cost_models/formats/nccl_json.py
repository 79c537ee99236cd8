"""What nccl-tests since 2.17 write with `--json_file`: the same table as an object, with its devices and command."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmplan.cost_models.formats.nccl_log import MOST_ROWS, RankLine, Run, program_in
from mmplan.cost_models.formats.nccl_rows import Row, read_row
from mmplan.errors import InputError

_SIZE = re.compile(r"\"size\"\s*:")


def is_nccl_json(lines: Sequence[str]) -> bool:
    """An object with results and their bus bandwidth."""
    first = next((line.lstrip() for line in lines if line.strip()), "")
    return first.startswith("{") and any("bus_bw" in line or '"busbw"' in line for line in lines)


def runs_of_json(lines: Sequence[str], file: Path) -> list[Run]:
    """The run of such a file.

    Raises:
        InputError: damaged JSON, or no results.
    """
    try:
        values = json.loads("\n".join(lines))
    except (ValueError, RecursionError) as error:
        raise InputError(f"expected whole JSON of nccl-tests: {error}", file=file) from None
    results = values.get("results") if isinstance(values, dict) else None
    if not isinstance(results, list) or not results or len(results) > MOST_ROWS:
        raise InputError(f"expected a list of 1 to {MOST_ROWS:,} results", file=file, line=1)
    run = Run(file=file, line=1, titles="results", titles_line=1)
    program = program_in(json.dumps(values.get("args", values.get("command", ""))))
    run.named += [program] if program is not None else []
    places = [number for number, line in enumerate(lines, 1) if _SIZE.search(line)]
    places = places if len(places) == len(results) else [1] * len(results)
    for place, result in zip(places, results, strict=True):
        row = read_row(_as_text(result), place) if isinstance(result, dict) else None
        if row is None:
            raise InputError("expected size, count, type, time, algbw and busbw of each result", file=file, line=place)
        if isinstance(row, Row):
            run.rows.append(row)
        else:
            run.damaged.append(row)
    devices = values.get("devices")
    for number, device in enumerate(devices if isinstance(devices, list) else ()):
        if isinstance(device, dict):
            run.ranks.append(_rank(device, number))
    return [run]


def _as_text(result: Mapping[str, Any]) -> str:
    """The result as a line of the table, which checks its numbers against each other."""
    words = [result.get(name, "") for name in ("size", "count", "type", "redop", "root")]
    for place in ("out_of_place", "in_place"):
        block = result.get(place)
        if not isinstance(block, dict):
            continue
        for names in (("time", "time_us"), ("alg_bw", "algbw"), ("bus_bw", "busbw")):
            value = next((block[name] for name in names if name in block), None)
            words.append(f"{value:.6f}" if isinstance(value, int | float) else "?")
        wrong = next((block[name] for name in ("nwrong", "wrong", "errors") if name in block), None)
        words.append("N/A" if wrong is None else wrong)
    return " ".join(str(word) for word in words)


def _rank(device: Mapping[str, Any], number: int) -> RankLine:
    def count(*names: str) -> int:
        value = next((device[name] for name in names if name in device), None)
        return value if isinstance(value, int) and 0 <= value < 10**9 else 0

    def word(*names: str) -> str:
        return str(next((device[name] for name in names if name in device), ""))[:200]

    rank = count("rank") if "rank" in device else number
    host, name = word("hostname", "host", "node"), word("name", "description", "device_name", "device_info")
    return RankLine(rank, count("group"), count("pid"), host, count("device", "device_id"), name[:80], 1)
