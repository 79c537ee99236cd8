"""A head that reads the token table of another stage: what the plan says of it, in seconds, bytes and actions."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import pytest
from pipeline_toys import scenario
from random_jobs import with_tied_table

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.layout import Layout, Trained
from mmplan.cost_models.ties import tied_share, trained_together
from mmplan.planner.check import check_plan
from mmplan.planner.check_program import check_program
from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import plan_from_cut
from mmplan.planner.lower import lower
from mmplan.planner.plan import Plan
from mmplan.planner.pricing import Prices
from mmplan.planner.program import Program
from mmplan.planner.schedules.reschedule import with_family
from mmplan.planner.simulate import simulate
from mmplan.planner.step_loads import drawn_step_loads, mean_step_loads
from mmplan.planner.step_times import step_times
from mmplan.planner.switch_cost import switch_cost
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.technique import SHARDINGS, Sharding


def job(*, tied: bool = True) -> Scenario:
    made = scenario(llm_layers=2, vision_layers=1, audio_layers=0, frozen_vision=False, global_batch=8)
    made = replace(made, constraints=replace(made.constraints, memory_headroom=0.0))
    return with_tied_table(made) if tied else made


def cut(made: Scenario, *first: str, dp: int = 2, sharding: Sharding = "none") -> Plan:
    """Stages that begin with these layers, behind a first one."""
    graph = build_graph(made)
    layers = [layer.id for layer in graph.layers()]
    places = [0, *map(layers.index, first), len(layers)]
    stages = [layers[begin:end] for begin, end in pairwise(places)]
    prices = Prices(made, graph, AnalyticCostModel(made))
    configuration = Configuration(
        tp=1,
        dp=dp,
        pp=len(stages),
        microbatch_size=1,
        microbatches=8 // dp,
        schedule="1f1b",
        sharding=sharding,
    )
    return plan_from_cut(prices, configuration, stages, bound_s=0.0, status="given", wall_s=0.0)


def program_of(plan: Plan) -> Program:
    return lower(plan, build_graph(plan.scenario), mean_step_loads(plan))


def table_elements(made: Scenario) -> int:
    llm = made.model.module("llm")
    assert llm.vocabulary is not None
    return llm.vocabulary.size * llm.output_width


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_both_stages_sum_what_they_have_of_the_gradient_before_the_update(sharding: Sharding) -> None:
    plan = cut(job(), "llm.1", sharding=sharding)
    assert check_plan(plan) == ()
    share = table_elements(plan.scenario) // (1 if sharding == "none" else 2)
    for rank in program_of(plan).ranks:
        *_, tie, step = rank.actions
        assert (str(tie), str(step)) == (f"{rank.stage}TIE0", f"{rank.stage}STEP")
        assert tie.bytes == 4 * share  # fp32


def test_a_head_beside_its_table_sums_nothing() -> None:
    plan = cut(job(), "llm.embed")
    assert check_plan(plan) == ()
    assert not any(action.kind == "TIE" for rank in program_of(plan).ranks for action in rank.actions)


def test_the_end_of_the_step_has_the_sum_and_the_copy() -> None:
    """Two messages of half of the table, and what the head's stage reduces and updates more."""
    apart, untied = cut(job(), "llm.1"), cut(job(tied=False), "llm.1")
    costs, size = AnalyticCostModel(apart.scenario), 4 * table_elements(apart.scenario)
    near = apart.world <= min(pool.devices_per_node for pool in apart.scenario.cluster.pools)
    sum_s = 2 * costs.transfer_s(size / 2, near)
    assert sum_s > 0
    for tied, other in zip(apart.stages, untied.stages, strict=True):
        assert tied.finish_s == pytest.approx(other.finish_s + sum_s)
        assert tied.memory_bytes == other.memory_bytes
    more_s = apart.certificate.objective_s - untied.certificate.objective_s
    assert more_s == pytest.approx(sum_s)


def test_simulated_steps_wait_for_the_sum() -> None:
    plan = cut(job(), "llm.1", sharding="optimizer")
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    prediction = simulate(plan, graph, costs)
    ties = [item for item in prediction.timeline if item.action.kind == "TIE"]
    assert len({(item.start_s, item.end_s) for item in ties}) == 1  # mean microbatches: both replicas do alike
    reduces = [item.end_s for item in prediction.timeline if item.action.kind == "REDUCE"]
    assert ties[0].start_s == max(reduces)
    for rank in prediction.ranks:
        own = [item for item in prediction.timeline if item.rank == rank.rank]
        sums = sum(item.end_s - item.start_s for item in own if item.action.kind in ("REDUCE", "TIE"))
        assert rank.reduce_s == pytest.approx(sums)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_steps_over_the_data_take_what_simulations_of_them_take(sharding: Sharding) -> None:
    plan = cut(job(), "llm.0", "llm.1", sharding=sharding)
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    (times,) = step_times(plan, graph, costs, steps=1, compositions=("in order",))
    expected = simulate(plan, graph, costs, drawn_step_loads(plan, 0)).step_time_s
    assert times.step_s[0] == pytest.approx(expected)


def test_chunks_on_one_rank_add_without_a_message() -> None:
    """In the V of zero-bubble schedules the first and the last stage lie on one rank."""
    plan = cut(job(), "llm.1", dp=1)
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    folded = with_family(plan, "zb-v", graph, costs).plan
    assert folded is not None
    ties = [a for rank in program_of(folded).ranks for a in rank.actions if a.kind == "TIE"]
    assert ties and check_program(program_of(folded)) == ()
    rows = {folded.row(folded.stage_of_layer()[layer]) for layer in ("llm.embed", "llm.head")}
    assert all((tie.bytes == 0) == (len(rows) == 1) for tie in ties)


def test_what_a_stage_holds_of_the_table_counts_once_for_each_stage() -> None:
    graph, layout = build_graph(job()), Layout(dp=3, sharding="optimizer")
    embed, head = graph.layer("llm.embed"), graph.layer("llm.head")
    table = Trained(dense=table_elements(job()), messages=1, wide=(0, 0, 0))  # none in fp32
    assert trained_together([head], layout) == trained_together([embed], layout) == table
    assert trained_together([embed, head], layout) == table
    assert tied_share(head, layout) == -(-table.dense // 3)
    assert tied_share(head, Layout(dp=3)) == table.dense


def broken(program: Program, rank: int, **changes: object) -> Program:
    ranks = list(program.ranks)
    actions = [replace(a, **changes) if a.kind == "TIE" else a for a in ranks[rank].actions]  # type: ignore[arg-type]
    ranks[rank] = replace(ranks[rank], actions=tuple(actions))
    return replace(program, ranks=tuple(ranks))


def test_the_checker_sees_sums_that_do_not_meet() -> None:
    program = program_of(cut(job(), "llm.1"))
    assert check_program(program) == ()
    missing = list(program.ranks)
    missing[0] = replace(missing[0], actions=tuple(a for a in missing[0].actions if a.kind != "TIE"))
    early = list(program.ranks)
    *before, tie, step = early[0].actions
    early[0] = replace(early[0], actions=(*before[:-1], tie, before[-1], step))
    wrong = {
        "tie 0 is summed": replace(program, ranks=tuple(missing)),
        "(9 bytes)": broken(program, 0, bytes=9),
        "reductions, ties, one update": replace(program, ranks=tuple(early)),
        "tie 1 is summed": broken(program, 0, microbatch=1),
    }
    for message, one in wrong.items():
        assert any(message in str(finding) for finding in check_program(one)), message


def test_a_move_to_one_stage_leaves_the_copy_of_the_head_behind() -> None:
    """What moves are weights, moments and master of layers that the rank lacked; the table is among them once."""
    apart, together = cut(job(), "llm.1", dp=1), cut(job(), dp=1)
    untied = switch_cost(cut(job(tied=False), "llm.1", dp=1), cut(job(tied=False), dp=1))
    per_parameter = 4 + 8  # fp32 weight, which is the master, and two moments
    moved = switch_cost(apart, together)
    assert untied.moved_bytes - moved.moved_bytes == table_elements(apart.scenario) * per_parameter


def test_the_example_of_the_decision_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    page = (root / "docs/decisions/003-the-search-minimises-a-closed-form.md").read_text()
    (example,) = re.findall(r"^    from dataclasses.*?(?=^\S)", page, re.MULTILINE | re.DOTALL)
    exec(dedent(example), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["0 0TIE0: 131,072 B", "2 1TIE0: 131,072 B"]
    assert all(f"`{line}`" in page for line in lines)
