"""Encoders side by side multiply upsets: cuts of merged layers, improved branch by branch, still end within the gap."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from mmplan.planner import coarse as coarse_module
from mmplan.planner import stage_cpsat
from mmplan.planner.check import check_plan
from mmplan.planner.coarse import Coarse, coarse_enough, refined, spread
from mmplan.planner.cut_problem import evaluate_cut
from mmplan.planner.priced_groups import PricedGroups, priced_groups
from mmplan.planner.problem import build_problem
from mmplan.planner.search import optimize
from mmplan.planner.space import build_space, solve_configuration
from mmplan.planner.stage_dp import cut_by_dp
from mmplan.planner.stage_order import chains, tail_start
from mmplan.planner.stage_solver import solve_cut, value_ceiling
from mmplan.planner.stopping import Deadline, never
from mmplan.planner.upsets import enumerate_upsets
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"
ENCODER = "{kind: vision_encoder, layers: %d, hidden: %d, heads: 16, ffn: %d, patch: 14, image_size: %d}"


def with_encoders(folder: Path, widths: tuple[int, ...], layers: int) -> Scenario:
    """So many vision encoders side by side in front of a language model, 16 H100."""
    modules = [f"    v{i}: {ENCODER % (layers, width, 4 * width, 448)}" for i, width in enumerate(widths)]
    modules += [f"    p{i}: {{kind: projector, dims: [{width}, 4096]}}" for i, width in enumerate(widths)]
    edges = [f"    - [v{i}, p{i}]\n    - [p{i}, llm]" for i in range(len(widths))]
    text = "\n".join(
        [
            "name: side-by-side",
            "source: invented",
            "model:",
            "  modules:",
            *modules,
            "    llm: {kind: language_model, layers: 16, hidden: 4096, heads: 32, ffn: 11008, vocabulary: 32000}",
            "  edges:",
            *edges,
            "data: {text_tokens: 1024, images: 1}",
            "batch: {global: 64}",
            "precision: bf16",
            "cluster: {device: h100-sxm, nodes: 2, devices_per_node: 8}",
        ]
    )
    path = folder / "side-by-side.yaml"
    path.write_text(text)
    return load_scenario(path)


def test_six_encoders_are_planned_within_the_gap(tmp_path: Path) -> None:
    """13 ** 6 = 4.8 M upsets of twelve layers each; the gap is proven by bounds and by CP-SAT."""
    scenario = with_encoders(tmp_path, (1280, 1664, 1280, 1024, 768, 1024), layers=12)
    assert not build_space(scenario).exact
    result = optimize(scenario)
    assert check_plan(result.plan) == ()
    assert result.status == "optimal"
    assert result.gap <= 0.0101
    assert "dynamic program" not in result.proofs


def test_one_stage_of_merged_layers_is_proved_without_cpsat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = with_encoders(tmp_path, (1280, 1664, 1280, 1024, 768, 1024), layers=12)
    space = build_space(replace(scenario, constraints=replace(scenario.constraints, pp=(1,))))
    monkeypatch.setattr(stage_cpsat, "cut_by_cpsat", None)
    for index in space.bounds_ns.argsort()[:20]:
        answer = solve_configuration(
            space, int(index), cutoff_ns=None, tolerance=0.0, seed=0, deadline=Deadline(limit_s=60.0)
        )
        assert not answer.exhausted


@pytest.fixture(scope="module")
def tiny() -> PricedGroups:
    return priced_groups(load_scenario(SCENARIOS / "tiny.yaml"))


@pytest.fixture
def merged_tiny(tiny: PricedGroups, monkeypatch: pytest.MonkeyPatch) -> Coarse:
    monkeypatch.setattr(
        coarse_module, "enumerate_upsets", lambda groups, pairs, _=0: enumerate_upsets(groups, pairs, 20)
    )
    return coarse_enough(tiny)


def test_merged_groups_are_unions_and_the_tail_stays(tiny: PricedGroups, merged_tiny: Coarse) -> None:
    fine, coarse = tiny.groups.groups, merged_tiny.groups.groups
    assert len(coarse) < len(fine)
    assert merged_tiny.upsets.count <= 20
    for members in fine:
        assert sum(set(members) <= set(larger) for larger in coarse) == 1
    assert set(fine[tail_start(len(fine), tiny.groups.pairs) :]) <= set(coarse)


def test_what_can_be_listed_is_not_merged(tiny: PricedGroups) -> None:
    assert coarse_enough(tiny).groups == tiny.groups


def test_a_bad_cut_is_improved_branch_by_branch(tiny: PricedGroups, merged_tiny: Coarse) -> None:
    configuration = next(
        one for one in build_space(tiny.prices.scenario).configurations if one.pp == 4 and one.microbatch_size == 1
    )
    fine = build_problem(tiny.prices, tiny.groups, configuration)
    upsets = enumerate_upsets(fine.groups, tiny.groups.pairs)
    assert upsets is not None
    best = solve_cut(fine, upsets).objective_ns
    assert best is not None
    problem = build_problem(tiny.prices, merged_tiny.groups, configuration)
    start = cut_by_dp(problem, merged_tiny.upsets, cutoff_ns=value_ceiling(problem))
    assert start.stage_of is not None
    assert start.objective_ns is not None
    assert start.objective_ns > best
    improve = partial(
        refined, tiny, merged_tiny, configuration, spread(tiny.groups, merged_tiny.groups, start.stage_of)
    )
    stage_of, objective_ns = improve(start.objective_ns, enough_ns=0, busiest_ns=0, stop=never)
    assert best <= objective_ns < start.objective_ns
    rounding_ns = len(tiny.groups.groups) * configuration.microbatches  # merged groups round down once
    assert abs(evaluate_cut(fine, stage_of).objective_ns - objective_ns) <= rounding_ns
    _, untouched_ns = improve(start.objective_ns, enough_ns=start.objective_ns, busiest_ns=0, stop=never)
    assert untouched_ns == start.objective_ns


def test_chains_end_where_branches_meet(tiny: PricedGroups) -> None:
    groups, pairs = tiny.groups.groups, tiny.groups.pairs
    rows = chains(len(groups), pairs)
    assert sorted(group for row in rows for group in row) == list(range(len(groups)))
    assert all((a, b) in pairs for row in rows for a, b in pairwise(row))
    assert [groups[row[-1]][-1] for row in rows] == ["projector.0", "audio_projector.0", "llm.loss"]
