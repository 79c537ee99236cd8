"""`make gpu-check` without a GPU: its parts with runs that took what was predicted, budgets, failures, rows."""

import csv
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import priced, run_that_took

from mmplan.planner.plan import Plan
from mmplan.runtime.measurement import Measurement, StepMeasurement
from mmplan.scenario.profile import Measured, Profile, save_profile

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FOUND: dict[str, object] = {"torch": "2.11.0", "cuda": "13.0", "triton": "3.6.0", "name": "NVIDIA H200"}


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("PYTHONPATH", "")
    import gpu_check

    return gpu_check


@pytest.fixture
def here(gpu_check: Any, tmp_path: Path) -> Any:
    """An H200 as the microbenchmarks might find it."""
    found = Measured(value=0.7, p10=0.6, p90=0.8, source="measured", n=9, residual=0.1)
    profile = Profile(
        base="h200",
        device="NVIDIA H200",
        kind="cuda",
        date="2026-01-01",
        quick=True,
        software={},
        parameters={"gemm_fraction": found},
        link={},
    )
    save_profile(profile, tmp_path / "device.profile.yaml")
    return gpu_check.Here(kind="cuda", name="NVIDIA H200", capability=(9, 0), free_bytes=140 * 2**30, folder=tmp_path)


@pytest.fixture
def made(gpu_check: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every run takes what is predicted and learns; what it was asked for is kept."""
    asked: list[dict[str, Any]] = []

    def execute(plan: Plan, **options: Any) -> Measurement:
        asked.append({"plan": plan, **options})
        run = run_that_took(plan, *priced(plan))
        steps = [StepMeasurement(index=i, step_time_s=run.step_time_s, losses={"llm": 6.5 - i}) for i in range(3)]
        device = plan.scenario.cluster.pools[0].device.name
        return replace(run, steps=tuple(steps), device="cpu" if device == "cpu-core" else "NVIDIA H200")

    monkeypatch.setattr(gpu_check.sys.modules["gpu_parts"], "execute", execute)
    return asked


def test_the_parts_run_through_and_what_is_demanded_holds(
    gpu_check: Any, here: Any, made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = gpu_check.sys.modules["gpu_parts"]
    monkeypatch.setattr(parts, "seconds_per_action", lambda ranks, kind: (6e-6, 5e-6, 1e-6))
    monkeypatch.setattr(parts, "copy_beside_products", lambda: 0.9)
    names = ("tiny", "shared", "ring", "executor", "large", "held-out")
    table = gpu_check.check(here, FOUND, names)
    status = {row["part"]: row["status"] for row in table if row["quantity"] == "seconds"}
    assert status == dict.fromkeys(names, "done")
    of = {(row["part"], row["quantity"]): row for row in table}
    assert all(row["ok"] in (True, "") for row in table)
    assert float(of["large", "step_time_s"]["ratio"]) == pytest.approx(1.0)
    assert float(of["held-out", "step_time_s, calibrated by another"]["ratio"]) == pytest.approx(1.0, abs=0.05)
    assert 2.5e9 < float(of["large", "parameters"]["measured"]) < 3.1e9
    assert {row["device"] for row in table} == {"NVIDIA H200"}
    assert float(of["ring", "tensor_bytes"]["ratio"]) == 1.0
    assert 0 < float(of["executor", "timing over a forward of the tiny model"]["measured"]) < 0.01
    shared = [run for run in made if run["local"] == 2]
    assert [run["share_devices"] for run in shared] == [True, True]
    assert [(run["plan"].pp, run["plan"].cp) for run in shared] == [(2, 1), (1, 2)]
    assert {run["plan"].scenario.precision for run in made if run["plan"].scenario.name == "tiny"} == {"bf16", "fp32"}


@pytest.mark.parametrize(("gib", "billions"), [(80, (2.5, 3.1)), (24, (0.8, 1.3))])
def test_the_large_model_is_as_large_as_the_memory_that_is_free(
    gpu_check: Any, here: Any, gib: int, billions: tuple[float, float]
) -> None:
    parts = gpu_check.sys.modules["gpu_parts"]
    plan = parts._largest(replace(here, free_bytes=gib * 2**30))
    assert billions[0] < parts._parameters(plan.scenario) / 1e9 < billions[1]
    assert plan.stages[0].memory_bytes <= plan.stages[0].capacity_bytes <= gib * 2**30


def test_a_device_that_is_too_small_is_told_so(gpu_check: Any, here: Any, made: list[dict[str, Any]]) -> None:
    table = gpu_check.check(replace(here, free_bytes=10 * 2**30), FOUND, ["large", "held-out"])
    assert [row["status"] for row in table] == [
        "not measured: a model of 0.9 billion parameters needs more than 10 GiB",
        "not measured: the large model did not run, so nothing is calibrated by it",
    ]


def parts_of(gpu_check: Any, monkeypatch: pytest.MonkeyPatch, **parts: Callable[[Any], Any]) -> None:
    for name, part in parts.items():
        monkeypatch.setitem(gpu_check.PARTS, name, (part, 1))


def test_a_part_that_fails_or_takes_too_long_does_not_end_the_others(
    gpu_check: Any, here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(here: Any) -> Any:
        raise RuntimeError("CUDA error:\n out of luck")

    def endless(here: Any) -> Any:
        time.sleep(30)

    def wrong(here: Any) -> Any:
        return [gpu_check.Row(quantity="bytes", measured=3.0, predicted=4.0, ok=False)]

    parts_of(gpu_check, monkeypatch, tiny=broken, shared=endless, job=wrong)
    table = gpu_check.check(here, FOUND, ["tiny", "shared", "job"])
    assert [row["status"] for row in table] == [
        "failed: RuntimeError: CUDA error: out of luck",
        "failed: TimeoutError: took more than its 1 s",
        "wrong",
        "wrong",
    ]
    late = gpu_check.check(here, FOUND, ["tiny"], budget_s=0)
    assert [row["status"] for row in late] == ["not measured: the 0 s were over"]


def test_without_a_gpu_nothing_is_measured_and_that_is_no_error(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules["measured"], "ROOT", tmp_path)
    monkeypatch.setattr(gpu_check, "facts", lambda: FOUND | {"name": ""})
    assert gpu_check.main([]) == 0
    assert "torch sees no CUDA device here" in capsys.readouterr().out
    with (tmp_path / "benchmarks" / "gpu_check.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["status"] for row in rows} == {"not measured: torch sees no CUDA device here"}
    assert [row["part"] for row in rows] == list(gpu_check.PARTS)
    monkeypatch.setattr(gpu_check, "facts", lambda: FOUND | {"name": "Tesla T4", "capability": [7, 5]})
    assert gpu_check.main([]) == 0
    assert "Tesla T4 has compute capability 7.5, bf16 needs 8.0" in capsys.readouterr().out


def test_rows_replace_those_of_the_same_device_and_those_of_none(gpu_check: Any, here: Any) -> None:
    def row(part: str, device: str, value: float) -> dict[str, object]:
        one = gpu_check._row(here, FOUND, part, gpu_check.Row(quantity="seconds", measured=value), "done")
        return {**one, "device": device}

    known = [row("tiny", "none", 0.0), row("tiny", "NVIDIA H200", 1.0), row("tiny", "NVIDIA A100", 2.0)]
    merged = gpu_check.merged(known, [row("tiny", "NVIDIA H200", 3.0)])
    assert [(one["device"], one["measured"]) for one in merged] == [("NVIDIA A100", "2"), ("NVIDIA H200", "3")]
    nothing = gpu_check.nothing(FOUND, "no device")
    assert gpu_check.merged([], nothing) == nothing
    assert gpu_check.merged(merged, nothing) == merged


def test_an_unknown_gpu_is_calibrated_as_one_of_its_generation(
    gpu_check: Any, here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, called = gpu_check.sys.modules["gpu_parts"], list[list[str]]()

    class Done:
        stderr = "error: the catalogue has no 'Chip of tomorrow': name a device with its data-sheet peaks by --base"

        def __init__(self, returncode: int) -> None:
            self.returncode = returncode

    def run(command: list[str], **options: Any) -> Done:
        called.append(command)
        return Done(0 if "--base" in command else 2)

    monkeypatch.setattr(parts.subprocess, "run", run)
    rows = parts.calibrate(here)
    assert called[1][-2:] == ["--base", "h100-sxm"]
    assert [(row.quantity, row.measured) for row in rows] == [("gemm_fraction", 0.7)]
    monkeypatch.setattr(parts.subprocess, "run", lambda command, **options: Done(1))
    with pytest.raises(RuntimeError, match="the catalogue has no"):
        parts.calibrate(here)
