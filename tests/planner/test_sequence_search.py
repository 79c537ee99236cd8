"""Sequence parallelism as an axis of the search: chosen where faster, with the proof of both ways."""

from dataclasses import replace
from pathlib import Path

import pytest

from mmplan.errors import InputError
from mmplan.planner.check import check_plan
from mmplan.planner.pins import parse_pins
from mmplan.planner.plan import Plan, scenario_hash
from mmplan.planner.repeated import Limits
from mmplan.planner.result import OptimizeResult
from mmplan.planner.search import optimize
from mmplan.planner.why_not import why_not
from mmplan.runtime.ghost.refusals import refuse_plan
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

JOB = """name: job
model:
  modules:
    llm: {kind: language_model, layers: 4, hidden: 2048, heads: 16, ffn: 5632, vocabulary: 32000}
data: {text_tokens: %s}
batch: {global: 8}
precision: bf16
technique: {stack: %s}
cluster: {device: h100-sxm, nodes: 1, devices_per_node: 2, memory: %s}
constraints: {%s}
"""


def job(folder: Path, rules: str, *, tokens: int = 4096, stack: str = "mmplan", memory: str = "80 GB") -> Scenario:
    file = folder / "job.yaml"
    file.write_text(JOB % (tokens, stack, memory, rules))
    return load_scenario(file)


def solved(scenario: Scenario) -> OptimizeResult:
    result = optimize(scenario, gap=0.0)
    assert check_plan(result.plan) == ()
    return result


def split(plan: Plan) -> bool:
    return plan.scenario.technique.sequence_parallel


def seconds_of(result: OptimizeResult) -> float:
    return result.plan.certificate.objective_s


@pytest.mark.parametrize("rules", ["tp: 2", "pp: [1, 2]"])
@pytest.mark.parametrize("tokens", [64, 4096])
def test_the_better_way_of_both_is_taken_and_the_bound_holds_for_both(rules: str, tokens: int, tmp_path: Path) -> None:
    free, whole, rows = (
        solved(job(tmp_path, f"{rules}, sequence_parallel: {way}", tokens=tokens)) for way in ("any", "false", "true")
    )
    assert seconds_of(free) == min(seconds_of(whole), seconds_of(rows))
    assert free.bound_s <= seconds_of(free) and (split(whole.plan), split(rows.plan)) == (False, True)
    assert solved(job(tmp_path, rules, tokens=tokens)).plan.scenario_hash != free.plan.scenario_hash


def test_it_is_chosen_with_long_rows_and_the_other_way_is_told(tmp_path: Path) -> None:
    free = solved(job(tmp_path, "tp: 2, sequence_parallel: any"))
    assert split(free.plan)
    assert any(other.reason.startswith("with no sequence parallelism: ") for other in free.runner_ups)
    alone = solved(job(tmp_path, "tp: 1, sequence_parallel: any"))
    assert not split(alone.plan) and not any("sequence" in other.reason for other in alone.runner_ups)


def test_memory_that_whole_rows_do_not_fit_into_is_enough_for_split_ones(tmp_path: Path) -> None:
    rules = "tp: 2, recompute: none, sharding: none, microbatch: 8"
    whole, rows = (solved(job(tmp_path, f"{rules}, sequence_parallel: {way}")) for way in ("false", "true"))
    need, less = (max(stage.memory_bytes for stage in one.plan.stages) for one in (whole, rows))
    assert less < 0.95 * need
    between = int((need + less) / 2 / (1 - 0.08))
    assert split(solved(job(tmp_path, f"{rules}, sequence_parallel: any", memory=f"{between} B")).plan)


def test_why_not_solves_with_it_and_says_where_it_counts(tmp_path: Path) -> None:
    plain = job(tmp_path, "tp: 2, sequence_parallel: false")
    best = optimize(plain, gap=0.0).plan
    asked = why_not(plain, best, parse_pins("sequence_parallel=true", plain), Limits(gap=0.0))
    assert asked.plan is not None and split(asked.plan)
    assert asked.reason.startswith("constraints.sequence_parallel allows false; without that: ")
    assert why_not(plain, best, parse_pins("sequence_parallel=false", plain), Limits()).verdict == "chosen"
    unasked = job(tmp_path, "pp: [1, 2], dp: 1")
    best = optimize(unasked, gap=0.0).plan
    assert best.tp == 1
    answer = why_not(unasked, best, parse_pins("sequence_parallel=true", unasked), Limits(gap=0.0))
    assert answer.verdict == "slower" and answer.plan is not None and answer.plan.tp == 2
    assert answer.reason.endswith("(tp = 1: a rank has all columns and all rows of a layer, and nothing is split)")
    with pytest.raises(InputError, match="sequence_parallel: unknown 'yes'; known: 'false', 'true'"):
        parse_pins("sequence_parallel=yes", unasked)


def test_constraints_and_technique_agree_or_say_so(tmp_path: Path) -> None:
    assert not job(tmp_path, "sequence_parallel: false", stack="nemo-2025").technique.sequence_parallel
    assert job(tmp_path, "sequence_parallel: any", stack="nemo-2025").technique.sequence_parallel
    with pytest.raises(InputError, match="technique says true, and only false is allowed; remove one of the two"):
        job(tmp_path, "sequence_parallel: false", stack="mmplan, sequence_parallel: true")
    with pytest.raises(InputError, match=r"constraints\.sequence_parallel: expected true, false or any, found 'rows'"):
        job(tmp_path, "sequence_parallel: rows")
    chosen = optimize(job(tmp_path, "tp: 2, sequence_parallel: any")).plan
    refuse_plan(chosen)
    with pytest.raises(InputError, match="write `sequence_parallel: false` in its constraints, or set"):
        refuse_plan(replace(chosen, cp=2))


def test_a_plan_that_splits_rows_against_its_constraints_is_found_out(tmp_path: Path) -> None:
    rows = optimize(job(tmp_path, "tp: 2, sequence_parallel: true")).plan
    whole = job(tmp_path, "tp: 2, sequence_parallel: false")
    mixed = replace(rows.scenario, constraints=whole.constraints)
    findings = check_plan(replace(rows, scenario=mixed, scenario_hash=scenario_hash(mixed)))
    message = "sequence_parallel is true, constraints.sequence_parallel allows false"
    assert [finding.message for finding in findings] == [message]
