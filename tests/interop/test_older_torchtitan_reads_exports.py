"""torchtitan 0.2's own TOML parser, meshes and split read what is exported for releases before 0.3."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from random_plans import random_plan

from mmplan.errors import CheckError
from mmplan.planner.formats.torchtitan_job import TitanJob, part_names, titan_job
from mmplan.planner.formats.torchtitan_toml import TARGET, export_torchtitan_toml
from mmplan.planner.plan import Plan

pytestmark = pytest.mark.interop
ROOT = Path(__file__).parents[2]
OLDER = Path(sys.prefix) / "older"  # where `make interop` puts it
TRAINED = ("kimi-k2.5-1t", "pixtral-12b", "qwen2.5-vl-7b-sft", "qwen3-vl-30b-a3b", "internvl2.5-26b")


def asked(texts: Sequence[str], sizes: Sequence[tuple[int, int]], folder: Path) -> list[dict[str, Any]]:
    """What 0.2 makes of each file, for (ranks, layers)."""
    lines = []
    for index, (text, (world, layers)) in enumerate(zip(texts, sizes, strict=True)):
        file = folder / f"plan{index}.toml"
        file.write_text(text)
        lines.append(json.dumps({"file": str(file), "world": world, "layers": layers}))
    script = ROOT / "tests" / "interop" / "older_torchtitan.py"
    done = subprocess.run(
        [sys.executable, str(script), str(OLDER)], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == len(texts), done.stderr[-2000:]
    return answers


def exportable(count: int) -> list[tuple[Plan, TitanJob, str]]:
    found = []
    for seed in range(count):
        plan = random_plan(seed, TRAINED)
        try:
            text = export_torchtitan_toml(plan).files["plan.toml"]
        except CheckError:
            continue
        found.append((plan, titan_job(plan, TARGET, before_0_3=True), text))
    return found


def size_of(job: TitanJob) -> tuple[int, int]:
    assert job.module.transformer is not None
    return job.plan.rank_count, job.module.transformer.layers


def test_the_older_parser_holds_every_value_of_the_file_and_groups_the_plans_ranks(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    cases = exportable(request.config.getoption("--round-trips"))
    assert len(cases) >= 5
    answers = asked([text for _, _, text in cases], [size_of(job) for _, job, _ in cases], tmp_path)
    for (_, job, text), answer in zip(cases, answers, strict=True):
        assert "refused" not in answer, answer["refused"]
        for table, values in tomllib.loads(text).items():
            assert {key: answer["config"][table][key] for key in values} == values
        plan = job.plan
        first = plan.rank_count - plan.tp
        wanted = {"tp": list(range(first, plan.rank_count))} if plan.tp > 1 else {}
        if plan.pp > 1:
            each = plan.rank_count // plan.pp
            wanted["pp"] = [(row + 1) * each - 1 for row in range(plan.pp)]
        assert {name: ranks for name, ranks in answer["groups"].items() if name != "cp"} == wanted
        if answer["parts"] is not None:
            by_stage = {int(stage): names for row in answer["parts"] for stage, names in row.items()}
            assert [sorted(by_stage[i]) for i in range(len(by_stage))] == [sorted(p) for p in part_names(job, "output")]
            assert [sorted(map(int, row)) for row in answer["parts"]] == [
                sorted(plan.stages_of(row)) for row in range(plan.pp)
            ]


def test_a_key_that_the_older_parser_does_not_know_and_degrees_that_miss_the_world_are_refused(tmp_path: Path) -> None:
    _, job, text = exportable(40)[0]
    wrong = text.replace("tensor_parallel_degree", "tensor_degree")
    doubled = text.replace(f"\ntensor_parallel_degree = {job.plan.tp}", f"\ntensor_parallel_degree = {2 * job.plan.tp}")
    answers = asked([wrong, doubled], [size_of(job)] * 2, tmp_path)
    assert "Invalid field names" in answers[0]["refused"]
    assert "WORLD_SIZE" in answers[1]["refused"]
