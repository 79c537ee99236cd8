"""Published recipes as plans: their degrees, their refusals, and that no recipe beats the search."""

from dataclasses import replace
from pathlib import Path

import pytest

from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import cut_stages
from mmplan.planner.plan import Plan
from mmplan.planner.priced_groups import priced_groups
from mmplan.planner.recipes import pinned, plan_recipe, step_time
from mmplan.planner.rule_of_thumb import RULE, by_rule, plan_by_rule, plan_experts
from mmplan.planner.search import optimize
from mmplan.report.simulation import simulate_plan
from mmplan.scenario.asked import OwnRanks
from mmplan.scenario.load import load_scenario
from mmplan.scenario.recipe import Recipe
from mmplan.scenario.scenario import Constraints, Scenario

ROOT = Path(__file__).parents[2]
TINY = load_scenario(ROOT / "scenarios" / "tiny.yaml")
SCENARIO = replace(TINY, constraints=Constraints())


@pytest.fixture(scope="module")
def best() -> Plan:
    return optimize(SCENARIO, gap=0.0).plan


def recipe(**values: object) -> Recipe:
    return Recipe(**{"name": "hand", "source": "a test", **values})  # type: ignore[arg-type]


def with_memory(scenario: Scenario, memory_bytes: int) -> Scenario:
    pools = tuple(
        replace(pool, device=replace(pool.device, memory_bytes=memory_bytes)) for pool in scenario.cluster.pools
    )
    return replace(scenario, cluster=replace(scenario.cluster, pools=pools))


@pytest.mark.parametrize(
    "values", [{"pp": 2}, {"pp": 4}, {"tp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "microbatch": 1}, {"dp": 2}]
)
def test_a_recipe_keeps_its_degrees_and_is_not_faster_than_the_best_plan(best: Plan, values: dict[str, int]) -> None:
    planned = plan_recipe(SCENARIO, recipe(**values), best)
    plan = planned.plan
    assert plan is not None, planned.reason
    fills = 4 // (values.get("tp", 1) * values.get("pp", 1))
    assert (plan.tp, plan.pp, plan.dp) == (values.get("tp", 1), values.get("pp", 1), values.get("dp", fills))
    assert plan.microbatch_size == values.get("microbatch", plan.microbatch_size)
    assert plan.certificate.objective_s >= best.certificate.objective_s * (1 - 1e-9)
    assert "slower" in planned.reason or planned.reason == "as fast"


def test_a_recipe_that_is_the_best_plan_is_as_fast(best: Plan) -> None:
    same = recipe(tp=best.tp, pp=best.pp, dp=best.dp, cp=best.cp, microbatch=best.microbatch_size)
    assert plan_recipe(SCENARIO, same, best).reason == "as fast"


def test_nothing_is_claimed_to_be_proved_about_a_recipe(best: Plan) -> None:
    plan = plan_recipe(SCENARIO, recipe(pp=4), best).plan
    assert plan is not None
    assert (plan.certificate.status, plan.certificate.bound_s, plan.certificate.gap) == ("given", 0.0, 1.0)


@pytest.mark.parametrize(
    ("values", "arithmetic"),
    [
        ({"pp": 3}, "tp=1 x cp=1 x pp=3 = 3 devices do not divide the 4 of the cluster: dp = 1.33333"),
        ({"pp": 2, "dp": 3}, "tp=1 x cp=1 x pp=2 x dp=3 = 6 devices, the cluster has 4"),
        ({"dp": 3}, "global batch 16 / (dp=3) = 5.33333: no whole number of microbatches"),
        ({"pp": 2, "microbatch": 5}, "global batch 16 / (dp=2 x 5 samples) = 1.6: no whole number of microbatches"),
    ],
)
def test_a_recipe_that_the_cluster_or_the_batch_cannot_have_says_the_arithmetic(
    values: dict[str, int], arithmetic: str
) -> None:
    planned = plan_recipe(SCENARIO, recipe(**values))
    assert planned.plan is None
    assert planned.reason == arithmetic


def test_a_recipe_that_does_not_fit_says_what_it_needs() -> None:
    small = with_memory(SCENARIO, 4_000_000)
    small = replace(
        small,
        cluster=replace(
            small.cluster,
            pools=tuple(replace(pool, device=replace(pool.device, reserved_bytes=0)) for pool in small.cluster.pools),
        ),
    )
    planned = plan_recipe(small, recipe(dp=4))
    assert planned.plan is None
    assert "fits into memory: the leanest cut" in planned.reason
    assert "a device offers 3.51 MiB" in planned.reason  # 4,000,000 x (1 - 0.08)


def test_a_published_recipe_that_cannot_fit_is_flagged() -> None:
    """72 B weights in bf16 are 147 GB; Megatron-Bridge lists their LoRA with one 80 GB device per replica."""
    scenario = load_scenario(ROOT / "scenarios" / "qwen2.5-vl-72b-lora.yaml")
    (published,) = scenario.recipes
    planned = plan_recipe(scenario, published)
    assert planned.plan is None
    assert "GiB weights, gradients and optimizer" in planned.reason


def test_a_recipe_replaces_what_constraints_and_technique_say_of_its_keys_alone() -> None:
    rules = replace(SCENARIO.constraints, tp=(1,), pp=(1,), memory_headroom=0.2, recompute=("none",))
    technique = replace(SCENARIO.technique, sharding="parameters", recompute="full")
    scenario = pinned(
        replace(SCENARIO, constraints=rules, technique=technique), recipe(tp=2, pp=2, sharding="optimizer")
    )
    assert (scenario.constraints.tp, scenario.constraints.pp, scenario.constraints.dp) == ((2,), (2,), (1,))
    assert (scenario.constraints.sharding, scenario.technique.sharding) == (("optimizer",), "none")
    assert (scenario.constraints.memory_headroom, scenario.technique.recompute) == (0.2, "full")


def test_limits_that_a_recipe_breaks_are_said_and_bind_what_it_leaves_open() -> None:
    limited = replace(TINY, constraints=replace(TINY.constraints, sharding=("none",)))
    planned = plan_recipe(limited, recipe(tp=2, pp=1))  # tiny.yaml allows tp 1 and pp 2 or 4
    assert planned.plan is not None
    assert planned.note == (
        "outside the scenario's constraints: constraints.tp allows 1 and constraints.pp allows 2, 4"
    )
    assert planned.plan.sharding == "none"


def test_chunks_per_rank_run_interleaved() -> None:
    planned = plan_recipe(SCENARIO, recipe(pp=2, vp=2, microbatch=1))
    plan = planned.plan
    assert plan is not None
    assert (plan.schedule, len(plan.stages), plan.placement) == ("interleaved", 4, (0, 1, 0, 1))
    assert planned.note.startswith("under 1F1B instead of 2 chunks per rank: ")
    assert simulate_plan(plan).step_time_s > 0


def test_chunks_that_cannot_be_made_are_priced_without_and_it_is_said() -> None:
    planned = plan_recipe(SCENARIO, recipe(pp=2, vp=50, microbatch=1))
    assert planned.plan is not None
    assert planned.plan.schedule == "1f1b"
    assert planned.note.startswith(
        "priced as 1F1B: in 50 chunks per rank: chunks of constraints.vp (50 per rank) need pp x"
    )
    assert "; its ranks are busy for " in planned.note


def test_the_terms_of_a_plan_are_those_of_its_cut() -> None:
    plan = plan_recipe(SCENARIO, recipe(pp=2, dp=1, microbatch=2, sharding="none")).plan
    assert plan is not None
    configuration = Configuration(tp=1, dp=1, pp=2, microbatch_size=2, microbatches=8, schedule="1f1b")
    layers = [stage.layers for stage in plan.stages]
    _, time = cut_stages(priced_groups(plan.scenario).prices, configuration, layers)
    found = step_time(plan)
    assert found.repeat_s == pytest.approx(time.repeat_s)
    assert found.critical_path_s == pytest.approx(time.critical_path_s)
    assert found.finish_s == pytest.approx(time.finish_s)


def test_modules_on_ranks_of_their_own_stand_behind_those_of_all_others(best: Plan) -> None:
    """One rank of vision beside two of the rest; what the plan it is held against did not search is said."""
    apart = OwnRanks(module="vision", tp=(1,), cp=(1,), ep=(1,), pp=(1,), dp=(1,))
    planned = plan_recipe(SCENARIO, recipe(pp=2, dp=1, microbatch=1, modules=(apart,)), best)
    plan = planned.plan
    assert plan is not None, planned.reason
    (mesh,) = plan.meshes
    assert ("vision" in mesh.modules, mesh.ranks, mesh.first_rank, plan.rank_count) == (True, 1, 2, 3)
    assert planned.note == (
        "outside the scenario's constraints: constraints.modules does not ask for ranks of their own"
    )
    wide = plan_recipe(SCENARIO, recipe(pp=2, dp=2, modules=(apart,)))
    assert wide.reason == "tp=1 x cp=1 x pp=2 x dp=2 = 4 devices, the cluster has 3 beside 1 of modules apart"
    filled = plan_recipe(SCENARIO, recipe(pp=2, modules=(apart,)))
    assert filled.reason == "tp=1 x cp=1 x pp=2 = 2 devices do not divide the 3 that 1 of modules apart leave: dp = 1.5"


def test_a_schedule_of_a_recipe_is_the_plans_and_is_compared_where_it_shows(best: Plan) -> None:
    zero_bubble = plan_recipe(SCENARIO, recipe(pp=4, microbatch=1, schedule="zb-h1"), best)
    assert zero_bubble.plan is not None and zero_bubble.plan.schedule == "zb-h1"
    assert "what zb-h1 brings is in the simulated step" in zero_bubble.note
    v_shaped = plan_recipe(SCENARIO, recipe(pp=2, microbatch=1, schedule="v-half"), best)
    assert v_shaped.plan is not None and v_shaped.plan.schedule == "v-half"
    assert v_shaped.reason.endswith("in simulation; v-half has no closed form")
    few = plan_recipe(SCENARIO, recipe(pp=2, microbatch=4, schedule="dualpipe-v"), best)
    assert few.plan is None and "dualpipe-v" in few.reason


def test_of_a_recipes_software_plans_price_what_they_choose_themselves(best: Plan) -> None:
    for key, value, why in (("offload", "optimizer", "host memory"), ("fp8", "block", "no FP8 units")):
        refused = plan_recipe(SCENARIO, recipe(tp=2, pp=2, technique=((key, value),)), best)
        assert refused.plan is None and why in refused.reason
    software = (("sequence_parallel", True), ("overlap_dp", True))
    planned = plan_recipe(SCENARIO, recipe(tp=2, pp=2, technique=software), best)
    assert planned.plan is not None and planned.plan.scenario.technique.sequence_parallel
    assert planned.note == (
        "outside the scenario's constraints: technique.sequence_parallel is false, and constraints.sequence_parallel "
        "does not ask for more; plans do not price overlap_dp true; mmplan fit does"
    )


def test_the_rule_of_thumb_has_the_least_model_parallelism_that_fits(best: Plan) -> None:
    (published,) = plan_experts(best)
    assert (published.recipe.name, published.recipe.tp, published.recipe.pp, published.recipe.dp) == (RULE, 1, 1, 4)
    assert published.plan is not None and published.plan.sharding == "optimizer"
    assert published.plan.certificate.objective_s >= best.certificate.objective_s * (1 - 1e-9)
    pools = SCENARIO.cluster.pools
    bare = replace(pools[0], device=replace(pools[0].device, reserved_bytes=0))
    bare_scenario = replace(SCENARIO, cluster=replace(SCENARIO.cluster, pools=(bare,)))
    sizes = [
        min((one.tp, one.pp) for one in by_rule(with_memory(bare_scenario, memory)))
        for memory in (1_000_000_000, 30_000_000, 18_000_000)
    ]
    assert sizes == sorted(sizes) and sizes[0] == (1, 1) and sizes[-1] > (1, 1)


def test_the_rule_of_thumb_of_what_fits_nowhere_says_so() -> None:
    planned = plan_by_rule(with_memory(SCENARIO, 100_000))
    assert planned.plan is None
    assert planned.reason == "no tp inside a node and no number of stages that use the whole cluster fit into memory"
