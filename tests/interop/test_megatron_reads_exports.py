"""Megatron-Core's own chain of parsers reads what is exported for it: the degrees, ranks and layers are the plan's."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from random_plans import random_plan
from scripts_of_launchers import words_of

from mmplan.errors import CheckError
from mmplan.planner.formats.language_chain import language_stages, the_language_model
from mmplan.planner.formats.megatron import as_megatron_runs, export_megatron
from mmplan.planner.plan import Plan

pytestmark = pytest.mark.interop
CHAIN = Path(__file__).parent / "megatron_chain.py"


def chain(asked: list[dict[str, object]]) -> list[dict[str, Any]]:
    lines = "".join(json.dumps(one) + "\n" for one in asked)
    run = subprocess.run([sys.executable, str(CHAIN)], input=lines, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@cache
def exportable(count: int) -> tuple[tuple[int, Plan, str], ...]:
    """Random plans that Megatron can run, with the script."""
    found = []
    for seed in range(count):
        plan = random_plan(seed)
        with suppress(CheckError):
            found.append((seed, plan, export_megatron(plan).files["megatron.sh"]))
    return tuple(found)


def asked_of(plan: Plan, script: str, folder: Path) -> dict[str, object]:
    words, connections = words_of(script, folder)
    return {"argv": words, "world": plan.rank_count, "connections": None if connections == "unset" else connections}


def test_megatron_builds_the_layers_and_groups_of_random_plans(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    cases = exportable(request.config.getoption("--round-trips"))
    assert len(cases) >= 10
    told = chain([asked_of(plan, script, tmp_path) for _, plan, script in cases])
    for (seed, plan, _), answer in zip(cases, told, strict=True):
        assert "refused" not in answer, (seed, answer)
        module = the_language_model(plan, "Megatron-LM")
        run = as_megatron_runs(plan, module).plan
        wanted = [[list(stage.blocks) for stage in language_stages_of(run, row)] for row in range(run.pp)]
        assert answer["blocks"] == wanted, seed
        assert_groups(run, answer["groups"])
        assert_numbers(run, answer["args"])


def language_stages_of(plan: Plan, row: int) -> list[Any]:
    stages = language_stages(plan, the_language_model(plan, "Megatron-LM"))
    return [stages[stage] for stage in plan.stages_of(row)]


def assert_groups(plan: Plan, groups: dict[str, list[list[int]]]) -> None:
    """The ranks of Megatron's groups are those of the plan's stages, replicas and shards."""
    places = [
        (row, replica, shard) for row in range(plan.pp) for replica in range(plan.dp) for shard in range(plan.width)
    ]
    rank = dict(zip(places, range(plan.rank_count), strict=True))  # the plan's own order, see plan.py
    tp = [[rank[row, d, c * plan.tp + t] for t in range(plan.tp)] for row, d, c in axes(plan.pp, plan.dp, plan.cp)]
    cp = [[rank[row, d, c * plan.tp + t] for c in range(plan.cp)] for row, d, t in axes(plan.pp, plan.dp, plan.tp)]
    dp = [[rank[row, d, shard] for d in range(plan.dp)] for row, shard, _ in axes(plan.pp, plan.width, 1)]
    pp = [[rank[row, d, shard] for row in range(plan.pp)] for d, shard, _ in axes(plan.dp, plan.width, 1)]
    for token, wanted in {"tp": tp, "cp": cp, "dp": dp, "pp": pp}.items():
        assert sorted(groups[token]) == sorted(wanted), token
    if plan.ep > 1:  # neighbouring ranks of a stage, those of one expert first
        side = plan.ep * plan.etp
        firsts = range(0, plan.rank_count, side)
        ep = [[first + e * plan.etp + t for e in range(plan.ep)] for first in firsts for t in range(plan.etp)]
        assert sorted(groups["expert ep"]) == sorted(ep)


def axes(*counts: int) -> Iterator[tuple[int, ...]]:
    first, second, third = counts
    return ((a, b, c) for a in range(first) for b in range(second) for c in range(third))


def assert_numbers(plan: Plan, args: dict[str, Any]) -> None:
    assert args["micro_batch_size"] * plan.microbatches * args["data_parallel_size"] == args["global_batch_size"]
    assert args["data_parallel_size"] == plan.dp
    assert args["use_distributed_optimizer"] == (plan.sharding != "none")
    if plan.tp > 1:
        assert args["sequence_parallel"] == plan.scenario.technique.sequence_parallel
    if plan.placement:
        assert args["virtual_pipeline_model_parallel_size"] == len(plan.stages) // plan.pp


@pytest.mark.parametrize(
    ("was", "put", "layer"),
    [
        ("--num-layers", "{}1", "TransformerConfig"),  # a layout of fewer layers
        ("--hidden-size", "x", "parse_args"),
        ("--tensor-model-parallel-size", "7", "validate_args"),
        ("--global-batch-size", "1", None),
    ],
)
def test_a_wrong_export_is_refused_by_a_layer(
    was: str, put: str, layer: str | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cases = exportable(request.config.getoption("--round-trips"))
    plan, script = next((p, s) for _, p, s in cases if p.pp > 1 and p.dp > 1 and p.tp > 1)
    asked = asked_of(plan, script, tmp_path)
    words: list[str] = asked["argv"]  # type: ignore[assignment]
    place = words.index(was) + 1
    words[place] = put.format(words[place])
    (answer,) = chain([asked])
    assert "refused" in answer and layer in (None, answer["refused"]), answer
