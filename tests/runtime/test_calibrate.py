"""Calibration: made-up timings give back the numbers they were made of; a quick run on this machine is sound."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import changed, done_of, measured_ranks, priced, run_that_took
from tiny_plans import FOUR_STAGES, TWO_STAGES, hand_plan, tiny_scenario
from typer.testing import CliRunner

from mmplan.cli import app
from mmplan.cost_models.attention_time import BACKWARD_RATE
from mmplan.cost_models.calibration import (
    Exchange,
    FusedAttention,
    Moved,
    Product,
    Samples,
    Timed,
    fit_device,
    fit_link,
)
from mmplan.errors import CostModelError, InputError
from mmplan.planner.new_prices import on_profile
from mmplan.planner.plan import Plan, save_plan, scenario_hash
from mmplan.report.simulation import simulate_plan
from mmplan.runtime.calibrate import calibrate, catalogue_name
from mmplan.runtime.measurement import Measurement, StepMeasurement, plan_hash, save_run
from mmplan.runtime.recorded_steps import predict
from mmplan.runtime.refine import refine, refined_profile
from mmplan.runtime.reprice import reprice
from mmplan.scenario.catalogue import catalogue_device, catalogue_link, device_names
from mmplan.scenario.cluster import Device
from mmplan.scenario.profile import load_profile, profile_device


def timed(seconds: float) -> Timed:
    return Timed(seconds=seconds, rounds=(seconds, 1.02 * seconds))


def product(rows: int, outer: int, inner: int, rate: float, dtype: str = "fp32") -> Product:
    seconds = 2 * rows * outer * inner / rate
    return Product(rows=rows, outer=outer, inner=inner, dtype=dtype, timed=timed(seconds))


def attention(length: int, rate: float, backward: bool) -> FusedAttention:
    flops = 4.0 * length**2 * 4 * 32 * (2.5 / BACKWARD_RATE if backward else 1)
    return FusedAttention(
        batch=1,
        heads=4,
        length=length,
        head_dim=32,
        causal=False,
        backward=backward,
        kind="flash2",
        dtype="fp32",
        timed=timed(flops / rate),
    )


def core_samples(slow: float = 1.0) -> Samples:
    """A core of 100 GFLOP/s at best and 80 on average, attention 50, 34 GB/s of copies of which others reach a part."""
    shapes = ((512, 512, 512), (1024, 512, 256), (256, 1024, 1024))
    return Samples(
        products=(
            *(product(*shape, rate=80e9 / slow) for shape in shapes),
            product(1024, 1024, 1024, rate=100e9),
            product(1024, 1024, 1024, rate=200e9, dtype="bf16"),
        ),
        attention=tuple(attention(length, 50e9, backward) for length in (256, 512) for backward in (False, True)),
        pointwise=tuple(Moved(name="gelu", bytes=size, timed=timed(size / 10e9)) for size in (1e6, 4e6)),
        updates=(Moved(name="AdamW", bytes=32e6, timed=timed(32e6 / 20e9)),),
        stream=(Moved(name="copy", bytes=1e8, timed=timed(1e8 / 34e9)),),
        launches=(timed(2e-6), timed(4e-6)),
    )


CORE = catalogue_device("cpu-core").device


def test_made_up_timings_give_back_the_numbers_they_were_made_of() -> None:
    found = fit_device(core_samples(), CORE, "fp32", known_peaks=False)
    assert found["fp32_flops_per_s"].value == pytest.approx(100e9)
    assert found["gemm_fraction"].value == pytest.approx(4 / (3 / 0.8 + 1))  # equal work on each of four shapes
    assert found["bf16_flops_per_s"].value * found["gemm_fraction"].value == pytest.approx(200e9)
    assert found["memory_bytes_per_s"].value == pytest.approx(34e9 / 0.85)  # streams reach 0.85 of it
    assert found["memory_fraction"].value == pytest.approx(10 / 40)
    assert found["update_fraction"].value == pytest.approx(20 / 40)
    assert found["attention.flash2"].value == pytest.approx(0.5)
    assert found["launch_s"].value == pytest.approx(3e-6)
    assert all(0 < item.p10 <= item.value <= item.p90 for item in found.values())


def test_shapes_that_differ_more_give_a_wider_range() -> None:
    even, uneven = (fit_device(core_samples(slow), CORE, "fp32", known_peaks=False) for slow in (1.0, 2.0))
    width = [one["gemm_fraction"].p90 / one["gemm_fraction"].p10 for one in (even, uneven)]
    assert width[0] < width[1]
    assert even["gemm_fraction"].residual < uneven["gemm_fraction"].residual


def test_peaks_of_a_gpu_stay_those_of_the_data_sheet() -> None:
    h100 = catalogue_device("h100-sxm").device
    gpu = replace(
        core_samples(),
        products=tuple(product(8192, 8192, inner, 600e12, "bf16") for inner in (4096, 8192)),
        pointwise=(Moved(name="gelu", bytes=1e9, timed=timed(1e9 / 1.34e12)),),
        attention=(),
    )
    found = fit_device(gpu, h100, "bf16", known_peaks=True)
    assert not any(name.endswith("_per_s") for name in found)
    assert found["memory_fraction"].value == pytest.approx(1.34 / 3.35)
    assert 0.6 < found["gemm_fraction"].value < 0.65  # 600 of 989.5, and what tiles cost


def test_operators_as_short_as_launches_are_refused() -> None:
    tiny = replace(core_samples(), pointwise=(Moved(name="gelu", bytes=100, timed=timed(3e-6)),))
    with pytest.raises(CostModelError, match="no measurement of memory_fraction was long enough"):
        fit_device(tiny, CORE, "fp32", known_peaks=False)


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_link_gives_back_its_latency_and_bandwidth(ranks: int) -> None:
    true = replace(catalogue_link("loopback"), latency_s=30e-6, bytes_per_s=3e9)
    kinds = [(collective, 2**power) for collective in (False, True) for power in range(10, 27, 2)]
    unknown = [Exchange(collective=kind, size=size, ranks=ranks, timed=timed(1.0)) for kind, size in kinds]
    exchanges = [replace(one, timed=timed(one.predicted_s(true))) for one in unknown]
    found = fit_link(exchanges, catalogue_link("loopback"))
    assert found["latency_s"].value == pytest.approx(30e-6, rel=1e-3)
    assert found["bytes_per_s"].value == pytest.approx(3e9, rel=1e-3)
    assert all(item.p10 <= item.value <= item.p90 for item in found.values())


def test_a_quick_calibration_of_this_machine_can_be_planned_with(tmp_path: Path) -> None:
    """Through the command line, into a file, into a scenario; no claim on how fast the machine is."""
    path = tmp_path / "p.yaml"
    result = CliRunner().invoke(app, ["calibrate", "--quick", "--device", "cpu", "-o", str(path), "--json", "-"])
    assert result.exit_code == 0, result.output
    profile = load_profile(path)
    expected = {"fp32_flops_per_s", "gemm_fraction", "memory_fraction", "update_fraction", "launch_s"}
    assert expected <= set(profile.parameters)
    for item in profile.parameters.values():
        assert math.isfinite(item.value) and 0 < item.p10 <= item.value <= item.p90
        assert item.n > 0 and math.isfinite(item.residual)
    assert profile.base == "cpu-core" and profile.quick
    device = profile_device(profile, "here")
    assert simulate_plan(on_device(hand_plan(tiny_scenario(), TWO_STAGES), device)).step_time_s > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "tpu"], "--device: expected 'cpu' or 'cuda', found 'tpu'"),
        (["--local", "1"], "--local needs at least 2 processes to measure between, found 1"),
        (["--base", "h100-sxn"], "--base: unknown device 'h100-sxn'; did you mean 'h100-sxm'?"),
        (["--from", "run.json"], "refining needs both: mmplan calibrate --from run.json PLAN"),
    ],
)
def test_what_cannot_be_measured_is_answered_with_one_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["calibrate", "-o", str(tmp_path / "p.yaml"), *arguments])
    assert isinstance(result.exception, InputError)
    assert said in str(result.exception)


@pytest.mark.parametrize(
    ("driver", "device"), [("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA A100-SXM4-80GB", "a100-sxm-80")]
)
def test_gpus_are_known_by_their_drivers_names(driver: str, device: str) -> None:
    assert catalogue_name("cuda", driver) == device
    assert device in device_names()


def test_an_unknown_gpu_needs_its_peaks() -> None:
    with pytest.raises(InputError, match="--base"):
        catalogue_name("cuda", "Chip of tomorrow")
    with pytest.raises(InputError, match="torch sees no CUDA device"):
        calibrate(device="cuda")


def on_device(plan: Plan, device: Device) -> Plan:
    pool = replace(plan.scenario.cluster.pools[0], device=device)
    scenario = replace(plan.scenario, cluster=replace(plan.scenario.cluster, pools=(pool,)))
    return replace(plan, scenario=scenario, scenario_hash=scenario_hash(scenario))


def run_on(plan: Plan, device: Device) -> Measurement:
    """A run of `plan` that took what it would on another device."""
    done = simulate_plan(on_device(plan, device), step=0)
    ranks = measured_ranks(done)
    return Measurement(
        plan_hash=plan_hash(plan),
        mmplan_version="0",
        torch_version="0",
        python_version="3",
        device="cpu",
        backend="gloo",
        hosts=("here",),
        processes_per_core=0.5,
        rehearsed=False,
        time_scale=1.0,
        steps=(StepMeasurement(index=0, step_time_s=done.step_time_s, losses={"llm": 6.0}),),
        recorded_step=0,
        pipeline_s=done.pipeline_s,
        bubble=done.bubble,
        ranks=ranks,
        actions=(),
        timeline=done_of(done),
    )


PLAN = hand_plan(replace(tiny_scenario(), global_batch=4), TWO_STAGES, dp=1)


def test_a_run_refines_the_device_until_the_plan_predicts_it(tmp_path: Path) -> None:
    own = PLAN.scenario.cluster.pools[0].device
    slow = replace(own, gemm_fraction=0.6, memory_fraction=0.25, update_fraction=0.3)
    run = run_on(PLAN, slow)
    save_run(run, tmp_path / "run.json")
    save_plan(PLAN, tmp_path / "plan.json")
    before_s = simulate_plan(PLAN, step=0).step_time_s
    profile = refined_profile(tmp_path / "plan.json", tmp_path / "run.json")
    refined = replace(PLAN, scenario=on_profile(PLAN.scenario, profile, tmp_path / "p.yaml"))
    after_s = predict(refined, 0).step_time_s
    assert abs(after_s / run.step_time_s - 1) < 0.02
    assert abs(before_s / run.step_time_s - 1) > 0.2
    profile = refine(PLAN, run, tmp_path / "run.json")
    assert profile.parameters["update_fraction"].value == pytest.approx(0.3, rel=0.01)
    assert "run.json" in profile.refined_by


def paced_run(plan: Plan, **pace: float) -> Measurement:
    """What `plan` takes when its modules are so many times as slow."""
    modules = tuple(replace(m, time_factor=pace.get(m.name, 1.0)) for m in plan.scenario.model.modules)
    slow = replace(plan, scenario=replace(plan.scenario, model=replace(plan.scenario.model, modules=modules)))
    program, durations = priced(slow)
    links = {"SEND": lambda action: 3e-4 + action.bytes / 5e8}
    took = changed(program, durations, lambda rank, action, s: links.get(action.kind, lambda action: s)(action))
    return run_that_took(plan, program, took)


def test_a_slow_module_and_a_slow_link_are_found_and_another_plan_is_predicted_better(tmp_path: Path) -> None:
    """Vision takes 2 times what it is priced at, the language model 1.3 times; the calibration has not
    seen the plan of four stages."""
    scenario = replace(tiny_scenario(), global_batch=8)
    plans = {"seen": hand_plan(scenario, TWO_STAGES), "held": hand_plan(scenario, FOUR_STAGES, schedule="gpipe")}
    runs = {name: paced_run(plan, vision=2.0, llm=1.3) for name, plan in plans.items()}
    for name, plan in plans.items():
        save_plan(plan, tmp_path / f"{name}.plan.json")
        save_run(runs[name], tmp_path / f"{name}.json")
    files = [str(tmp_path / name) for name in ("seen.plan.json", "seen.json")]
    held = [str(tmp_path / name) for name in ("held.plan.json", "held.json")]
    out = tmp_path / "p.yaml"
    arguments = ["validate", *files, "--calibrate", "-o", str(out), "--held-out", *held, "--json", "-"]
    result = CliRunner().invoke(app, arguments)
    profile = load_profile(out)
    assert profile.modules["vision"].value / profile.modules["llm"].value == pytest.approx(2.0 / 1.3, rel=0.1)
    assert profile.link["latency_s"].value == pytest.approx(3e-4, rel=0.05)
    assert profile.link["bytes_per_s"].value == pytest.approx(5e8, rel=0.05)
    seen, other = json.loads(result.stdout)["calibration"]["runs"]
    assert (seen["held_out"], other["held_out"]) == (False, True)
    for row in (seen, other):
        assert abs(row["error_after"]) < 0.04 < 0.1 < abs(row["error_before"])


def test_a_run_of_one_microbatch_that_took_ten_times_as_long_is_believed() -> None:
    """Two computes say little, but both say the same."""
    plan = hand_plan(replace(tiny_scenario(), global_batch=1), ((*TWO_STAGES[0], *TWO_STAGES[1]),))
    program, durations = priced(plan)
    run = run_that_took(plan, program, changed(program, durations, lambda rank, action, s: 10 * s))
    found = reprice(plan, run, refine(plan, run, Path("run.json")), Path("p.yaml"), name="run", held_out=False)
    assert found.error_before == pytest.approx(-0.9)
    assert abs(found.error_after) < 0.05


def test_a_held_out_run_without_a_calibration_and_one_of_another_plan_are_refused(tmp_path: Path) -> None:
    run = paced_run(PLAN)
    save_plan(PLAN, tmp_path / "plan.json")
    save_run(run, tmp_path / "run.json")
    save_run(replace(run, plan_hash="other"), tmp_path / "other.json")
    plan, own, other = (str(tmp_path / name) for name in ("plan.json", "run.json", "other.json"))
    result = CliRunner().invoke(app, ["validate", plan, own, "--held-out", plan, own])
    assert "--held-out has no effect without --calibrate" in str(result.exception)
    calibrate_to = ["--calibrate", "-o", str(tmp_path / "p.yaml")]
    result = CliRunner().invoke(app, ["validate", plan, own, *calibrate_to, "--held-out", plan, other])
    assert "run other.json is of plan other, the plan given with it is" in str(result.exception)
    assert not (tmp_path / "p.yaml").exists()


def test_a_run_that_went_as_predicted_changes_little() -> None:
    device = PLAN.scenario.cluster.pools[0].device
    profile = refine(PLAN, run_on(PLAN, device), Path("run.json"))
    for name in ("gemm_fraction", "memory_fraction", "launch_s"):
        assert profile.parameters[name].value == pytest.approx(getattr(device, name), rel=0.01)


def test_runs_that_say_nothing_about_the_device_are_refused() -> None:
    run = run_on(PLAN, PLAN.scenario.cluster.pools[0].device)
    for spoilt, said in (
        (replace(run, plan_hash="other"), "this run is of plan other"),
        (replace(run, rehearsed=True), "a rehearsal sleeps"),
    ):
        with pytest.raises(InputError, match=said):
            refine(PLAN, spoilt, Path("run.json"))
