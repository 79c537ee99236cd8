"""`execute --job`: a model and data of the user's own under different plans of real processes."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from ghost_models import llava, saved_config
from llava_job import batches
from meshed_plan_cases import own
from tiny_plans import hand_plan, tiny_scenario

from mmplan.errors import InputError, RunError
from mmplan.planner.plan import Plan
from mmplan.runtime.launch import execute
from mmplan.runtime.validate import validate
from mmplan.scenario.formats.hf_config import read_hf_config
from mmplan.scenario.scenario import Optimizer, Scenario, Training

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("at_hand")]
JOB = Path(__file__).parent / "llava_job.py"
TOWER = ("vision.embed", "vision.0-1", "projector.0")  # the model reads the states before the last block
LLM = ("llm.embed", "llm.0-2", "llm.head", "llm.loss")
STAGES = {
    1: [(*TOWER, *LLM)],
    2: [(*TOWER, "llm.embed", "llm.0"), ("llm.1-2", "llm.head", "llm.loss")],
    4: [("vision.embed", "vision.0"), ("vision.1", "projector.0"), ("llm.embed",), LLM[1:]],
}


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    """The scenario that a user writes for the config of the model."""
    config = saved_config(llava()[0](), tmp_path_factory.mktemp("llava"))
    sgd = Optimizer(name="sgd", learning_rate=0.5)
    return replace(tiny_scenario(), model=read_hf_config(config), global_batch=8, optimizer=sgd)


def losses(plan: Plan, steps: int = 4, weights: Path | None = None) -> list[float]:
    """Of a run that moved in every step what its recordings foresaw."""
    run = execute(plan, local=plan.rank_count, steps=steps, job=JOB, timeout_s=60.0, weights=weights)
    assert run is not None
    moved = [row for row in validate(plan, run).rows if row.quantity.startswith("steps_")]
    assert bool(moved) == (plan.rank_count > 1) and all(row.passed for row in moved)
    return [step.losses["llm"] for step in run.steps]


def with_training(scenario: Scenario, module: str, mode: str) -> Scenario:
    modules = tuple(
        replace(part, training=Training(mode=mode)) if part.name == module else part for part in scenario.model.modules
    )
    return replace(scenario, model=replace(scenario.model, modules=modules))


def test_loss_curves_are_equal_under_different_plans(scenario: Scenario) -> None:
    alone = losses(hand_plan(scenario, STAGES[1]))
    assert alone[-1] < alone[0]
    both = replace(hand_plan(scenario, STAGES[2], dp=2), sharding="parameters")
    assert losses(both) == pytest.approx(alone, rel=1e-5)  # images and lengths differ between the replicas
    sharing = replace(hand_plan(scenario, STAGES[1], dp=2), sharding="optimizer")
    assert losses(sharing) == pytest.approx(alone, rel=1e-5)
    apart = hand_plan(scenario, [*STAGES[4][:2], LLM], dp=2)
    again = replace(apart, meshes=(own("vision", "projector", first=2),))
    again = replace(again, stages=tuple(replace(stage, recompute="full") for stage in again.stages))
    assert losses(again) == pytest.approx(alone, rel=1e-5)


def test_a_frozen_tower_and_split_backwards_change_no_loss(scenario: Scenario) -> None:
    frozen = with_training(scenario, "vision", "frozen")
    alone = losses(hand_plan(frozen, STAGES[1]))
    plan = hand_plan(frozen, STAGES[2])
    orders = (
        "0F0 0F1 0I0 0F2 0I1 0F3 0I2 0F4 0I3 0F5 0I4 0F6 0I5 0F7 0I6 0I7 0W0 0W1 0W2 0W3 0W4 0W5 0W6 0W7",
        "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2 1F3 1I3 1W3 1F4 1I4 1W4 1F5 1I5 1W5 1F6 1I6 1W6 1F7 1I7 1W7",
    )
    assert losses(replace(plan, orders=orders, schedule="zb-h1")) == pytest.approx(alone, rel=1e-5)
    # the last unit of the first stage is a linear layer itself
    plan = hand_plan(frozen, [(*TOWER, "llm.embed"), ("llm.0-2", "llm.head", "llm.loss")])
    assert losses(replace(plan, orders=orders, schedule="zb-h1")) == pytest.approx(alone, rel=1e-5)


def test_rows_of_a_manifest_train_alike_under_different_plans(scenario: Scenario, tmp_path: Path) -> None:
    for index in range(5):
        (tmp_path / f"{index}.png").write_bytes(bytes([index]))
    rows = [{"image": f"{index}.png", "text": "abc" * (index + 2)} for index in range(5)]
    data = tmp_path / "captions.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))

    def curve(plan: Plan) -> list[float]:
        run = execute(
            plan, local=plan.rank_count, steps=3, job=JOB.with_name("captions_job.py"), data=data, timeout_s=60.0
        )
        assert run is not None
        return [step.losses["llm"] for step in run.steps]

    alone = curve(hand_plan(scenario, STAGES[1]))
    assert curve(hand_plan(scenario, STAGES[2], dp=2)) == pytest.approx(alone, rel=1e-5)
    with pytest.raises(InputError, match=r"there is no file 'x\.png'"):
        data.write_text('{"image": "x.png", "text": "a"}')
        curve(hand_plan(scenario, STAGES[1]))
    with pytest.raises(InputError, match="name the job too"):
        execute(hand_plan(scenario, STAGES[1]), local=1, steps=1, data=data)


def test_a_run_begins_with_the_weights_that_were_saved(scenario: Scenario, tmp_path: Path) -> None:
    torch.manual_seed(5)
    real = llava()[0]()
    real.save_pretrained(tmp_path)
    first = [next(islice(batches(1), index, None)) for index in range(8)]
    counts = [float((batch["labels"][:, 1:] != -100).sum()) for batch in first]
    with torch.no_grad():
        expected = sum(float(real(**b).loss) * n for b, n in zip(first, counts, strict=True)) / sum(counts)
    assert losses(hand_plan(scenario, STAGES[2]), steps=1, weights=tmp_path) == pytest.approx([expected], rel=1e-5)


def test_a_job_or_weights_that_are_not_there_are_refused_before_any_process_starts(
    tmp_path: Path, scenario: Scenario
) -> None:
    plan = hand_plan(scenario, STAGES[1])
    with pytest.raises(InputError, match=r"nope\.py: no such file"):
        execute(plan, local=1, steps=1, job=tmp_path / "nope.py")
    with pytest.raises(InputError, match=r"nope: expected a folder of safetensors files"):
        execute(plan, local=1, steps=1, job=JOB, weights=tmp_path / "nope")
    with pytest.raises(InputError, match="name the job too"):
        execute(plan, local=1, steps=1, weights=tmp_path)


def test_a_job_without_a_model_is_refused(tmp_path: Path, scenario: Scenario) -> None:
    job = tmp_path / "job.py"
    job.write_text("def batches(size):\n    return []\n")
    with pytest.raises(RunError, match=r"job\.py: model: expected a function `model`"):
        execute(hand_plan(scenario, STAGES[1]), local=1, steps=1, job=job)


def test_a_job_with_another_model_than_the_plan_is_refused(tmp_path: Path, scenario: Scenario) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import torch\n"
        "def model():\n    return torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0))\n"
        "def batches(size):\n    yield {'input': torch.ones(1, 4)}\n"
    )
    with pytest.raises(RunError, match="do not make up the layers of the plan"):
        execute(hand_plan(scenario, STAGES[1]), local=1, steps=1, job=job)


def test_batches_that_are_no_dicts_are_refused(tmp_path: Path, scenario: Scenario) -> None:
    job = tmp_path / "job.py"
    job.write_text("model = list\ndef batches(size):\n    yield [1]\n")
    with pytest.raises(RunError, match=r"job\.py: batches: expected dicts of the forward's arguments, found list"):
        execute(hand_plan(scenario, STAGES[1]), local=1, steps=1, job=job)


def test_an_error_of_the_job_names_its_line(tmp_path: Path, scenario: Scenario) -> None:
    job = tmp_path / "job.py"
    job.write_text("model = list\ndef batches(size):\n    yield {}['absent']\n")
    with pytest.raises(RunError, match=r"KeyError: 'absent' \(job\.py, line 3, in batches: "):
        execute(hand_plan(scenario, STAGES[1]), local=1, steps=1, job=job)
