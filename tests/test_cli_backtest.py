"""`mmplan backtest` as a user runs it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmplan.cli import app
from mmplan.errors import InputError
from mmplan.planner.backtest import SHIPPED

RUNNER = CliRunner()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """The zero-bubble rows of the shipped table and one of an unknown GPU."""
    lines = SHIPPED.read_text().splitlines()
    chosen = [line for line in lines if line.startswith("zb-")]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([lines[0], *chosen, chosen[0].replace("a100-sxm-80", "abacus")]) + "\n")
    return path


def test_the_document_has_scores_overall_and_per_source_and_what_is_missing(rows: Path) -> None:
    result = RUNNER.invoke(app, ["backtest", str(rows), "--json", "-"])
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["schema"] == "mmplan.backtest/1"
    for scores in (document["overall"], document["sources"]["Zero Bubble, table 4"]):
        assert scores["n"] == 36
        assert {"median_ape", "p90_ape", "bias", "tau", "regret"} <= set(scores)
    assert [row["reason"] for row in document["unpriced"]] == ["unknown GPU 'abacus'"]
    assert document["memory"]["overall"]["n"] == 36


def test_the_table_names_sources_and_what_is_not_priced(rows: Path, tmp_path: Path) -> None:
    picture = tmp_path / "scatter.png"
    result = RUNNER.invoke(app, ["backtest", str(rows), "--plot", str(picture)])
    assert result.exit_code == 0
    assert "Zero Bubble, table 4" in result.stdout and "unknown GPU 'abacus'" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_one_row_is_explained_part_by_part(rows: Path) -> None:
    result = RUNNER.invoke(app, ["backtest", str(rows), "--explain", "zb-001"])
    assert result.exit_code == 0
    for word in ("gemm", "attention", "vocabulary", "P10 to P90", "megatron-2021"):
        assert word in result.stdout
    unknown = RUNNER.invoke(app, ["backtest", str(rows), "--explain", "zb-999"])
    assert isinstance(unknown.exception, InputError) and "no row has the id 'zb-999'" in str(unknown.exception)


@pytest.mark.filterwarnings("error")
def test_a_table_without_rows_is_plotted_without_a_warning(tmp_path: Path) -> None:
    path, picture = tmp_path / "none.csv", tmp_path / "none.png"
    path.write_text(SHIPPED.read_text().splitlines()[0] + "\n")
    assert RUNNER.invoke(app, ["backtest", str(path), "--plot", str(picture)]).exit_code == 0
    assert picture.stat().st_size


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("hidden", "wide", "hidden 'wide' is no number"),
        ("seq", "long", "sequence 'long' is no number"),
        ("global_batch", "all", "global batch 'all' is no number"),
        ("mbs", "0", None),
    ],
)
def test_a_cell_that_says_nothing_leaves_its_row_out_or_assumed(
    column: str, value: str, reason: str | None, tmp_path: Path
) -> None:
    cells = {"layers": "24", "gpus": "8", "step_s": "1", "hidden": "2048", "heads": "16", "vocab": "32000"}
    cells |= {"seq": "2048", "gpu": "h100-sxm", "global_batch": "64", "mbs": "1", column: value}
    path = tmp_path / "cell.csv"
    path.write_text(f"{','.join(cells)}\n{','.join(cells.values())}\n")
    result = RUNNER.invoke(app, ["backtest", str(path), "--json", "-"])
    document = json.loads(result.stdout)
    assert [row["reason"] for row in document["unpriced"]] == ([reason] if reason else [])
    assert len(document["priced"]) == (0 if reason else 1)
