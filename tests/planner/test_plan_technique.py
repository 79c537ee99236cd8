"""Plans count memory by the scenario's technique as `mmplan fit` does, or refuse the technique in one sentence."""

from dataclasses import replace
from typing import Any

import pytest
from pipeline_toys import scenario

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import kept_bytes, op_copied_parameters
from mmplan.cost_models.layout import Layout
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.memory import state_bytes
from mmplan.cost_models.planned_memory import planned_kept_bytes, planned_state_bytes
from mmplan.cost_models.sequence_values import summed_weights
from mmplan.cost_models.shard import Shard
from mmplan.errors import InputError
from mmplan.planner.check import check_plan
from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import plan_from_cut
from mmplan.planner.degrees import Degrees
from mmplan.planner.memory import estimate_memory
from mmplan.planner.plan import Plan
from mmplan.planner.plan_technique import require_executable
from mmplan.planner.pricing import Prices
from mmplan.planner.search import optimize
from mmplan.planner.simulate import simulate
from mmplan.planner.step_loads import mean_step_loads
from mmplan.scenario.scenario import DTYPE_BYTES, Scenario
from mmplan.scenario.stacks import technique_of

STAGES = [["llm.embed", "llm.0"], ["llm.1", "llm.2", "llm.head", "llm.loss"]]
KEEPING = [
    {},
    {"recompute": "full"},
    {"recompute": "selective", "attention": "math"},
    {"attention": "math", "dropout": True},
    {"cross_entropy": "fused"},
    {"cross_entropy": "chunked"},
    {"stack": "megatron-2021", "dropout": False},
]


def job() -> Scenario:
    return scenario(llm_layers=3)


def with_technique(choices: dict[str, Any]) -> Scenario:
    return replace(job(), technique=technique_of(**choices))


def two_stages(of: Scenario) -> Plan:
    prices = Prices(of, build_graph(of), AnalyticCostModel(of))
    size = Configuration(tp=1, dp=1, pp=2, microbatch_size=1, microbatches=of.global_batch, schedule="1f1b")
    return plan_from_cut(prices, size, STAGES, bound_s=0.0, status="feasible", wall_s=0.0)


def test_under_the_own_technique_plans_count_what_autograd_keeps() -> None:
    of = job()
    loads = mean_loads(of, 1)
    for layer in build_graph(of).layers():
        load = loads[layer.module]
        for tp in (1, 2):
            assert planned_kept_bytes(layer, load, of, tp) == kept_bytes(layer, load, of.precision, tp)
            assert planned_state_bytes(layer, of, tp) == state_bytes(layer, of.precision, of.optimizer, tp)


@pytest.mark.parametrize(("choices", "tp"), [*((one, 1) for one in KEEPING), ({"sequence_parallel": True}, 2)])
def test_layers_sum_to_what_fit_says_of_the_whole_model(choices: dict[str, Any], tp: int) -> None:
    of = with_technique(choices)
    (fit,) = estimate_memory(of, Degrees(tp=tp, microbatches=of.global_batch))
    layers, loads = build_graph(of).layers(), mean_loads(of, 1)
    parts = {part.name: part.bytes for part in fit.moments[0].parts}
    held = sum(parts.get(name, 0) for name in ("activations", "attention scores", "dropout masks", "logits"))
    states = sum(parts.get(name, 0) for name in ("weights", "gradients", "optimizer state"))
    layout = Layout(tp=tp, recompute=of.technique.recompute)
    kept = sum(planned_kept_bytes(layer, loads[layer.module], of, layout) for layer in layers)
    assert kept == pytest.approx(held, abs=len(layers))
    assert sum(planned_state_bytes(layer, of, tp) for layer in layers) == states


@pytest.mark.parametrize("choices", KEEPING)
def test_search_checker_and_simulation_agree_on_the_bytes_of_a_stage(choices: dict[str, Any]) -> None:
    of = with_technique(choices)
    plan = two_stages(of)
    assert check_plan(plan) == ()
    graph = build_graph(of)
    prediction = simulate(plan, graph, AnalyticCostModel(of), mean_step_loads(plan))
    peaks = [rank.peak_memory_bytes for rank in prediction.ranks]
    assert peaks == [stage.memory_bytes for stage in plan.stages]


def test_recomputation_takes_less_memory_and_more_time() -> None:
    kept, again = two_stages(job()), two_stages(with_technique({"recompute": "full"}))
    for whole, small in zip(kept.stages, again.stages, strict=True):
        assert small.memory_bytes < whole.memory_bytes
        assert small.backward_s > whole.backward_s


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"offload": "optimizer"}, "technique.offload: optimizer: plans do not price this .*; mmplan fit prices"),
        ({"stack": "nemo-2025"}, r"technique.overlap_dp: true \(what stack nemo-2025 does\)"),
        ({"recompute": "full", "recompute_layers": 1}, "technique.recompute_layers: 1: .* chooses the blocks that"),
        ({"frozen_hooks": True}, "technique.frozen_hooks: true"),
        ({"overlap_dp": True}, "technique.overlap_dp: true"),
        ({"gradient_dtype": "bf16"}, r"technique.gradient_dtype: bf16: .* optimizer.gradient_dtype, which is fp32"),
    ],
)
def test_a_technique_that_plans_do_not_price_is_refused(choices: dict[str, Any], message: str) -> None:
    of = with_technique(choices)
    with pytest.raises(InputError, match=message):
        Prices(of, build_graph(of), AnalyticCostModel(of))


@pytest.mark.parametrize("sharding", ["optimizer", "parameters"])
def test_what_a_technique_sets_is_kept_by_the_search(sharding: str) -> None:
    of = with_technique({"sharding": sharding, "recompute": "full"})
    plan = optimize(replace(of, constraints=replace(of.constraints, dp=(2,)))).plan
    assert plan.sharding == sharding
    assert {stage.recompute for stage in plan.stages} == {"full"}


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"attention": "math"}, "technique.attention: math, and .* does flash2 only"),
        ({"stack": "megatron-2021"}, "technique.stack: megatron-2021, and .* does mmplan only"),
        ({"gradient_dtype": "bf16"}, "technique.gradient_dtype: bf16, and .* does the optimizer's only"),
    ],
)
def test_a_run_refuses_a_technique_that_the_runtime_does_not_do(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        require_executable(with_technique(choices))


def test_sequence_parallelism_is_run() -> None:
    require_executable(with_technique({"sequence_parallel": True}))


def test_encoders_take_as_long_with_sequence_parallelism_and_only_its_sums_are_paid_for() -> None:
    whole, rows = job(), with_technique({"sequence_parallel": True})
    loads, costs = mean_loads(whole, 1), [AnalyticCostModel(of) for of in (whole, rows)]
    for layer in build_graph(whole).layers():
        load = loads[layer.module]
        before, after = ((c.forward_s(layer, load, 2), c.backward_s(layer, load, 2)) for c in costs)
        is_text = layer.modality == "text" and layer.kind in ("block", "head")
        assert (before != after) == is_text
        assert sum(summed_weights(layer, Shard(tp=2, sequence=True)).values()) == (
            sum(op_copied_parameters(op, 2) for op in layer.ops) if layer.kind == "block" and is_text else 0
        )


def test_a_border_inside_a_language_model_carries_the_rows_of_a_rank() -> None:
    of, graph = with_technique({"sequence_parallel": True}), build_graph(job())
    inner = graph.edge("llm.0", "llm.1")
    loads = {"llm": replace(mean_loads(of, 1)["llm"], tokens=1025)}
    whole, half = (Layout(tp=tp).sent_bytes(inner, graph, loads, of) for tp in (1, 2))
    assert half / 513 == whole / 1025 == inner.width * DTYPE_BYTES[of.precision]


def test_the_runtimes_own_technique_runs() -> None:
    require_executable(job())
    require_executable(with_technique({"gradient_dtype": "fp32"}))
    require_executable(with_technique({"recompute": "full"}))
