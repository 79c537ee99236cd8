"""A model that nothing describes: recorded as a scenario, planned, checked, and run by that plan."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from mmplan.commands.import_kinds import read_files
from mmplan.errors import InputError
from mmplan.planner.check import check_plan
from mmplan.planner.plan import load_plan, save_plan
from mmplan.planner.search import optimize
from mmplan.report.formats import fragment_text
from mmplan.runtime.ghost.job import load_job
from mmplan.runtime.ghost.recording import loss_of
from mmplan.runtime.ghost.weightless import build_weightless, initial_value
from mmplan.runtime.launch import execute
from mmplan.runtime.requirements import why_not_executed
from mmplan.runtime.validate import validate
from mmplan.scenario.load import load_scenario

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("at_hand")]
JOB = Path(__file__).parent / "own_model_job.py"


def whole_loss(count: int, samples: int, seed: int) -> float:
    """Of the first step in one process."""
    job = load_job(JOB)
    model, bare = job.model(), build_weightless(job.model, seed)
    for name, parameter in model.named_parameters():
        parameter.data = initial_value(name, bare.get_parameter(name), seed, torch.float32)
    with torch.no_grad():
        losses = [float(loss_of(model(**batch))) for batch in islice(job.batches(samples), count)]
    return sum(losses) / count


def test_a_model_of_ones_own_is_imported_planned_and_run(tmp_path: Path) -> None:
    text = fragment_text(read_files(["job", str(JOB)]))
    assert "# read: tp 2: ranks share 3 of 10 layers; each has the others whole" in text
    file = tmp_path / "own.yaml"
    file.write_text(f"{text}constraints: {{tp: 2, pp: 2}}\n")
    result = optimize(load_scenario(file))
    assert result.plan.certificate.status == "optimal" and result.plan.rank_count == 4
    save_plan(result.plan, tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    assert check_plan(plan) == check_plan(result.plan)
    assert why_not_executed(plan) is None
    with pytest.raises(InputError, match=r"'own_model_job' was recorded from a job.*run it with `--job`"):
        execute(plan, local=4, steps=1)
    run = execute(plan, local=4, steps=2, job=JOB, timeout_s=60.0)
    assert run is not None
    rows = [row for row in validate(plan, run).rows if row.quantity == "tensor_bytes"]
    assert all(row.planned == row.measured for row in rows) and any(row.planned for row in rows)
    expected = whole_loss(plan.microbatches, plan.microbatch_size, plan.scenario.seed)
    assert run.steps[0].losses["says"] == pytest.approx(expected, rel=1e-5)


def test_a_job_is_imported_where_it_is_named_as_one_and_never_guessed() -> None:
    with pytest.raises(InputError, match="`mmplan import job FILE` runs a job of your own and records its model"):
        read_files([str(JOB)])
    with pytest.raises(InputError, match="a scenario has one model: expected one job, found 2 files"):
        read_files(["job", str(JOB), str(JOB)])
