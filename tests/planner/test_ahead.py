"""Frozen encoders a step ahead: cut, priced, checked, simulated, named, and refused where they cannot be."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import edge_bytes
from mmplan.cost_models.loads import mean_loads
from mmplan.errors import InputError
from mmplan.planner.ahead_search import TOLERANCE, ahead_problem, search_ahead
from mmplan.planner.check import check_plan
from mmplan.planner.check_hangs import check_hangs
from mmplan.planner.clockwork import Clockwork
from mmplan.planner.cut_problem import evaluate_cut
from mmplan.planner.durations import predicted_durations
from mmplan.planner.first_bounds import NEVER
from mmplan.planner.formats.linearised import each_alone, repriced
from mmplan.planner.formats.needs import plan_needs
from mmplan.planner.lower import lower
from mmplan.planner.mesh_problem import meshed_groups
from mmplan.planner.pins import parse_pins
from mmplan.planner.plan import Plan, load_plan, save_plan, scenario_hash
from mmplan.planner.problem import build_problem
from mmplan.planner.program import is_ahead
from mmplan.planner.schedules.reschedule import with_family
from mmplan.planner.search import optimize
from mmplan.planner.simulate import simulate
from mmplan.planner.space import build_space
from mmplan.planner.stage_solver import solve_cut
from mmplan.planner.step_loads import drawn_step_loads, mean_step_loads
from mmplan.planner.stopping import Deadline
from mmplan.planner.waves import price, waves_of
from mmplan.planner.why_not import Limits, why_not
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

TINY = Path(__file__).parents[2] / "scenarios" / "tiny.yaml"


def loaded(folder: Path, rules: str, train: str = "train: {vision: frozen}") -> Scenario:
    """The tiny scenario with 32 frozen vision blocks, 16 microbatches of 1 on one replica."""
    head, _, _ = TINY.read_text().partition("constraints:")
    path = folder / "job.yaml"
    deep = head.replace("      layers: 4\n", "      layers: 32\n")
    path.write_text(f"{deep}{train}\nconstraints: {{tp: 1, cp: 1, dp: 1, microbatch: 1, recompute: none, {rules}}}\n")
    return load_scenario(path)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return optimize(loaded(tmp_path_factory.mktemp("job"), "pp: 3, prefetch: any"), gap=0.0).plan


def test_a_step_ahead_is_chosen_where_it_is_faster_checked_and_kept(plan: Plan, tmp_path: Path) -> None:
    """Without, 32 frozen blocks share a stage's work and fill the pipeline; the bound is one of every schedule."""
    alone = optimize(loaded(tmp_path, "pp: 3"), gap=0.0).plan
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    assert plan.prefetch == ("vision",) and alone.prefetch == ()
    assert simulate(plan, graph, costs).step_time_s < simulate(alone, graph, costs).step_time_s
    assert plan.certificate.bound_s < plan.certificate.objective_s < alone.certificate.objective_s
    assert check_plan(plan) == () and check_hangs(plan) == ()
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_hashes_of_scenarios_without_it_are_those_of_before() -> None:
    assert scenario_hash(load_scenario(TINY)) == "430fdec411ef7d47"


def test_no_stage_waits_for_the_encoder_and_a_step_of_features_is_in_memory(plan: Plan) -> None:
    """J = 15 max T + max(T of the encoder, the path of the others) + finish, against the same cut in its own step."""
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    own, first = repriced(plan, prefetch=()), plan.stages[0]
    saved_s = own.certificate.objective_s - plan.certificate.objective_s
    edge = graph.edge("vision.31", "projector.0")
    loads = mean_loads(plan.scenario, 1)
    lag_s = costs.transfer_s(edge_bytes(edge, loads, plan.scenario.precision), True)
    assert first.layers[-1] == "vision.31" and first.backward_s == 0
    assert saved_s == pytest.approx(first.forward_s + lag_s, rel=1e-6)
    held = [a.memory_bytes - b.memory_bytes for a, b in zip(plan.stages, own.stages, strict=True)]
    step_bytes = 16 * edge_bytes(edge, loads, plan.scenario.precision)
    assert held == [step_bytes, step_bytes, 0]
    step = simulate(plan, graph, costs)
    begins_s = {str(item.action): item.start_s for item in step.timeline}
    assert begins_s["1F0"] == begins_s["0F0"] == 0.0
    before = simulate(own, graph, costs)
    peaks = [a.peak_memory_bytes - b.peak_memory_bytes for a, b in zip(step.ranks, before.ranks, strict=True)]
    assert peaks == held


def test_the_cut_is_the_best_of_all_cuts(tmp_path: Path) -> None:
    """With the encoder on stage 0 every way to put the other groups on two stages is tried."""
    scenario = loaded(tmp_path, "pp: 3, prefetch: [vision]", "train: {vision: frozen, audio: frozen}")
    space = build_space(scenario)
    meshed = meshed_groups(space.groups, [("vision",)])
    assert meshed is not None
    configuration = replace(next(iter(space.configurations)), prefetch=("vision",))
    problem = ahead_problem(
        space.prices, meshed, configuration, build_problem(space.prices, meshed.groups, configuration), 1
    )
    others = [group for group, mesh in enumerate(meshed.mesh_of) if mesh == 1]
    values = []
    for stages in product((1, 2), repeat=len(others)):
        stage_of = [0] * problem.groups
        for group, stage in zip(others, stages, strict=True):
            stage_of[group] = stage
        try:
            value = evaluate_cut(problem, stage_of)
        except ValueError:
            continue  # an edge leads back, or a stage is empty
        values += [value.objective_ns] if value.fits else []
    assert len(values) > 10
    assert solve_cut(problem, meshed.upsets).objective_ns == min(values)


def test_the_program_sends_the_next_steps_features_behind_those_of_this_one(plan: Plan) -> None:
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    reader = lower(plan, graph, mean_step_loads(plan)).ranks[1].actions
    received = {action.microbatch: place for place, action in enumerate(reader) if is_ahead(action.tensor)}
    read = {action.microbatch: place for place, action in enumerate(reader) if action.kind == "F"}
    assert received.keys() == read.keys() == set(range(16))
    assert all(received[microbatch] > read[microbatch] for microbatch in read)
    loads = drawn_step_loads(plan, 3)
    program = lower(plan, graph, loads)
    durations = predicted_durations(plan, graph, costs, program, loads)
    _, ends = Clockwork(program, durations).run()
    _, same = price(waves_of(program), np.concatenate([np.array(row) for row in durations]))
    assert np.concatenate([np.array(row) for row in ends]) == pytest.approx(same)


def test_a_step_runs_the_images_of_the_next_one(plan: Plan) -> None:
    now, later = (drawn_step_loads(replace(plan, prefetch=()), step)[0] for step in (0, 1))
    for run, own, following in zip(drawn_step_loads(plan, 0)[0], now, later, strict=True):
        assert run.get("vision") == following.get("vision")
        assert run.get("llm") == own.get("llm") and run.get("projector") == own.get("projector")


def test_false_plans_are_found(plan: Plan) -> None:
    first, second, last = plan.stages
    lean = replace(plan, stages=(first, replace(second, memory_bytes=second.memory_bytes - 1000), last))
    assert {finding.rule for finding in check_plan(lean)} == {"memory number"}
    mixed = replace(first, layers=first.layers[:-1]), replace(second, layers=(first.layers[-1], *second.layers))
    for false in (
        replace(plan, stages=(*mixed, last)),
        replace(plan, prefetch=("audio",)),
        replace(plan, together=("vision", "projector"), batch_factor=2),
    ):
        assert "step ahead" in {finding.rule for finding in check_plan(false)}


def test_what_cannot_run_a_step_ahead_says_so(plan: Plan, tmp_path: Path) -> None:
    graph, costs = build_graph(plan.scenario), AnalyticCostModel(plan.scenario)
    assert "a step ahead" in with_family(plan, "zb-h1", graph, costs).reason
    assert each_alone(plan, "pytorch").plan.prefetch == ()
    assert "frozen encoders a step ahead" in {need.name for need in plan_needs(plan, graph)}
    with pytest.raises(InputError, match="a step ahead"):
        check_hangs(plan, "megatron-pp")
    for rules, train, said in (
        ("pp: 3, prefetch: [vision]", "", r"'vision' is trained \(full\)"),
        ("pp: 3, prefetch: [visoin]", "train: {vision: frozen}", "did you mean 'vision'"),
        ("pp: 3, prefetch: any, schedule: zb-h1", "train: {vision: frozen}", "under 1f1b or gpipe"),
        ("prefetch: any, modules: {vision: {}}", "train: {vision: frozen}", "one mesh for all"),
    ):
        with pytest.raises(InputError, match=said):
            optimize(loaded(tmp_path, rules, train))


def test_all_degrees_are_searched_and_the_bound_is_below_every_cut(tmp_path: Path) -> None:
    """Each number of stages, and of these for the encoder, is cut exactly; nothing is below the bound of the search."""
    scenario = loaded(tmp_path, "pp: [2, 3, 4], prefetch: [vision]")
    space, names = build_space(scenario), ("vision",)
    meshed = meshed_groups(space.groups, [names])
    assert meshed is not None
    values = []
    for configuration in (replace(one, prefetch=names) for one in space.configurations):
        problem = build_problem(space.prices, meshed.groups, configuration)
        for count in range(1, configuration.pp):
            cut = ahead_problem(space.prices, meshed, configuration, problem, count)
            found = solve_cut(cut, meshed.upsets, tolerance=0.0)
            values += [found.objective_ns] if found.objective_ns is not None else []
    best_s, deadline = min(values) / 1e9, Deadline(limit_s=60.0)
    found = search_ahead(space, names, meshed, cutoff_ns=NEVER, gap=0.0, deadline=deadline)
    assert found.plans[-1].certificate.objective_s == pytest.approx(best_s, rel=TOLERANCE)
    assert best_s * (1 - TOLERANCE) <= found.bound_s <= best_s * (1 + 1e-9)
    none = search_ahead(space, names, meshed, cutoff_ns=min(values) // 2, gap=0.0, deadline=deadline)
    assert none.plans == () and min(values) // 2 <= none.bound_s * 1e9


def test_why_not_a_step_ahead_says_what_it_brings_or_costs(plan: Plan, tmp_path: Path) -> None:
    limits = Limits(gap=0.0)
    alone = optimize(loaded(tmp_path, "pp: 3"), gap=0.0).plan
    told = why_not(alone.scenario, alone, parse_pins("prefetch=vision", alone.scenario), limits)
    assert told.plan is not None and told.plan.prefetch == ("vision",)
    assert told.reason.startswith("constraints.prefetch does not ask for steps ahead; without that: ")
    assert "faster" in told.reason and told.verdict == "excluded"
    assert why_not(plan.scenario, plan, parse_pins("prefetch=vision", plan.scenario), limits).verdict == "chosen"
    assert "slower" in why_not(plan.scenario, plan, parse_pins("prefetch=none", plan.scenario), limits).reason
    audio = why_not(alone.scenario, alone, parse_pins("prefetch=audio", alone.scenario), limits)
    assert "'audio' reads or holds what is trained" in audio.reason
