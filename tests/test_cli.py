"""The commands as a user runs them: files in, tables and documents out, exit codes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_runs import mmplan

ROOT = Path(__file__).parents[1]
TINY = ROOT / "scenarios" / "tiny.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the best and the naive plan of the tiny scenario."""
    path = tmp_path_factory.mktemp("plans")
    assert mmplan("optimize", TINY, "-o", "best.plan.json", "--json", "best.json", cwd=path).returncode == 0
    assert mmplan("optimize", TINY, "-o", "naive.plan.json", "--naive", cwd=path).returncode == 0
    return path


def document(*arguments: str | Path, cwd: Path) -> dict[str, Any]:
    """The document of `--json -`, which must be all there is on stdout."""
    result = mmplan(*arguments, "--json", "-", cwd=cwd)
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def test_optimize_writes_a_plan_and_a_document_with_its_certificate(folder: Path) -> None:
    best = json.loads((folder / "best.json").read_text())
    assert best["schema"] == "mmplan.optimize/1"
    assert best["status"] == "optimal"
    assert 0 < best["bound_s"] <= best["objective_s"]
    assert best["gap"] == pytest.approx(1 - best["bound_s"] / best["objective_s"])
    assert best["wall_s"] >= 0
    simulated = best["any_schedule"]
    assert simulated["step_s"] == best["summary"]["step_time_s"]
    assert 0 < simulated["bound_s"] <= min(simulated["step_s"], best["objective_s"])
    assert simulated["gap"] == pytest.approx(1 - simulated["bound_s"] / simulated["step_s"])
    assert {"axis": "modules", "says": "encoders on ranks of their own", "constraint": "modules: any"} in best[
        "not_searched"
    ]
    assert best["fewer_devices"] is None
    assert best["plan"] == json.loads((folder / "best.plan.json").read_text())


def test_every_document_names_its_schema(folder: Path) -> None:
    assert document("simulate", "best.plan.json", cwd=folder)["schema"] == "mmplan.simulate/1"
    assert document("compare", "best.plan.json", "naive.plan.json", cwd=folder)["schema"] == "mmplan.compare/1"
    assert document("check", "best.plan.json", cwd=folder)["schema"] == "mmplan.check/1"
    assert document("hardware", cwd=folder)["schema"] == "mmplan.hardware/1"
    assert document("optimize", TINY, "-o", "again.plan.json", cwd=folder)["schema"] == "mmplan.optimize/1"


def test_the_best_plan_is_not_slower_than_the_naive_one(folder: Path) -> None:
    plans = document("compare", "best.plan.json", "naive.plan.json", cwd=folder)["plans"]
    assert [plan["name"] for plan in plans] == ["best", "naive"]
    assert plans[0]["objective_s"] <= plans[1]["objective_s"]


def test_simulate_writes_a_picture_and_a_trace(folder: Path) -> None:
    assert mmplan("simulate", "best.plan.json", "--plot", "g.png", "--trace", "t.json", cwd=folder).returncode == 0
    assert (folder / "g.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "t.json").read_text())["traceEvents"]


def test_the_schedule_of_a_plan_is_written_for_torch(folder: Path) -> None:
    line = ("simulate", "naive.plan.json", "--schedule", "zb-1p", "--schedule-csv", "orders.csv", "-o", "zb.plan.json")
    assert mmplan(*line, cwd=folder).returncode == 0
    orders = json.loads((folder / "zb.plan.json").read_text())["orders"]
    assert (folder / "orders.csv").read_text().replace(",", " ").splitlines() == orders


def test_a_drawn_step_differs_from_the_mean_step_and_repeats(folder: Path) -> None:
    mean, drawn, again = (
        document("simulate", "best.plan.json", *step, cwd=folder) for step in ([], ["--step", "3"], ["--step", "3"])
    )
    assert drawn == again
    assert drawn["step_time_s"] != mean["step_time_s"]


def test_the_comparison_page_needs_no_network(folder: Path) -> None:
    result = mmplan("compare", "best.plan.json", "naive.plan.json", "--html", "page.html", cwd=folder)
    assert result.returncode == 0
    page = (folder / "page.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "http" not in page.replace("http-equiv", "")


def test_a_sound_plan_passes_and_a_broken_one_ends_with_1(folder: Path) -> None:
    assert mmplan("check", "best.plan.json", cwd=folder).returncode == 0
    plan = json.loads((folder / "best.plan.json").read_text())
    plan["stages"][0]["layers"] = plan["stages"][0]["layers"][1:]
    (folder / "broken.plan.json").write_text(json.dumps(plan))
    result = mmplan("check", "broken.plan.json", cwd=folder)
    assert result.returncode == 1
    assert "vision.embed" in result.stdout


def test_bad_input_is_one_sentence_and_exit_code_2(folder: Path) -> None:
    (folder / "typo.yaml").write_text(TINY.read_text().replace("precision:", "precisoin:"))
    result = mmplan("optimize", "typo.yaml", cwd=folder)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "typo.yaml:" in result.stderr
    assert "precision" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("optimize", "missing.yaml"),
        ("simulate", "missing.plan.json"),
        ("check", "best.json"),
        ("compare", "best.plan.json", "best.plan.json"),
        ("validate", "best.plan.json", "best.plan.json"),
        ("execute", "best.plan.json"),
        ("execute", "best.plan.json", "--local", "3"),
        ("optimize", str(TINY), "-o", "no/such/folder/plan.json"),
        ("optimize", str(TINY), "--gap", "2"),
    ],
)
def test_user_errors_end_with_2_and_no_traceback(folder: Path, arguments: tuple[str, ...]) -> None:
    result = mmplan(*arguments, cwd=folder)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.strip()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("execute best.plan.json --local 4 --keep 3", "--keep has no effect without --checkpoint FOLDER"),
        ("execute best.plan.json --local 4 --max-skips 3", "--max-skips has no effect without --on-nan skip"),
        ("execute best.plan.json --local 4 --unit 30", "--unit has no effect without --rehearse"),
        ("validate best.plan.json run.json -o new.yaml", "--output has no effect without --calibrate"),
        ("launch best.plan.json --image mine", "--image has no effect without --for kubernetes"),
        ("execute job.yaml --local 4", "`mmplan optimize job.yaml -o best.plan.json` makes one"),
    ],
)
def test_what_does_nothing_in_a_call_is_refused(folder: Path, arguments: str, sentence: str) -> None:
    (folder / "job.yaml").write_text("name: job")
    result = mmplan(*arguments.split(), cwd=folder)
    assert result.returncode == 2
    assert sentence in " ".join(result.stderr.split())


SMALL_DEVICE = """{
    device: {
        name: small, memory: 4 MB, memory_bandwidth: 10 GB/s, fp32: 10 GFLOP/s, gemm_fraction: 1,
        attention_fraction: 1, memory_fraction: 1, launch: 5 us, reserved: 0 B},
    node_link: loopback,"""


def test_an_infeasible_scenario_ends_with_3_and_says_so_in_the_document(folder: Path) -> None:
    (folder / "small.yaml").write_text(TINY.read_text().replace("{device: cpu-core,", SMALL_DEVICE))
    result = mmplan("optimize", "small.yaml", "--json", "-", cwd=folder)
    assert result.returncode == 3, result.stderr
    error = json.loads(result.stdout)
    assert error["schema"] == "mmplan.error/1"
    assert error["status"] == "infeasible"
    assert error["message"] in result.stderr


def test_degrees_that_no_run_can_have_end_fit_with_3_as_they_end_a_search(folder: Path) -> None:
    (folder / "third.yaml").write_text(TINY.read_text().replace("tp: 1\n  pp: [2, 4]", "tp: 3\n  pp: 1"))
    assert mmplan("optimize", "third.yaml", cwd=folder).returncode == 3
    result = mmplan("fit", TINY, "--tp", 3, "--dp", 1, "--json", "-", cwd=folder)
    assert (result.returncode, json.loads(result.stdout)["status"]) == (3, "infeasible"), result.stderr
    assert mmplan("fit", TINY, "--stack", "nothing", cwd=folder).returncode == 2


def test_no_plan_within_the_limit_ends_with_4(folder: Path) -> None:
    large = ROOT / "scenarios" / "llama-3.2-90b-vision.yaml"
    result = mmplan("optimize", large, "--time-limit", "0.1", "--json", "-", cwd=folder)
    assert result.returncode == 4, result.stderr
    assert json.loads(result.stdout)["status"] == "no_plan"


def test_an_error_document_that_cannot_be_written_is_no_second_error(folder: Path) -> None:
    result = mmplan("compare", "best.plan.json", "naive.plan.json", "--json", ".", cwd=folder)
    assert result.returncode == 2
    assert result.stderr == "error: .: cannot write: it is a folder\n"


@pytest.mark.distributed
def test_all_processes_of_torchrun_together_write_one_document(folder: Path) -> None:
    def under_torchrun(plan: str) -> dict[str, Any]:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command = ["--nproc-per-node", "2", "-m", "mmplan", "execute", plan, "--steps", "1", "--json", "-"]
        done = subprocess.run([*run, *command], capture_output=True, text=True, cwd=folder, check=False, timeout=120)
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    (folder / "two.yaml").write_text(TINY.read_text().replace("devices_per_node: 4", "devices_per_node: 2"))
    assert mmplan("optimize", "two.yaml", "-o", "two.plan.json", "--naive", cwd=folder).returncode == 0
    assert under_torchrun("best.plan.json")["message"] == "torchrun started 2 processes, the plan needs 4"
    assert under_torchrun("two.plan.json")["schema"] == "mmplan.run/1"


@pytest.mark.parametrize("rest", [[], ["--json", "-"]])
def test_a_reader_who_closes_the_pipe_early_does_not_change_the_exit_code(folder: Path, rest: list[str]) -> None:
    plan = json.loads((folder / "best.plan.json").read_text())
    plan["microbatches"] += 1
    (folder / "odd.plan.json").write_text(json.dumps(plan))
    for file, code in (("best.plan.json", 0), ("odd.plan.json", 1)):
        command = [sys.executable, "-m", "mmplan", "check", file, *rest]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == code


def test_help_texts_hold_no_square_brackets() -> None:
    """They are markup to the help printer and vanish."""
    text = (ROOT / "mmplan" / "cli.py").read_text()
    assert not re.search(r'help="[^"]*\[', text)


def test_a_seed_that_no_solver_takes_is_bad_input(folder: Path) -> None:
    assert mmplan("optimize", TINY, "--seed", 10**20, cwd=folder).returncode == 2


def test_wrong_usage_writes_a_document_too(folder: Path) -> None:
    result = mmplan("optimize", TINY, "--gap", "-1", "--json", "-", cwd=folder)
    assert result.returncode == 2
    assert json.loads(result.stdout)["status"] == "bad_input"
    assert "--gap" in result.stderr
