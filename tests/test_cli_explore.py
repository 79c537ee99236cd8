"""Commands that plan a scenario many times, as a user runs them."""

import csv
import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from command_runs import mmplan

ROOT = Path(__file__).parents[1]
TINY = ROOT / "scenarios" / "tiny.yaml"


def wide(*arguments: str | Path, cwd: Path) -> CompletedProcess[str]:
    """In a terminal of so many columns that no sentence is broken."""
    return mmplan(*arguments, cwd=cwd, COLUMNS="200")


def document(*arguments: str | Path, cwd: Path) -> dict[str, Any]:
    """The document of `--json -`, which must be all there is on stdout."""
    parsed: dict[str, Any] = json.loads(wide(*arguments, "--json", "-", cwd=cwd).stdout)
    return parsed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explore")
    zoned = TINY.read_text().replace("  tp: 1\n", "  tp: 1\n  no_split: [llm.1-5, audio]\n")
    (path / "zoned.yaml").write_text(zoned)
    return path


def test_why_not_and_zone_prices_stand_in_tables_and_document(folder: Path) -> None:
    questions = ("--why-not", "pp=4", "--why-not", "tp=3", "--zone-prices")
    result = wide("optimize", "zoned.yaml", *questions, "--json", "why.json", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "Why not ..." in result.stdout
    assert "What zones cost per step" in result.stdout and "costs, ms per step" in result.stdout
    found = json.loads((folder / "why.json").read_text())
    assert [one["verdict"] for one in found["why_not"]] == ["slower", "excluded"]
    assert found["why_not"][1]["reason"] == "a node's 4 devices / tp 3 = 1.333 is no whole number"
    assert [one["zone"] for one in found["zone_prices"]] == ["llm.1-5", "audio", "all zones"]
    assert found["zone_prices"][0]["price_s"] > 0


def test_a_sweep_writes_table_csv_picture_and_document(folder: Path) -> None:
    vary = ("--vary", "cluster.nodes=0..2+1", "--vary", "batch.global=16,32")
    result = wide("sweep", TINY, *vary, "-o", "rows.csv", "--plot", "rows.png", "--json", "rows.json", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "(1) " in result.stdout
    with (folder / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["cluster.nodes"], row["batch.global"]) for row in rows][:3] == [("0", "16"), ("0", "32"), ("1", "16")]
    assert rows[0]["step_time_s"] == "" and float(rows[2]["step_time_s"]) > 0
    assert rows[0]["reason"].endswith("cluster.nodes: expected at least 1, found 0")
    found = json.loads((folder / "rows.json").read_text())
    assert found["complete"] and len(found["rows"]) == 6 and len(found["advice"]) == 2
    assert (folder / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_a_front_writes_its_plans(folder: Path) -> None:
    (folder / "plans").mkdir()
    asked = ("--against", "devices", "--objective", "device-time", "-o", "plans", "--plot", "front.png")
    found = document("pareto", TINY, *asked, cwd=folder)
    assert [point["limit"] for point in found["points"]] == [4, 2]  # the file asks for two stages at least
    assert found["objective"] == "device-time"
    for point in found["points"]:
        assert point["value"] == pytest.approx(point["cost"] * point["objective_s"])
        assert point["value_bound"] <= point["value"]
    assert (folder / "plans" / "tiny.devices-1.plan.json").is_file()


def test_a_drift_is_answered_with_a_new_plan(folder: Path) -> None:
    assert wide("optimize", TINY, "-o", "best.plan.json", cwd=folder).returncode == 0
    (folder / "live.yaml").write_text("schema: mmplan.modalities/1\nmodalities: {vision: {forward: 200 ms}}\n")
    asked = ("--profile", "live.yaml", "--restart", "10 s", "--steps", "1000", "-o", "new.plan.json")
    found = document("replan", "best.plan.json", *asked, cwd=folder)
    assert (found["advice"], found["switch"]["restart_s"]) == ("switch", 10.0)
    assert wide("check", "new.plan.json", cwd=folder).returncode == 0


# arguments, end of the sentence on stderr
REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("sweep", str(TINY), "--vary", "cluster.nodez=1,2"), "cluster.nodez: unknown key; did you mean 'nodes'?"),
    (("sweep", str(TINY), "--vary", "cluster.nodes=0"), "cluster.nodes: expected at least 1, found 0"),
    (("sweep", str(TINY), "--vary", "cluster.nodes=8..2"), "the range 8..2 is empty: 2 is below 8"),
    (("sweep", str(TINY), "--vary", "seed=1", "-o", "no/rows.csv"), "folder 'no' does not exist"),
    (("pareto", str(TINY), "--against", "time"), "--against: expected memory, devices or both, found 'time'"),
    (
        ("pareto", str(TINY), "--against", "devices", "--objective", "devices", "--deadline", "9s"),
        "--objective devices counts what --against devices limits: use --against memory",
    ),
    (("sweep", str(TINY), "--vary", "seed=1", "--objective", "steptime"), "did you mean 'step-time'?"),
    (("pareto", str(TINY), "-o", "no/where"), "folder 'no' does not exist"),
    (("replan", "lost/p.json", "--profile", "x"), "lost/p.json: no such file"),
    (("optimize", str(TINY), "--why-not", "tpp=2"), "unknown key 'tpp'; did you mean 'tp'?"),
    (("optimize", str(TINY), "--zone-prices"), "the scenario has no zones: constraints.no_split is empty"),
    (
        ("optimize", str(TINY), "--why-not", "tp=2", "--objective", "device-time"),
        "--why-not compares step times: use it with --objective step-time and without --naive",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(case[0][2:]) for case in REFUSED])
def test_what_is_wrong_is_one_sentence(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    result = wide(*arguments, cwd=folder)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.rstrip().endswith(message), result.stderr
    assert result.stderr.count("\n") == 1


def test_pareto_makes_the_folder_of_its_plans(tmp_path: Path) -> None:
    result = wide("pareto", TINY, "--against", "devices", "-o", "front", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "front").glob("*.plan.json"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("optimize", TINY, "--naive", "--objective", "devices"), "--naive does not search"),
        (("optimize", TINY, "--objective", "devices", "--deadline=-5s"), "'-5s' is negative"),
        (("replan", "best.json", "--profile", "new.yaml", "--restart=-90 s"), "'-90 s' is negative"),
        (("simulate", "best.json", "--schedule", "all", "-o", "out.json"), "writes no file"),
    ],
)
def test_options_that_say_nothing_together_are_refused(
    tmp_path: Path, arguments: tuple[str | Path, ...], sentence: str
) -> None:
    result = wide(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert sentence in result.stderr
