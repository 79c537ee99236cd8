"""Answers to "why not these degrees?", and what zones cost."""

from dataclasses import replace
from pathlib import Path

import pytest

from mmplan.errors import InputError
from mmplan.planner import repeated
from mmplan.planner.alternative import Alternative
from mmplan.planner.pins import parse_pins, questions
from mmplan.planner.plan import Plan
from mmplan.planner.repeated import Limits
from mmplan.planner.search import optimize
from mmplan.planner.shadow_price import zone_prices
from mmplan.planner.stage_parts import busiest_parts
from mmplan.planner.why_not import why_not
from mmplan.report.alternatives import alternatives_values, why_not_tables, zone_tables
from mmplan.scenario.asked import Zone
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.zones import under_zones

SCENARIOS = Path(__file__).parents[2] / "scenarios"
LIMITS = Limits(gap=0.0)


@pytest.fixture(scope="module")
def tiny() -> Scenario:
    """Four processes of one CPU machine, 16 samples; tp, sharding and recompute are fixed, pp is 2 or 4."""
    return load_scenario(SCENARIOS / "tiny.yaml")


@pytest.fixture(scope="module")
def best(tiny: Scenario) -> Plan:
    return optimize(tiny, gap=0.0).plan


def ask(scenario: Scenario, plan: Plan, text: str) -> Alternative:
    return why_not(scenario, plan, parse_pins(text, scenario), LIMITS)


def test_terms_of_an_alternative_sum_to_what_it_loses(tiny: Scenario, best: Plan) -> None:
    other = ask(tiny, best, "pp=4 microbatch=2")
    assert other.verdict == "slower"
    assert other.objective_s is not None
    assert other.repeat_more_s is not None and other.fill_more_s is not None and other.finish_more_s is not None
    lost_s = other.objective_s - best.certificate.objective_s
    assert other.repeat_more_s + other.fill_more_s + other.finish_more_s == pytest.approx(lost_s)
    pinned = replace(tiny, constraints=replace(tiny.constraints, pp=(4,), microbatch=(2,)))
    assert other.objective_s == pytest.approx(optimize(pinned, gap=0.0).plan.certificate.objective_s)
    assert "slower: filling and draining the pipeline +" in other.reason
    assert "; in the busiest stage " in other.reason


def test_the_parts_of_the_busiest_stage_are_its_whole_work(best: Plan) -> None:
    busiest_s = max(stage.forward_s + stage.backward_s for stage in best.stages)
    parts = busiest_parts(best)
    assert sum(parts.values()) == pytest.approx(best.microbatches * busiest_s)
    assert parts["gathering weights and outputs"] == pytest.approx(0.0, abs=1e-9)  # no rest is put there


@pytest.mark.parametrize("degrees", [{"tp": (2,), "sharding": ("parameters",)}, {"tp": (4,), "recompute": ("full",)}])
def test_so_are_those_of_sharded_split_and_recomputed_stages(degrees: dict[str, tuple[object, ...]]) -> None:
    scenario = load_scenario(SCENARIOS / "vitl16-llama3-8b.yaml")
    rules = replace(scenario.constraints, pp=(1,), cp=(1,), **degrees)  # type: ignore[arg-type]
    plan = optimize(replace(scenario, constraints=rules), gap=0.5).plan
    parts = busiest_parts(plan)
    stage = max(plan.stages, key=lambda one: one.forward_s + one.backward_s)
    assert sum(parts.values()) == pytest.approx(plan.microbatches * (stage.forward_s + stage.backward_s))
    assert parts["tensor-parallel communication"] > 0
    assert (parts["recomputation"] > 0) == (stage.recompute != "none")
    assert (parts["gathering weights and outputs"] > 0) == (plan.sharding == "parameters" or bool(plan.spread))


def test_what_the_plan_has_already_is_not_solved_again(
    tiny: Scenario, best: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated, "optimize", lambda *_, **__: pytest.fail("solved"))
    assert ask(tiny, best, f"pp={best.pp} microbatch={best.microbatch_size} spread=none").verdict == "chosen"


def test_an_alternative_within_the_gap_was_never_excluded(tiny: Scenario) -> None:
    first = optimize(tiny, gap=0.2).plan
    other = why_not(tiny, first, parse_pins("microbatch=2", tiny), Limits(gap=0.2))
    assert other.verdict == "within the gap"
    assert other.reason.startswith("never excluded: ")
    assert "and the search only proves 20.0%" in other.reason


def test_a_constraint_of_the_scenario_is_named_and_what_it_costs_beside_it(tiny: Scenario, best: Plan) -> None:
    other = ask(tiny, best, "pp=1")
    assert other.verdict == "excluded"
    assert other.reason.startswith("constraints.pp allows 2, 4; without that: ")
    assert other.objective_s is not None and other.objective_s < best.certificate.objective_s


def test_memory_is_told_with_what_is_too_little(tiny: Scenario, best: Plan) -> None:
    pools = tuple(
        replace(pool, device=replace(pool.device, memory_bytes=20_000_000, reserved_bytes=0))
        for pool in tiny.cluster.pools
    )
    small = replace(tiny, cluster=replace(tiny.cluster, pools=pools))
    plan = optimize(small, gap=0.0).plan
    other = ask(small, plan, "pp=2 microbatch=8")
    assert other.verdict == "out of memory"
    assert "weights, gradients and optimizer" in other.reason
    assert other.reason.endswith(" too little")


def test_rules_answer_with_their_arithmetic(tiny: Scenario, best: Plan) -> None:
    told = {text: ask(tiny, best, text).reason for text in ("tp=3", "dp=3", "dp=2 microbatch=3", "tp=4", "tp=2 pp=4")}
    assert told == {
        "tp=3": "a node's 4 devices / tp 3 = 1.333 is no whole number",
        "dp=3": "the global batch 16 / dp 3 = 5.333 is no whole number",
        "dp=2 microbatch=3": "16 / dp 2 samples of a replica / microbatch 3 = 2.667 is no whole number",
        "tp=4": "llm: kv_heads 2 / tp 4 = 0.5 is no whole number; constraints.pad_heads fills heads up",
        "tp=2 pp=4": "tp 2 x pp 4 = 8 devices at least, the cluster has 4",
    }


def test_fp8_on_devices_without_it_is_excluded(tiny: Scenario, best: Plan) -> None:
    answer = ask(tiny, best, "fp8=block")
    assert (answer.verdict, answer.reason) == ("excluded", "cpu-core has no FP8 units")


def test_prime_heads_are_told_by_name(tiny: Scenario, best: Plan) -> None:
    modules = tuple(
        module
        if module.kind != "language_model" or module.transformer is None
        else replace(module, transformer=replace(module.transformer, heads=25, kv_heads=25))
        for module in tiny.model.modules
    )
    prime = replace(tiny, model=replace(tiny.model, modules=modules))
    assert (
        ask(prime, best, "tp=4").reason
        == "llm: heads 25 / tp 4 = 6.25 is no whole number; constraints.pad_heads fills heads up"
    )


def test_a_zone_that_forbids_tensor_sharding_is_named(tiny: Scenario, best: Plan) -> None:
    zoned = under_zones(tiny, [Zone(name="llm.1", layers=("llm.1",), forbid=("split", "tensor_sharding"))])
    assert ask(zoned, best, "tp=2").reason == "tp 2 would split llm, and zone llm.1 forbids tensor_sharding there"


def test_degrees_that_the_search_space_lacks_are_excluded_by_its_own_sentence(tiny: Scenario, best: Plan) -> None:
    rows = "101 tokens of a mean sequence / 4 = 25 rows on a rank, fewer than 256, two tiles of matrix products"
    assert ask(tiny, best, "cp=4").reason == f"constraints.cp allows 4, and this scenario can have 1: {rows}"
    assert (ask(tiny, best, "cp=3").reason or "").endswith("can have 1: powers of two up to 64")
    assert ask(tiny, best, "ep=2").reason == "no module of tiny has experts, so ep is 1"


def test_compression_is_answered_by_a_plan_that_compresses(tiny: Scenario, best: Plan) -> None:
    """The best plan has ZeRO-1, whose shares are sent whole; without it messages about 5 % cost more than they save."""
    assert (best.sharding, best.dp) == ("optimizer", 2)
    told = ask(tiny, best, "compression=topk")
    assert told.reason.startswith("constraints.compression allows none; without that: ")
    assert " slower: reducing gradients and updating +" in told.reason
    assert "where it changes nothing it costs nothing (nothing is compressed: gradients travel whole: " in told.reason
    assert told.plan is not None and told.plan.sharding == "none" and told.plan.dp > 1
    assert told.finish_more_s is not None and told.finish_more_s > 0


def test_spread_encoders_are_answered_with_several_ranks(tiny: Scenario, best: Plan) -> None:
    told = ask(tiny, best, "spread=vision:patches")
    assert "tp x cp = 1 (constraints.tp allows 1): a rank has all images and clips of its microbatch" in told.reason
    assert "the images of vision are not cut; no other plan can be: constraints.cp allows 2, 4" in told.reason
    free = replace(tiny, constraints=replace(tiny.constraints, tp=(1, 2)))
    told = ask(free, best, "spread=vision:patches")
    assert told.plan is not None and (told.plan.tp, told.plan.patches) == (2, ("vision",))
    assert " slower: " in told.reason and "; in the busiest stage " in told.reason


def test_one_device_has_nothing_to_share(tiny: Scenario) -> None:
    (pool,) = tiny.cluster.pools
    cluster = replace(tiny.cluster, pools=(replace(pool, devices_per_node=1),))
    alone = replace(tiny, cluster=cluster, constraints=replace(tiny.constraints, pp=(1,)))
    plan = optimize(alone).plan
    for text, why in {
        "compression=topk": "dp x cp = 1: one replica has no gradients to sum with others, and nothing is compressed",
        "sharding=optimizer": "dp = 1: no other rank has the same weights, so there is none to split states with",
    }.items():
        told = ask(alone, plan, text)
        assert told.verdict == "excluded"
        assert told.reason.endswith(
            f"the best plan with it is as fast as without: {why}; the limits leave no other plan"
        )


def test_a_schedule_is_answered_in_simulation(tiny: Scenario, best: Plan) -> None:
    gpipe, zero_bubble = ask(tiny, best, "schedule=gpipe"), ask(tiny, best, "schedule=zb-h1")
    assert "as long in simulation as under 1f1b: no rank waits longer or less (bubble " in gpipe.reason
    assert "; fullest rank " in gpipe.reason
    assert " faster in simulation than under 1f1b: pipeline -" in zero_bubble.reason
    assert zero_bubble.plan is not None and zero_bubble.plan.schedule == "zb-h1"
    assert ask(tiny, best, "schedule=1f1b,gpipe").verdict == "chosen"
    ahead = ask(tiny, best, "schedule=encoders-ahead")
    assert (ahead.verdict, ahead.plan) == ("excluded", None)
    assert ahead.reason == "encoders-ahead is not for this cut: no stage holds an encoder alone"


def test_what_was_not_searched_is_not_called_within_the_gap(tiny: Scenario) -> None:
    slow = optimize(replace(tiny, constraints=replace(tiny.constraints, microbatch=(8,))), gap=0.0).plan
    asked = "constraints.vp does not ask for more than 4 chunks per rank"
    told = why_not(tiny, slow, parse_pins("vp=5 microbatch=1", tiny), LIMITS)
    assert (told.verdict, told.reason.startswith(f"{asked}; without that: ")) == ("excluded", True)


BAD = {
    "tp4": "expected KEY=VALUE such as tp=4, found 'tp4'",
    "tp=": "expected KEY=VALUE such as tp=4, found 'tp='",
    "tpp=4": "unknown key 'tpp'; did you mean 'tp'?",
    "tp=0": "tp: expected a count of at least 1, found '0'",
    "tp=1 tp=2": "tp is given twice; several values are written tp=1,2",
    "sharding=optimiser": "sharding: unknown 'optimiser'; did you mean 'optimizer'?",
    "spread=visoin": "spread: unknown 'visoin'; did you mean 'vision'?",
    "schedule=zbv": "schedule: unknown 'zbv'; did you mean 'zb-v'?",
    "schedule=zb-v tp=2": "a schedule is asked alone: it is one of the plan's own cut, which degrees would change",
    " ": "expected degrees such as 'tp=4 pp=2', found none",
}


@pytest.mark.parametrize("text", BAD)
def test_a_question_that_cannot_be_read_is_told_so(tiny: Scenario, text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_pins(text, tiny)
    assert str(caught.value).endswith(BAD[text])


def test_questions_need_a_search_for_step_time_and_zones(tiny: Scenario) -> None:
    with pytest.raises(InputError, match=r"^--why-not compares step times: use it with --objective step-time"):
        questions(tiny, ["tp=1"], False, by_step_time=False)
    with pytest.raises(InputError, match="the scenario has no zones"):
        questions(tiny, [], True, by_step_time=True)


@pytest.fixture(scope="module")
def zoned(tiny: Scenario) -> Scenario:
    """No cut next to blocks 1 to 5 of the language model, where the best one lies, nor, for nothing, in the audio."""
    late = tuple(f"llm.{index}" for index in range(1, 6))
    zones = [Zone(name="llm.1-5", layers=late), Zone(name="audio.0", layers=("audio.0",))]
    return under_zones(tiny, zones)


def test_a_zone_costs_what_the_step_is_shorter_without_it(tiny: Scenario, best: Plan, zoned: Scenario) -> None:
    plan = optimize(zoned, gap=0.0).plan
    late, early, every = zone_prices(zoned, plan.certificate, LIMITS)
    assert (late.zone, early.zone, every.zone) == ("llm.1-5", "audio.0", "all zones")
    assert late.price_s is not None and early.price_s is not None and every.price_s is not None
    assert every.price_s == pytest.approx(plan.certificate.objective_s - best.certificate.objective_s)
    assert late.price_s > 0
    assert early.price_s == pytest.approx(0.0, abs=1e-9)
    assert late.least_s is not None and late.most_s is not None
    assert late.least_s <= late.price_s <= late.most_s + 1e-9


def test_zones_that_cover_everything_leave_one_stage(tiny: Scenario) -> None:
    layers = tuple(layer for stage in optimize(tiny, gap=0.5).plan.stages for layer in stage.layers)
    free = replace(tiny, constraints=replace(tiny.constraints, pp=()))
    covered = under_zones(free, [Zone(name="all", layers=layers)])
    plan = optimize(covered, gap=0.0).plan
    assert plan.pp == 1
    (price,) = zone_prices(covered, plan.certificate, LIMITS)
    assert price.price_s is not None and price.price_s >= 0


def test_tables_and_document_hold_every_answer(tiny: Scenario, best: Plan, zoned: Scenario) -> None:
    told = [ask(tiny, best, text) for text in ("pp=4", "tp=3", f"pp={best.pp}")]
    prices = zone_prices(zoned, optimize(zoned).plan.certificate, Limits())
    answers, parts = why_not_tables(told)
    assert (answers.row_count, len(parts.columns)) == (3, 2)
    assert [table.row_count for table in zone_tables(prices)] == [3]
    document = alternatives_values(told, prices)
    assert [one["verdict"] for one in document["why_not"]] == ["slower", "excluded", "chosen"]
    assert document["why_not"][0]["plan"].startswith("pp=4 dp=1 tp=1, ")
    assert [one["zone"] for one in document["zone_prices"]] == ["llm.1-5", "audio.0", "all zones"]
    assert why_not_tables([]) == zone_tables([]) == []


def test_compression_and_fp8_are_asked_about_as_degrees_are(tiny: Scenario, best: Plan) -> None:
    asked = ask(tiny, best, "compression=topk")
    assert asked.plan is not None and asked.plan.scenario.technique.compression == "topk"
    assert asked.verdict == "excluded" and asked.reason.startswith("constraints.compression allows none")
    allowed = replace(tiny, constraints=replace(tiny.constraints, compression=("topk", "fp8")))
    other = ask(allowed, best, "compression=fp8")
    assert other.plan is not None and other.plan.scenario.technique.compression == "fp8"
    assert other.verdict in ("slower", "within the gap") and "constraints.compression" not in other.reason
    assert ask(allowed, best, "compression=none").verdict == "chosen"
    assert ask(tiny, best, "fp8=none").verdict == "chosen"
    with pytest.raises(InputError, match="compression: unknown 'top-k'; did you mean 'topk'"):
        parse_pins("compression=top-k", tiny)
