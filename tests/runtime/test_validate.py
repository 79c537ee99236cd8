"""Validation of runs that are made up from the prediction itself, then spoilt one number at a time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import done_of, measured_ranks
from tiny_plans import TWO_STAGES, hand_plan, tiny_scenario
from typer.testing import CliRunner

from mmplan.cli import app
from mmplan.cost_models.build import build_graph
from mmplan.errors import InputError
from mmplan.planner.plan import Plan, save_plan
from mmplan.planner.working import working_bytes
from mmplan.runtime.measurement import (
    Measurement,
    Moved,
    StepMeasurement,
    load_run,
    plan_hash,
    run_document,
    save_run,
)
from mmplan.runtime.recorded_steps import predict, recorded_steps
from mmplan.runtime.run_check import require_consistent
from mmplan.runtime.step_bytes import planned_steps
from mmplan.runtime.thresholds import Thresholds
from mmplan.runtime.validate import validate


@pytest.fixture(scope="module")
def plan() -> Plan:
    return hand_plan(replace(tiny_scenario(), global_batch=4), TWO_STAGES, dp=2)


@pytest.fixture(scope="module")
def run(plan: Plan) -> Measurement:
    """A run that did exactly what the plan's cost model says."""
    empty = Measurement(
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
        steps=(StepMeasurement(index=0, step_time_s=1.0, losses={"llm": 6.0}),),
        recorded_step=0,
        pipeline_s=1.0,
        bubble=0.0,
        ranks=(),
        actions=(),
        timeline=(),
    )
    planned = predict(plan, 0)
    at_work = working_bytes(plan, build_graph(plan.scenario))
    ranks = tuple(
        replace(rank, peak_memory_bytes=rank.peak_memory_bytes - at_work[plan.row(rank.stage)])  # not seen on a CPU
        for rank in measured_ranks(planned)
    )
    return replace(
        empty,
        ranks=ranks,
        pipeline_s=planned.pipeline_s,
        bubble=planned.bubble,
        steps=(StepMeasurement(index=0, step_time_s=planned.step_time_s, losses={"llm": 6.0}),),
        timeline=done_of(planned),
    )


def test_a_run_that_did_as_predicted_passes_with_no_difference(plan: Plan, run: Measurement) -> None:
    validation = validate(plan, run, Thresholds(communication=0.0001))
    assert validation.passed
    assert all(row.difference == pytest.approx(0, abs=1e-9) for row in validation.rows)
    assert {row.quantity for row in validation.rows if row.rank is None} == {
        "bubble",
        "step_time_s",
        "sent_bytes",
        "reduce_bytes",
        "communication_s",
        "overlap",
    }


NOTHING = Moved(sent_bytes=0, reduce_bytes=0, tensor_bytes=0)


def _first_rank(run: Measurement, **changes: float) -> Measurement:
    return replace(run, ranks=(replace(run.ranks[0], **changes), *run.ranks[1:]))


SPOILT: dict[str, Callable[[Measurement], Measurement]] = {
    "sent_bytes": lambda run: _first_rank(run, activation_bytes=run.ranks[0].activation_bytes + 1),
    "reduce_bytes": lambda run: _first_rank(run, reduce_bytes=run.ranks[0].reduce_bytes - 1),
    "peak_memory_bytes": lambda run: _first_rank(run, peak_memory_bytes=int(run.ranks[0].peak_memory_bytes * 1.11)),
    "bubble": lambda run: replace(run, bubble=run.bubble + 0.051),
    "step_time_s": lambda run: replace(run, steps=(replace(run.steps[0], step_time_s=run.step_time_s * 1.16),)),
}


@pytest.mark.parametrize("quantity", SPOILT)
def test_one_wrong_number_fails_exactly_its_rows(quantity: str, plan: Plan, run: Measurement) -> None:
    validation = validate(plan, SPOILT[quantity](run))
    assert not validation.passed
    assert {row.quantity for row in validation.rows if row.passed is False} == {quantity}


def test_bytes_of_a_job_with_data_of_its_own_are_not_held_to_the_plan(plan: Plan, run: Measurement) -> None:
    other = SPOILT["sent_bytes"](run)
    assert not validate(plan, other).passed
    assert validate(plan, replace(other, own_data=True)).passed


def test_bytes_of_every_step_are_held_to_those_of_its_samples(plan: Plan, run: Measurement) -> None:
    """Steps that are not recorded too, and one that moves too little does not make up for another."""
    first = run.steps[0]
    known = replace(run, steps=tuple(replace(first, index=i, moved=NOTHING) for i in range(3)))
    moved = planned_steps(plan, build_graph(plan.scenario), known)
    sums = [sum(getattr(rank, name) for rank in run.ranks) for name in ("sent_bytes", "reduce_bytes")]
    assert [moved[0].sent_bytes, moved[0].reduce_bytes] == sums  # of the recorded step
    right = replace(run, steps=tuple(replace(first, index=i, moved=moved[i]) for i in range(3)))
    validation = validate(plan, right)
    assert validation.passed
    assert {row.quantity for row in validation.rows} >= {"steps_sent_bytes", "steps_reduce_bytes"}
    more, less = (
        replace(step, moved=replace(step.moved, sent_bytes=step.moved.sent_bytes + change))
        for step, change in zip(right.steps[1:], (5, -5), strict=True)
        if step.moved is not None
    )
    missed = validate(plan, replace(right, steps=(first, more, less)))
    assert [(row.quantity, row.difference) for row in missed.rows if row.passed is False] == [("steps_sent_bytes", 5)]


def test_bytes_of_every_step_of_a_job_are_held_to_what_it_foresaw(plan: Plan, run: Measurement) -> None:
    moved = Moved(sent_bytes=300, reduce_bytes=20, tensor_bytes=7)
    job = replace(run, own_data=True, steps=(replace(run.steps[0], moved=moved, foreseen=moved),))
    rows = {row.quantity: row for row in validate(plan, job).rows if row.quantity.startswith("steps_")}
    assert {name: (row.planned, row.measured, row.passed) for name, row in rows.items()} == {
        "steps_sent_bytes": (300, 300, True),
        "steps_reduce_bytes": (20, 20, True),
        "steps_tensor_bytes": (7, 7, True),
    }
    other = replace(job, steps=(replace(job.steps[0], moved=replace(moved, tensor_bytes=8)),))
    assert [row.quantity for row in validate(plan, other).rows if row.passed is False] == ["steps_tensor_bytes"]


def test_communication_time_has_a_verdict_when_one_is_asked_for(plan: Plan, run: Measurement, tmp_path: Path) -> None:
    files = [str(tmp_path / "p.json"), str(tmp_path / "r.json")]
    save_plan(plan, Path(files[0]))
    slow = tuple(replace(rank, transfer_s=rank.transfer_s * 1.5) for rank in run.ranks)
    save_run(replace(run, plan_hash=plan_hash(plan), ranks=slow), Path(files[1]))
    assert CliRunner().invoke(app, ["validate", *files]).exit_code == 0
    assert CliRunner().invoke(app, ["validate", *files, "--communication", "0.6"]).exit_code == 0
    assert CliRunner().invoke(app, ["validate", *files, "--communication", "0.1"]).exit_code == 1


def test_slow_computes_spoil_the_plan_but_not_the_replay(plan: Plan, run: Measurement) -> None:
    """All computes and updates twice as long: the replay explains the longer step."""
    timeline = tuple(replace(item, end_s=item.start_s + 2 * (item.end_s - item.start_s)) for item in run.timeline)
    replayed = recorded_steps(plan, replace(run, timeline=timeline)).replayed
    slow = replace(
        run,
        timeline=timeline,
        bubble=replayed.bubble,
        steps=(replace(run.steps[0], step_time_s=replayed.step_time_s),),
    )
    validation = validate(plan, slow)
    step = next(row for row in validation.rows if row.quantity == "step_time_s")
    assert step.passed and step.measured > 1.5 * step.planned


def test_no_verdict_on_times_where_cpu_processes_have_less_than_two_cores_each(plan: Plan, run: Measurement) -> None:
    crowded = replace(SPOILT["bubble"](SPOILT["step_time_s"](run)), processes_per_core=1.0)
    validation = validate(plan, crowded)
    assert validation.passed
    assert [
        row.passed for row in validation.rows if row.quantity in ("bubble", "step_time_s") and row.rank is None
    ] == [
        None,
        None,
    ]
    assert not validate(plan, replace(crowded, device="some GPU")).passed


def test_a_rehearsal_is_held_to_the_stretched_plan_and_has_no_memory(plan: Plan, run: Measurement) -> None:
    stretched = replace(run, rehearsed=True, time_scale=50.0)
    planned = predict(plan, 0, 50.0)
    steps = (replace(run.steps[0], step_time_s=planned.step_time_s),)
    faithful = replace(stretched, bubble=planned.bubble + 0.019, steps=steps)
    assert validate(plan, faithful).passed
    late = replace(faithful, steps=(replace(run.steps[0], step_time_s=1.16 * planned.step_time_s),))
    assert not validate(plan, late).passed  # however long the sleeps really were
    assert not validate(plan, replace(faithful, bubble=planned.bubble + 0.021)).passed
    assert "peak_memory_bytes" not in {row.quantity for row in validate(plan, faithful).rows}


def test_one_rank_out_of_step_fails_its_own_row(plan: Plan, run: Measurement) -> None:
    """Even where the others make up for it in the bubble of the run."""
    for name, spoilt in {"early": -0.11, "late": 0.11}.items():
        validation = validate(plan, _first_rank(run, bubble=run.ranks[0].bubble + spoilt))
        assert [row.rank for row in validation.rows if row.passed is False] == [0], name
    near = validate(plan, _first_rank(run, bubble=run.ranks[0].bubble + 0.09))
    assert near.passed


def test_a_run_of_another_plan_is_refused(plan: Plan, run: Measurement) -> None:
    other = replace(plan, schedule="gpipe")
    with pytest.raises(InputError, match=f"the run is of plan {plan_hash(plan)}, this plan is {plan_hash(other)}"):
        validate(other, run)


def test_runs_survive_the_file(run: Measurement, tmp_path: Path) -> None:
    run = replace(run, asked_s=tuple(item.start_s / 2 for item in run.timeline))
    save_run(run, tmp_path / "run.json")
    assert load_run(tmp_path / "run.json") == run
    assert run_document(run)["schema_version"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a run"),
        ("{}", "not a run"),
        ("[1]", "not a run"),
    ],
)
def test_files_that_are_no_runs_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match=message):
        load_run(tmp_path / "run.json")
    with pytest.raises(InputError, match="cannot read the run"):
        load_run(tmp_path / "missing.json")


CUT: dict[str, tuple[Callable[[Measurement], Measurement], str]] = {
    "a rank": (lambda run: replace(run, ranks=run.ranks[:-1]), "the run has 3 ranks, the plan 4"),
    "the end": (
        lambda run: replace(run, timeline=run.timeline[:-1]),
        r"timeline has \d+ actions, the plan \d+; the first that differs is STEP of rank 3",
    ),
    "one of two equal actions": (
        lambda run: replace(run, timeline=(run.timeline[0], *run.timeline)),
        r"timeline has \d+ actions, the plan \d+; the first that differs is ",
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_a_run_that_lacks_something_is_refused(name: str, plan: Plan, run: Measurement) -> None:
    cut, message = CUT[name]
    with pytest.raises(InputError, match=message):
        validate(plan, cut(run))


def _first_action(run: Measurement, **changes: Any) -> Measurement:
    return replace(run, timeline=(replace(run.timeline[0], **changes), *run.timeline[1:]))


EDITED: dict[str, tuple[Callable[[Measurement], Measurement], str]] = {
    "bubble": (lambda run: replace(run, bubble=0.5), r"bubble 0.5, its timeline says 0\."),
    "step time": (SPOILT["step_time_s"], "step time .*, its timeline says"),
    "pipeline time": (lambda run: replace(run, pipeline_s=2.0), "pipeline time 2, its timeline says"),
    "busy time": (lambda run: _first_rank(run, busy_s=2.0), "busy time of rank 0 2, its timeline says"),
    "bubble of a rank": (lambda run: _first_rank(run, bubble=0.99), "bubble of rank 0 0.99, its timeline says"),
    "negative bytes": (lambda run: _first_rank(run, reduce_bytes=-1), "a number of rank 0 is negative or none"),
    "order of ranks": (lambda run: replace(run, ranks=run.ranks[::-1]), r"its ranks are \[3, 2, 1, 0\], not 0, 1, 2"),
    "recorded step": (lambda run: replace(run, recorded_step=5), "step 5 is recorded, of 1 steps"),
    "loss": (
        lambda run: replace(run, steps=(replace(run.steps[0], losses={"llm": float("nan")}),)),
        "time or loss of step 0 is no number",
    ),
    "unknown rank": (lambda run: _first_action(run, rank=9), "rank 9 acts in its timeline, of 4 ranks"),
    "time running backwards": (lambda run: _first_action(run, end_s=-1.0), "0F0 of rank 0 lasts from .* s to -1.0 s"),
    "no timeline": (lambda run: replace(run, timeline=()), "its timeline has no computes"),
    "time scale": (lambda run: replace(run, time_scale=0.0), "time scale 0.0 .* must be positive"),
}


@pytest.mark.parametrize("name", EDITED)
def test_an_edited_run_is_refused_with_what_contradicts_it(name: str, run: Measurement) -> None:
    require_consistent(run, Path("run.json"))
    edit, message = EDITED[name]
    with pytest.raises(InputError, match=f"run.json: the run contradicts itself: {message}"):
        require_consistent(edit(run), Path("run.json"))


def test_what_a_recomputed_block_needs_at_work_is_expected_of_a_gpu_only(plan: Plan, run: Measurement) -> None:
    """On the CPU the bytes that autograd keeps are counted, not what the allocator gave."""
    again = replace(plan, stages=tuple(replace(stage, recompute="full") for stage in plan.stages))
    rows = {
        device: validate(again, replace(run, plan_hash=plan_hash(again), device=device)).rows
        for device in ("cpu", "some GPU")
    }
    on_cpu, on_gpu = (
        [row.planned for row in rows[device] if row.quantity == "peak_memory_bytes"] for device in ("cpu", "some GPU")
    )
    first, last = working_bytes(again, build_graph(plan.scenario))
    assert min(first, last) > 0
    assert [gpu - cpu for gpu, cpu in zip(on_gpu, on_cpu, strict=True)] == [first, first, last, last]
