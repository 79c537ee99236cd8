"""Predicted against published memory; skipped where the table is not present."""

from pathlib import Path

import pytest

from mmplan.planner.measured import MeasuredRow, read_measured
from mmplan.planner.memory_backtest import MemoryRow, memory_backtest, memory_of_row, summarise

SHIPPED = Path(__file__).parents[2] / "mmplan" / "planner" / "data" / "measured.csv"
MEASURED = (Path(__file__).parents[2] / ".." / "shared" / "data" / "measured").resolve()


def row(**texts: str) -> MeasuredRow:
    """GPT 28.3B of Zero Bubble, table 4 (arXiv 2401.10241)."""
    numbers = {
        "layers": 62.0,
        "hidden": 6144.0,
        "heads": 48.0,
        "ffn": 24576.0,
        "sequence": 1024.0,
        "gpus": 32.0,
        "tp": 1.0,
        "pp": 32.0,
        "microbatch": 1.0,
        "global_batch": 128.0,
    }
    base = {"id": "a", "source": "Zero Bubble", "gpu": "A100-SXM-80GB", "schedule": "1F1B", "memory_gib": "43"}
    return MeasuredRow(file="t.csv", line=2, texts=base | texts, numbers=numbers)


def test_the_zero_bubble_row_is_met_without_a_fitted_number() -> None:
    """Stage 1: 2 x 453M x 18 B + 31 microbatches x 2 layers x 466 MB = 45.2 GB = 42.1 GiB; printed 43."""
    result = memory_of_row(row(), 43.0)
    assert isinstance(result, MemoryRow) and result.kind == "allocated" and result.stage == 1
    assert result.predicted_gib == pytest.approx(42.1, abs=0.3)


def test_rows_that_cannot_be_expressed_say_why() -> None:
    reason = memory_of_row(row(schedule="1F1B, vocab-2"), 43.0)
    assert isinstance(reason, str) and "vocabulary" in reason
    found = memory_backtest([row(), row(id="b", schedule="1F1B, vocab-1"), row(id="c", memory_gib="")])
    assert [one.id for one in found.rows] == ["a"] and [one for one, _ in found.skipped] == ["b"]
    document = found.document()
    assert document["nvidia_smi"] is None and document["overall"]["n"] == 1


def test_errors_are_summarised() -> None:
    rows = [
        MemoryRow(id=str(p), source="s", kind="allocated", stage=0, predicted_gib=p, measured_gib=100.0)
        for p in (90.0, 99.0, 104.0)
    ]
    summary = summarise(rows)
    assert summary is not None
    assert summary.median_ape == pytest.approx(0.04) and summary.bias == pytest.approx(-0.01)
    assert summary.worst == pytest.approx(0.10)


@pytest.mark.parametrize(
    "files", [[SHIPPED], [MEASURED / "gold_dev.csv", MEASURED / "other_dev.csv"]], ids=["ours", "all"]
)
def test_published_memory_is_met_within_two_percent(files: list[Path]) -> None:
    if not all(file.exists() for file in files):
        pytest.skip("the measured tables are not here")
    rows = [one for file in files for one in read_measured(file)]
    result = memory_backtest(rows)
    allocated = summarise(result.of("allocated"))
    assert allocated is not None and allocated.n == 49
    assert allocated.median_ape < 0.02 and allocated.p90_ape < 0.08
    assert all(reason for _, reason in result.skipped)
