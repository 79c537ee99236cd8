"""The migration matrix and the exporters agree: 100 % ready is written as it is, what is refused is not ready."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from random_plans import random_plan
from rich.console import Console
from shaped_plans import flat_plan

from mmplan.commands.export_targets import TARGETS, matrix_of
from mmplan.errors import CheckError
from mmplan.planner.formats.exported import Exported
from mmplan.planner.formats.matrix import FOUND, migration_matrix
from mmplan.planner.formats.support import cell, targets
from mmplan.planner.plan import Plan, scenario_hash
from mmplan.report.matrix import matrix_document, matrix_parts

OURS = ("accelerate", "jax", "cornstarch", "mmplan")  # what they can is in the table alone


@pytest.mark.parametrize("seed", range(6))
def test_a_ready_framework_is_written_as_it_is_and_a_refused_plan_is_not_ready(seed: int) -> None:
    for column in matrix_of(random_plan(seed)).columns:
        if column.verdict is None:
            continue
        refused, losses = column.verdict.refused != "", column.verdict.losses
        assert (column.readiness == 1) <= (not refused and not losses), column.target.name
        assert (refused or losses != ()) <= (column.readiness < 1), column.target.name
        if column.target.id in OURS:
            assert refused == any(one is not None and one.status == "impossible" for one in column.cells)
            assert (column.readiness < 1) == (refused or losses != ())
        assert (column.readiness == 1) == (column.decides == "")


def test_what_the_runtime_does_is_what_the_table_says_of_it() -> None:
    """Experts, rows over ranks in every way and modules on ranks of their own are executed; other attention is not."""
    names = ("expert parallelism", "tensor parallel experts", "modules on meshes of their own", "spread modules")
    cp = ("context parallelism by ring", "context parallelism in a pipeline", "context beside tensor parallelism")
    assert {cell("mmplan", name).status for name in (*names, *cp, "padded heads")} == {"native"}
    plan = flat_plan(0, cp=2, tp=1)
    for changes, refused in (
        ({"context_parallel": "ring"}, False),
        ({"context_parallel": "all-to-all"}, False),
        ({"context_parallel": "gather"}, False),
        ({"attention": "math"}, True),
    ):
        technique = replace(plan.scenario.technique, **changes)  # type: ignore[arg-type]
        scenario = replace(plan.scenario, technique=technique)
        matrix = matrix_of(replace(plan, scenario=scenario, scenario_hash=scenario_hash(scenario)))
        (column,) = [column for column in matrix.columns if column.target.id == "mmplan"]
        assert column.verdict is not None and ("technique.attention" in column.verdict.refused) == refused
        assert any(one is not None and one.status == "impossible" for one in column.cells) == refused


def test_every_exporter_of_a_framework_is_asked() -> None:
    asked = {column.target.export for column in matrix_of(random_plan(0)).columns if column.verdict is not None}
    assert asked == {target.export for target in targets()} & set(TARGETS)


def refusing(plan: Plan) -> Exported:
    raise CheckError("not today")


def writing(plan: Plan) -> Exported:
    return Exported(target="x", version="1", files={"x": ""})


def test_what_only_an_exporter_finds_is_a_row_of_its_own() -> None:
    plan = random_plan(0)
    quiet = {target.export: writing for target in targets()}
    assert FOUND not in [need.name for need in migration_matrix(plan, quiet).needs]
    matrix = migration_matrix(plan, {**quiet, "torch-pipelining": refusing})
    first, *others = matrix.columns
    assert matrix.needs[-1].name == FOUND
    assert first.cells[-1] is not None
    assert (first.cells[-1].status, first.decides) == ("impossible", "not today")
    assert first.readiness < 1
    assert all(column.cells[-1] is None for column in others)


def test_readiness_counts_plug_ins_half() -> None:
    matrix = migration_matrix(random_plan(3), {})
    for column in matrix.columns:
        worth = {"native": 1.0, "plug-in": 0.5, "impossible": 0.0}
        shares = [worth[one.status] for one in column.cells if one is not None]
        assert column.readiness == pytest.approx(sum(shares) / len(matrix.needs))
        assert column.verdict is None


def test_the_tables_and_the_document_name_all_frameworks() -> None:
    matrix = matrix_of(random_plan(2))
    console = Console(width=120, record=True, file=StringIO())
    for part in matrix_parts(matrix):
        console.print(part)
    text = console.export_text()
    document = json.loads(json.dumps(matrix_document(matrix)))
    assert document["schema"] == "mmplan.matrix/1"
    assert [entry["target"] for entry in document["targets"]] == [target.name for target in targets()]
    for target in targets():
        assert target.name in text
    for need in document["needs"]:
        assert need["name"].split()[0] in text
    assert all(len(entry["cells"]) == len(document["needs"]) for entry in document["targets"])


def test_an_unsound_plan_has_no_matrix() -> None:
    with pytest.raises(CheckError, match="not sound"):
        matrix_of(replace(random_plan(0), microbatches=999))
