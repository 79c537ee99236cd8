"""What the doctor is given: checkpoints of every kind, run.json, traces, and what is none of these."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from health_toys import PLANTS, run_toy, toy
from made_runs import changed, priced, run_that_took
from safetensors.torch import save_file
from tiny_plans import FOUR_STAGES, TWO_STAGES, hand_plan, tiny_scenario
from typer.testing import CliRunner

import mmplan
from mmplan.cli import app
from mmplan.errors import InputError
from mmplan.report.health_trace import add_to_trace
from mmplan.runtime.checkpoint.options import Checkpoints
from mmplan.runtime.health.diagnosis import diagnose
from mmplan.runtime.health.doctor import examine
from mmplan.runtime.health.readings import load_readings
from mmplan.runtime.health.rules import RULES
from mmplan.runtime.health.run_readings import run_readings
from mmplan.runtime.health.weights import named_weights
from mmplan.runtime.inject import parse_injection
from mmplan.runtime.launch import execute
from mmplan.runtime.measurement import StepMeasurement, plan_hash, save_run

JOB = """
import torch
from health_toys import Toy, batch, WATCH

def model():
    return Toy()

def batches(size):
    draw = torch.Generator().manual_seed(0)
    while True:
        yield batch(draw, size)

health = WATCH

def encode_images(model, paths):
    rows = [torch.tensor([float(path.stem) + i for i in range(96)]).sin() for path in paths]
    return model.image_embedding(model.vision(torch.stack(rows).view(-1, 8, 12)).mean(1))

def encode_texts(model, captions):
    return torch.stack([torch.tensor([float(text) + i for i in range(32)]).cos() for text in captions])
"""


def checkpoint(folder: Path, kind: str, state: dict[str, torch.Tensor]) -> Path:
    file = folder / f"model.{kind}"
    if kind == "safetensors":
        state = {name: value.contiguous() for name, value in state.items() if name != "text_embedding.weight"}  # tied
        save_file(state, file)
    elif kind == "pt":
        torch.save({"model": {f"module.{name}": value for name, value in state.items()}, "step": 3}, file)
    else:
        torch.save(state, file)
    return file


def job(folder: Path, text: str = JOB) -> Path:
    (folder / "job.py").write_text(text)
    return folder / "job.py"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)])
    if isinstance(result.exception, InputError):
        return 2, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.stdout.split())


@pytest.mark.parametrize("kind", ["safetensors", "pt", "bin"])
def test_a_healthy_checkpoint_is_healthy_under_all_monitors(kind: str, tmp_path: Path) -> None:
    file = checkpoint(tmp_path, kind, toy().state_dict())
    code, told = run(file, "--job", job(tmp_path), "--batch-size", 32)
    assert code == 0, told
    assert "attention_collapse" in told and "robustness" in told


@pytest.mark.parametrize(
    "name", ["an fp16 block of the image tower overflows", "cross-attention looks at everything alike"]
)
def test_a_broken_checkpoint_is_told_with_its_cause_first(name: str, tmp_path: Path) -> None:
    model = toy()
    PLANTS[name].break_(model)
    file = checkpoint(tmp_path, "safetensors", model.state_dict())
    findings = diagnose(examine(file, job=job(tmp_path), batch_size=32).readings, RULES)
    assert (findings[0].monitor, findings[0].of) == (PLANTS[name].monitor, PLANTS[name].of)


def test_weights_that_are_no_numbers_are_found_without_a_job(tmp_path: Path) -> None:
    state = toy().state_dict()
    state["vision.block.weight"] = state["vision.block.weight"] * torch.nan
    code, told = run(checkpoint(tmp_path, "safetensors", state))
    assert code == 1 and "1. overflow at vision.block.weight" in told and "NaN in float32" in told
    code, told = run(tmp_path)  # the folder
    assert code == 1 and "vision.block.weight" in told


@pytest.mark.distributed
@pytest.mark.usefixtures("at_hand_once")
def test_a_run_of_mmplan_tells_where_a_number_was_none_and_its_checkpoint_is_read(tmp_path: Path) -> None:
    plan, file = hand_plan(replace(tiny_scenario(), global_batch=2), TWO_STAGES), tmp_path / "health.jsonl"
    trace = tmp_path / "trace.json"
    execute(
        plan,
        local=2,
        steps=3,
        checkpoints=Checkpoints(folder=tmp_path / "saved"),
        health=file,
        trace=trace,
        on_nan="skip",
        inject=[parse_injection("nan rank=1 step=1 action=F1")],
    )
    findings = diagnose(load_readings(file), RULES)
    assert [(f.monitor, f.began, f.follows) for f in findings] == [("overflow", 1, ""), ("loss", 1, "overflow")]
    assert (findings[0].detail["rank"], findings[0].detail["because"]) == (1.0, "backward")
    assert findings[0].detail["modality"] == "text"
    assert run(file, "--trace", trace)[0] == 1
    events = json.loads(trace.read_text())["traceEvents"]
    steps = [e for e in events if e["name"].startswith("step ") and e["pid"] == 0]
    mark = next(e for e in events if e["name"].startswith("overflow"))
    assert steps[1]["ts"] < mark["ts"] < steps[2]["ts"] + steps[2]["dur"]
    weights = dict(named_weights(tmp_path / "saved"))
    assert len(weights) > 10 and all(value.isfinite().all() for value in weights.values())
    assert run(tmp_path / "saved")[0] == 0


def manifest(folder: Path, count: int = 30) -> Path:
    for index in range(count):
        (folder / f"{index}.jpg").write_bytes(b"")
    lines = [json.dumps({"image": f"{index}.jpg", "caption": str(index)}) for index in range(count)]
    (folder / "captions.jsonl").write_text("\n".join(lines))
    return folder / "captions.jsonl"


def test_retrieval_of_two_checkpoints_is_compared(tmp_path: Path) -> None:
    file, data = checkpoint(tmp_path, "safetensors", toy().state_dict()), manifest(tmp_path)
    code, told = run(file, "--job", job(tmp_path), "--data", data, "--against", file, "--json", tmp_path / "d.json")
    assert code == 0 and "alignment error" in told
    document = json.loads((tmp_path / "d.json").read_text())
    assert document["difference"]["changes"]["alignment error"]["value"] == 0.0
    assert document["alignment"]["images"] == 30 and not document["difference"]["worse"]


def test_a_run_json_tells_skipped_updates_and_a_rising_loss(tmp_path: Path) -> None:
    plan = hand_plan(replace(tiny_scenario(), global_batch=8), FOUR_STAGES)
    healthy = run_that_took(plan, *priced(plan))
    losses = [5.0, 4.0, 3.5, 3.0, 2.9, 2.8, *[2.7] * 20, *[9.0] * 20]
    steps = tuple(StepMeasurement(index=i, step_time_s=1.0, losses={"llm": v}) for i, v in enumerate(losses))
    save_run(replace(healthy, steps=steps), tmp_path / "run.json")
    code, told = run(tmp_path / "run.json")
    assert code == 1 and "loss at loss" in told
    skipped = (*steps[:6], StepMeasurement(index=6, step_time_s=1.0, losses={}, skipped=True))
    save_run(replace(healthy, steps=skipped), tmp_path / "run.json")
    code, told = run(tmp_path / "run.json")
    assert code == 1 and "the update was left out" in told
    save_run(replace(healthy, steps=steps[:6]), tmp_path / "run.json")
    assert run(tmp_path / "run.json")[0] == 0


def test_a_recorded_step_tells_consumers_that_ran_ahead_of_their_features_and_jitter() -> None:
    plan = hand_plan(replace(tiny_scenario(), global_batch=8), FOUR_STAGES)
    program, durations = priced(plan)
    healthy = run_that_took(plan, program, durations)
    assert not any(r.fired for r in run_readings(healthy, plan))
    assert {r.monitor for r in run_readings(healthy, plan)} == {"stale_features", "feature_jitter"}
    consumer = len(plan.stages) - 1
    ahead = tuple(
        replace_start(item) if item.action.kind == "F" and item.action.stage == consumer and i else item
        for i, item in enumerate(healthy.timeline)
    )
    found = diagnose(run_readings(replace(healthy, timeline=ahead), plan), RULES)
    assert found[0].monitor == "stale_features" and found[0].of.endswith(f"> stage {consumer}")
    late = changed(
        program, durations, lambda _, a, s: s + 0.2 * (a.microbatch % 2) if a.kind == "SEND" and ">" in a.tensor else s
    )
    even = {(t.source, t.target, t.bytes): t.seconds for t in healthy.transfers}
    jittery = run_that_took(plan, program, late)
    alone = tuple(replace(t, seconds=even[t.source, t.target, t.bytes]) for t in jittery.transfers)
    fired = [r for r in run_readings(replace(jittery, transfers=alone), plan) if r.fired]
    assert {r.monitor for r in fired} == {"feature_jitter"}


def replace_start(item: object) -> object:
    return item._replace(start_s=-1.0) if hasattr(item, "_replace") else replace(item, start_s=-1.0)  # type: ignore[type-var]


def test_another_plan_than_the_runs_is_refused(tmp_path: Path) -> None:
    plan = hand_plan(replace(tiny_scenario(), global_batch=8), FOUR_STAGES)
    run_of = run_that_took(plan, *priced(plan))
    other = hand_plan(replace(tiny_scenario(), global_batch=4), FOUR_STAGES)
    with pytest.raises(InputError, match=f"the run is of plan {plan_hash(plan)}, this plan is {plan_hash(other)}"):
        run_readings(run_of, other)


def test_marks_land_on_the_timeline_of_the_run_and_replace_older_ones(tmp_path: Path) -> None:
    file, trace = tmp_path / "health.jsonl", tmp_path / "trace.json"
    run_toy(file, PLANTS["an fp16 block of the image tower overflows"])
    readings = load_readings(file)
    began_s = readings[0].time_s - 2.0
    trace.write_text(json.dumps({"traceEvents": [{"name": "step 0", "ph": "X"}], "otherData": {"started_s": began_s}}))
    for _ in range(2):
        add_to_trace(readings, trace)
    events = json.loads(trace.read_text())["traceEvents"]
    marks = [event for event in events if event.get("ph") == "i"]
    assert len(marks) == sum(reading.fired for reading in readings) and events[0]["name"] == "step 0"
    first = next(mark for mark in marks if mark["name"] == "overflow: vision.block")
    place = next(r for r in readings if r.monitor == "overflow")
    assert first["ts"] == pytest.approx((place.time_s - began_s) * 1e6, abs=1)


def test_a_trace_that_does_not_say_when_it_began_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text('{"traceEvents": []}')
    with pytest.raises(InputError, match=r"otherData.started_s: the trace does not say when it began"):
        add_to_trace((), trace)
    trace.write_text("[]")
    with pytest.raises(InputError, match="expected a trace"):
        add_to_trace((), trace)


HEADER = '{"schema": "mmplan.health/1"}\n'


def reading(**changes: object) -> str:
    row = {"step": 1, "time_s": 0.0, "rank": 0, "monitor": "jed", "of": "x", "value": 1.0, "limit": 0.15}
    return json.dumps({**row, "beyond": False, "fired": False, "detail": {}, **changes})


def test_readings_of_other_ranks_are_read_too_and_a_line_that_was_cut_off_is_not(tmp_path: Path) -> None:
    (tmp_path / "health.jsonl").write_text(HEADER + reading() + "\n" + reading()[:30])
    (tmp_path / "health.rank1.jsonl").write_text(HEADER + reading(rank=1) + "\n")
    assert [r.rank for r in load_readings(tmp_path / "health.jsonl")] == [0, 1]


@pytest.mark.parametrize(
    ("name", "text", "options", "told"),
    [
        ("health.jsonl", HEADER + "{}\n" + reading() + "\n", (), "health.jsonl:2: step: not a reading"),
        ("health.jsonl", HEADER + reading(step="x") + "\n", (), "health.jsonl:2: step: not a reading"),
        ("run.json", "{}", (), "schema_version: not a run"),
        ("run.json", "", (), "not a run"),
        ("run.json", "\0\1", (), "not a run"),
        ("health.jsonl", HEADER, ("--job", "job.py"), "--job and --data are for checkpoints"),
        ("health.jsonl", HEADER, ("--plan", "plan.json"), "--plan is for a run.json"),
        ("model.pt", "no tensors", (), "cannot be read as weights alone"),
        ("model.safetensors", "x", (), "cannot be read as safetensors"),
        ("model.pt", "x", ("--data", "m.csv"), "--data needs the encoders of --job FILE"),
        ("model.pt", "x", ("--against", "other.pt"), "--against compares retrieval"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    name: str, text: str, options: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    code, message = run(tmp_path / name, *options)
    assert code == 2 and told in message and "\n" not in message


def test_a_pickle_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> object:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"weight": torch.ones(2), "evil": Evil()}, tmp_path / "model.pt", pickle_module=pickle)
    code, told = run(tmp_path / "model.pt")
    assert code == 2 and "cannot be read as weights alone" in told and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def model(): return 3\ndef batches(size): return []\n", "model: expected a module, found int"),
        ("def model(): 1 / 0\ndef batches(size): return []\n", "model: `model` failed: ZeroDivisionError"),
        (JOB.replace("health = WATCH", "health = 3"), "health: expected a dict"),
        (JOB.replace("health = WATCH", "health = {'cross_attention': ['crass']}"), "the model has no module 'crass'"),
        (JOB.replace("while True:", "for _ in range(1):"), "batches: `batches` gave fewer than 2 batches"),
        (JOB.replace("Toy()", "torch.nn.Linear(2, 2)"), "no tensor for the parameter 'weight'"),
    ],
)
def test_a_job_that_does_not_fit_is_told(text: str, told: str, tmp_path: Path) -> None:
    file = checkpoint(tmp_path, "safetensors", toy().state_dict())
    code, message = run(file, "--job", job(tmp_path, text))
    assert code == 2 and told in message


def test_the_package_says_which_names_it_has() -> None:
    from mmplan.runtime import health

    assert callable(health.attach) and set(health.__all__) == {"attach", "Groups", "Ledger"}
    with pytest.raises(AttributeError, match="no attribute 'attack'"):
        _ = health.attack
    assert mmplan.__version__
