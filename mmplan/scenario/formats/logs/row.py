"""A measured run as a row of the tables that `mmplan backtest` reads (columns: planner/measured.py)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmplan.errors import InputError
from mmplan.scenario.formats.launch.facts import SetUp
from mmplan.scenario.formats.logs.steps import Steps
from mmplan.units import gibibytes

# Column -> fact, where both are numbers or words as they stand.
_COLUMNS = {
    "layers": "layers", "hidden": "hidden", "heads": "heads", "kv_heads": "kv_heads", "head_dim": "head_dim",
    "ffn": "ffn", "vocabulary": "vocabulary", "sequence": "sequence", "experts": "experts", "topk": "topk",
    "expert_ffn": "expert_ffn", "gpus_per_node": "per_node", "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep",
    "etp": "etp", "vp": "vp", "microbatch": "microbatch", "global_batch": "global_batch",
}  # fmt: skip
_WORDS = ("sharding", "recompute", "attention", "stack", "gradient_dtype")
# What `mmplan backtest` needs of a row.
_NEEDED = {
    "layers": "layers", "hidden": "hidden", "sequence": "sequence length", "gpus": "number of GPUs",
    "gpu": "kind of GPU", "global_batch": "global batch", "step_s": "step time",
}  # fmt: skip


def row_of(setup: SetUp, steps: Steps | None, memory: Mapping[str, int], path: Path) -> dict[str, Any]:
    """Columns with a value; unreadable ones are left blank."""
    row: dict[str, Any] = {"id": path.name.split(".")[0][:80], "source": path.name}
    for column, fact in _COLUMNS.items():
        if (value := count_of(setup, fact)) is not None:
            row[column] = value
    if (gpus := _gpus(setup)) is not None:
        row["gpus"] = gpus
    if setup.has("gpu"):
        row["gpu"] = str(setup.facts["gpu"].value)
    if setup.has("gated"):
        row["gated"] = int(setup.flag("gated"))
    if setup.has("sequence_parallel"):
        row["sequence_parallel"] = int(setup.flag("sequence_parallel"))
    precision = setup.facts.get("precision")
    if precision is not None:
        row["precision"] = f"{'fp8 ' if setup.has('fp8') else ''}{precision.value}"
    for word in _WORDS:
        if setup.has(word):
            row[word] = str(setup.facts[word].value)
    if (layers := count_of(setup, "recompute_layers")) is not None and row.get("recompute") == "full":
        row["recompute"] = f"{layers} layers"
    if "vp" not in row and (each := count_of(setup, "layers_per_chunk")) and row.get("layers") and row.get("pp", 1) > 1:
        row["vp"] = max(1, row["layers"] // (row["pp"] * each))
    if steps is not None:
        row["step_s"] = round(steps.median_s, 6)
        row |= {"global_batch": steps.batch} if steps.batch is not None else {}
    for kind, name in (("max reserved", "max_reserved_bytes"), ("max allocated", "max_allocated_bytes")):
        if name in memory:
            row |= {"memory_gib": round(gibibytes(memory[name]), 3), "memory_kind": kind}
            break
    return row


def missing_for_a_row(row: Mapping[str, Any]) -> list[str]:
    """What the row lacks to be priced, in words."""
    return [what for column, what in _NEEDED.items() if column not in row]


def count_of(setup: SetUp, name: str) -> int | None:
    """A whole number that the files say, None where they do not or say something else."""
    try:
        return setup.count(name, most=1_000_000_000)
    except InputError:  # a dump that holds lists or words there (forks): the cell stays blank
        return None


def _gpus(setup: SetUp) -> int | None:
    world, nodes, each = (count_of(setup, name) for name in ("world", "nodes", "per_node"))
    return world if world is not None else nodes * each if nodes is not None and each is not None else None
