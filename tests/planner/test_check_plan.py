"""Plans broken by hand, each rejected with its own message. The sound one has its numbers from sums written here."""

from dataclasses import replace

import pytest
from pipeline_toys import LINK, plan, scenario

from mmplan.cost_models.analytic import AnalyticCostModel
from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import edge_bytes, kept_bytes, trainable_parameters
from mmplan.cost_models.layout import Layout, Trained
from mmplan.cost_models.loads import mean_loads
from mmplan.cost_models.memory import state_bytes
from mmplan.planner.check import check_plan, check_tensors
from mmplan.planner.configuration import Configuration
from mmplan.planner.cut_plan import plan_from_cut
from mmplan.planner.lower import lower
from mmplan.planner.plan import Plan, StagePlan, scenario_hash
from mmplan.planner.pricing import Prices
from mmplan.planner.step_loads import mean_step_loads
from mmplan.planner.working import working_bytes
from mmplan.scenario.cluster import Cluster
from mmplan.scenario.scenario import Constraints, Scenario

STAGES = [["llm.embed", "llm.0"], ["llm.1", "llm.2", "llm.head", "llm.loss"]]


def sound(of: Scenario, *, dp: int = 1, schedule: str = "1f1b") -> Plan:
    """Two stages of a chain: depths 2 and 1, one cut edge whose gradient comes back."""
    made = plan(of, STAGES, dp=dp, schedule=schedule)  # type: ignore[arg-type]
    graph, costs, loads = build_graph(of), AnalyticCostModel(of), mean_loads(of, 1)
    alive = (made.microbatches,) * 2 if schedule == "gpipe" else (min(2, made.microbatches), 1)
    stages = []
    for index, names in enumerate(STAGES):
        layers = [graph.layer(name) for name in names]
        parameters = sum(trainable_parameters(layer) for layer in layers)
        state = sum(state_bytes(layer, "fp32", of.optimizer) for layer in layers)
        kept = sum(kept_bytes(layer, loads[layer.module], "fp32") for layer in layers)
        device = of.cluster.pools[0].device
        stages.append(
            StagePlan(
                layers=tuple(names),
                forward_s=sum(costs.forward_s(layer, loads[layer.module], 1) for layer in layers),
                backward_s=sum(costs.backward_s(layer, loads[layer.module], 1) for layer in layers),
                finish_s=costs.reduce_s(Trained(dense=parameters), Layout(dp=dp), dp)
                + costs.update_s(Trained(dense=parameters), Layout(dp=dp)),
                in_flight=alive[index],
                memory_bytes=device.reserved_bytes + working_bytes(made, graph)[index] + state + alive[index] * kept,
                capacity_bytes=int(device.memory_bytes * (1 - of.constraints.memory_headroom)),
            )
        )
    hop_bytes = edge_bytes(graph.edge("llm.0", "llm.1"), loads, "fp32")
    work_s = [stage.forward_s + stage.backward_s for stage in stages]
    objective_s = (
        (made.microbatches - 1) * max(work_s)
        + sum(work_s)
        + 2 * (LINK.latency_s + hop_bytes / LINK.bytes_per_s)
        + max(stage.finish_s for stage in stages)
    )
    certificate = replace(
        made.certificate, objective_s=objective_s, bound_s=0.75 * objective_s, gap=0.25, status="feasible"
    )
    return replace(made, stages=tuple(stages), certificate=certificate)


TOY = scenario(llm_layers=3, global_batch=4)


def messages(broken: Plan) -> list[str]:
    return [str(finding) for finding in check_plan(broken)]


def with_stage(made: Plan, index: int, **changes: object) -> Plan:
    stages = list(made.stages)
    stages[index] = replace(stages[index], **changes)  # type: ignore[arg-type]
    return replace(made, stages=tuple(stages))


def with_scenario(made: Plan, **changes: object) -> Plan:
    changed = replace(made.scenario, **changes)  # type: ignore[arg-type]
    return replace(made, scenario=changed, scenario_hash=scenario_hash(changed))


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_sound_plan_has_no_findings(dp: int, schedule: str) -> None:
    assert messages(sound(TOY, dp=dp, schedule=schedule)) == []


def test_a_layer_in_no_stage() -> None:
    broken = with_stage(sound(TOY), 1, layers=("llm.1", "llm.head", "llm.loss"))
    assert messages(broken) == ["layers: layer llm.2 is in no stage"]


def test_a_layer_in_two_stages() -> None:
    broken = with_stage(sound(TOY), 0, layers=("llm.embed", "llm.0", "llm.1"))
    assert messages(broken) == ["layers: layer llm.1 is listed 2 times, in stages 0 and 1"]


def test_an_unknown_layer() -> None:
    broken = with_stage(sound(TOY), 0, layers=("llm.embed", "llm.0", "llm.9"))
    assert messages(broken) == ["layers: stage 0 holds llm.9, which model toy does not have"]


def test_an_empty_stage() -> None:
    made = sound(TOY)
    broken = replace(made, stages=(*made.stages, replace(made.stages[0], layers=())))
    assert messages(broken) == ["layers: stage 2 holds no layer"]


def test_stages_that_wait_for_each_other() -> None:
    broken = with_stage(sound(TOY), 0, layers=("llm.embed", "llm.0", "llm.2"))
    broken = with_stage(broken, 1, layers=("llm.1", "llm.head", "llm.loss"))
    assert messages(broken) == [
        "stage order: stages wait for each other in a circle: 1 feeds 0 (llm.1>llm.2), 0 feeds 1 (llm.0>llm.1)"
    ]


def test_stages_numbered_against_the_edges() -> None:
    made = sound(TOY)
    broken = replace(made, stages=(made.stages[1], made.stages[0]))
    assert messages(broken) == [
        "stage order: stage 1 feeds the earlier stage 0 (llm.0>llm.1): number them along the edges"
    ]


def test_layers_of_a_stage_out_of_order() -> None:
    broken = with_stage(sound(TOY), 1, layers=("llm.2", "llm.1", "llm.head", "llm.loss"))
    assert messages(broken) == ["stage order: stage 1 lists llm.2 before llm.1, which feeds it"]


def test_more_ranks_than_devices() -> None:
    broken = with_scenario(sound(TOY, dp=2), cluster=cluster_of(3))
    assert messages(broken) == ["degrees: pp=2 x dp=2 x tp=1 = 4 devices, cluster toy has 3"]


def cluster_of(devices: int) -> Cluster:
    pool = replace(TOY.cluster.pools[0], devices_per_node=devices)
    return replace(TOY.cluster, pools=(pool,))


def test_tensor_parallel_that_divides_nothing() -> None:
    broken = replace(sound(TOY), tp=3)
    assert "tensor parallel: tp=3 does not divide the heads, widths and nodes of this scenario; possible: 1, 2" in (
        messages(broken)
    )


def test_tensor_parallel_across_nodes() -> None:
    pool = replace(TOY.cluster.pools[0], devices_per_node=1, nodes=8)
    broken = replace(with_scenario(sound(TOY), cluster=replace(TOY.cluster, pools=(pool,))), tp=2)
    assert "tensor parallel: tp=2 puts ranks 0 to 1 of one group on nodes 0 and 1" in messages(broken)


def test_a_batch_that_does_not_multiply_up() -> None:
    broken = replace(sound(TOY), microbatches=3)
    assert messages(broken) == ["batch: dp=1 x 1 samples x 3 microbatches = 3, the global batch is 4"]


def test_a_degree_that_the_constraints_forbid() -> None:
    broken = with_scenario(sound(TOY), constraints=Constraints(pp=(1, 4)))
    assert messages(broken) == ["constraints: pp is 2, constraints.pp allows 1, 4"]


def test_a_cut_through_a_no_split_zone() -> None:
    broken = with_scenario(sound(TOY), constraints=Constraints(no_split=("llm.1",)))
    assert messages(broken) == [
        "no-split zone: edge llm.0>llm.1 is cut between stage 0 and stage 1, constraints.no_split names llm.1"
    ]


def test_a_cut_between_logits_and_loss() -> None:
    broken = with_stage(sound(TOY), 0, layers=("llm.embed", "llm.0", "llm.1", "llm.2", "llm.head"))
    broken = with_stage(broken, 1, layers=("llm.loss",))
    assert messages(broken) == [
        "uncuttable edge: edge llm.head>llm.loss is cut between stage 0 and stage 1 and cannot be"
    ]


def test_memory_beyond_the_device_shows_the_sum() -> None:
    made = sound(TOY)
    device = replace(TOY.cluster.pools[0].device, memory_bytes=100_000)
    cluster = replace(TOY.cluster, pools=(replace(TOY.cluster.pools[0], device=device),))
    broken = with_scenario(made, cluster=cluster)
    capacity = int(100_000 * (1 - 0.08))
    broken = with_stage(with_stage(broken, 0, capacity_bytes=capacity), 1, capacity_bytes=capacity)
    found = [line for line in messages(broken) if line.startswith("memory:")]
    assert found
    assert "reserve + " in found[0]
    assert found[0].endswith("a device has 89.8 KiB")


def test_recorded_times_memory_and_flight_that_are_not_true() -> None:
    made = sound(TOY)
    assert messages(with_stage(made, 0, forward_s=1.0))[0].startswith("stage times: stage 0 records forward 1 s")
    assert messages(with_stage(made, 1, finish_s=1.0))[0].startswith("stage times: stage 1 records finish 1 s")
    assert messages(with_stage(made, 1, memory_bytes=7))[0].startswith("memory number: stage 1 records 7 B")
    assert messages(with_stage(made, 0, capacity_bytes=7))[0].startswith("capacity: stage 0 records a capacity of 7 B")
    assert messages(with_stage(made, 0, in_flight=4)) == [
        "in flight: stage 0 records 4 microbatches in flight, 1f1b with 4 microbatches at depth 2 holds 2"
    ]


def test_an_objective_that_is_not_the_closed_form() -> None:
    made = sound(TOY)
    broken = replace(made, certificate=replace(made.certificate, objective_s=1.0, bound_s=0.75))
    assert [line.split(",")[0] for line in messages(broken)] == ["objective: the plan records a step of 1 s"]


def test_a_bound_above_the_plan_and_a_gap_that_is_not_theirs() -> None:
    made = sound(TOY)
    high = replace(made.certificate, bound_s=2 * made.certificate.objective_s, gap=-1.0)
    assert [line.split(" ")[0] for line in messages(replace(made, certificate=high))] == ["bound:"]
    wrong = replace(made.certificate, gap=0.0)
    assert messages(replace(made, certificate=wrong)) == [
        "gap: the plan records a gap of 0.000000, objective and bound give 0.250000"
    ]


def test_a_scenario_that_was_edited_after_planning() -> None:
    broken = replace(sound(TOY), scenario=replace(TOY, name="other"))
    assert messages(broken)[0].startswith("scenario hash: the plan says its scenario has hash")


def test_a_program_that_forgets_a_tensor() -> None:
    made = sound(TOY)
    program = lower(made, build_graph(TOY), mean_step_loads(made))
    last = program.ranks[1]
    actions = tuple(action for action in last.actions if not (action.kind == "RECV" and action.microbatch == 2))
    broken = replace(program, ranks=(program.ranks[0], replace(last, actions=actions)))
    (finding,) = check_tensors(made, build_graph(TOY), broken)
    assert str(finding) == ("tensors: rank 1 (stage 1) does not receive the output of llm.0 from stage 0, microbatch 2")


@pytest.mark.parametrize(("dp", "devices_per_node"), [(1, 8), (2, 2), (6, 4), (6, 8), (12, 8)])
def test_the_planner_and_the_checker_compute_the_same_numbers(dp: int, devices_per_node: int) -> None:
    """Encoders in parallel, replicas that straddle nodes: two implementations of the closed form."""
    toy = scenario(llm_layers=2, vision_layers=1, audio_layers=1, frozen_vision=True, global_batch=12)
    network = replace(LINK, bytes_per_s=1e9, latency_s=1e-5)
    pool = replace(toy.cluster.pools[0], devices_per_node=devices_per_node, nodes=24)
    toy = replace(toy, cluster=replace(toy.cluster, pools=(pool,), network_link=network))
    graph = build_graph(toy)
    configuration = Configuration(tp=1, dp=dp, pp=3, microbatch_size=1, microbatches=12 // dp, schedule="1f1b")
    stages = (
        ("vision.embed", "vision.0", "vision_projector.0"),
        ("audio.embed", "audio.0", "audio_projector.0"),
        ("llm.embed", "llm.0", "llm.1", "llm.head", "llm.loss"),
    )
    prices = Prices(toy, graph, AnalyticCostModel(toy))
    made = plan_from_cut(prices, configuration, stages, bound_s=0.0, status="given", wall_s=0.0)
    assert messages(made) == []
