"""The simulator against closed forms, and its counts against the graph's."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_toys import DEVICE, SetPrices, TokenPrices, plan, scenario

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.counts import edge_bytes, kept_bytes, trainable_parameters
from mmplan.cost_models.loads import mean_loads, sample_loads
from mmplan.cost_models.memory import state_bytes
from mmplan.planner.durations import predicted_durations, with_measured
from mmplan.planner.liveness import footprint
from mmplan.planner.lower import lower
from mmplan.planner.plan import Plan
from mmplan.planner.prediction import Prediction
from mmplan.planner.simulate import replay, simulate
from mmplan.planner.step_loads import mean_step_loads
from mmplan.planner.working import working_bytes
from mmplan.scenario.samples import microbatch_samples
from mmplan.scenario.scenario import Sample

FORWARD_S, DGRAD_S, WGRAD_S = 1.0, 1.5, 0.5
T = FORWARD_S + DGRAD_S + WGRAD_S


def chain(p: int, m: int, schedule: str, lag_s: float) -> tuple[Plan, Prediction]:
    """`p` equal stages: embed and block 0, blocks, last block with head and loss."""
    toy = scenario(llm_layers=p, global_batch=m, devices=64)
    blocks = [[f"llm.{index}"] for index in range(p)]
    stages = [["llm.embed", *blocks[0]], *blocks[1:]]
    stages[-1] = [*stages[-1], "llm.head", "llm.loss"]
    prices = SetPrices(
        forward={f"llm.{index}": FORWARD_S for index in range(p)},
        dgrad={f"llm.{index}": DGRAD_S for index in range(p)},
        wgrad={f"llm.{index}": WGRAD_S for index in range(p)},
        transfer=lag_s,
    )
    made = plan(toy, stages, schedule=schedule)  # type: ignore[arg-type]
    return made, simulate(made, build_graph(toy), prices)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 6), (4, 4), (4, 16), (8, 24)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_stages_without_lag_take_m_plus_p_minus_1_rounds(p: int, m: int, schedule: str) -> None:
    _, prediction = chain(p, m, schedule, 0.0)
    assert prediction.pipeline_s == pytest.approx((m + p - 1) * T)
    assert prediction.bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 9), (4, 13), (8, 25), (4, 8), (4, 14), (8, 24)])
def test_lag_enters_the_steady_state_of_1f1b(p: int, m: int) -> None:
    """(m + p - 1) T + 2 (p - 1) c (1 + (m - 1) / p): every round trip of a lag shows again p microbatches later.

    Exact when p divides m - 1; between, the simulation grows by whole lags and stays within one round of p.
    """
    lag_s = 0.01
    _, prediction = chain(p, m, "1f1b", lag_s)
    closed_s = (m + p - 1) * T + 2 * (p - 1) * lag_s * (1 + (m - 1) / p)
    if (m - 1) % p == 0:
        assert prediction.pipeline_s == pytest.approx(closed_s, rel=1e-12)
    else:
        assert prediction.pipeline_s == pytest.approx(closed_s, abs=p * lag_s)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 24)])
def test_lag_enters_gpipe_only_while_it_fills_and_drains(p: int, m: int) -> None:
    lag_s = 0.25
    _, prediction = chain(p, m, "gpipe", lag_s)
    assert prediction.pipeline_s == pytest.approx((m + p - 1) * T + 2 * (p - 1) * lag_s)


@pytest.mark.parametrize(("schedule", "expected"), [("1f1b", (4, 3, 2, 1)), ("gpipe", (6, 6, 6, 6))])
def test_peak_memory_is_state_plus_microbatches_in_flight(schedule: str, expected: tuple[int, ...]) -> None:
    made, prediction = chain(4, 6, schedule, 0.0)
    graph, load = build_graph(made.scenario), mean_loads(made.scenario, 1)
    for stage, in_flight in enumerate(expected):
        layers = [graph.layer(layer) for layer in made.stages[stage].layers]
        state = sum(state_bytes(layer, "fp32", made.scenario.optimizer) for layer in layers)
        kept = sum(kept_bytes(layer, load[layer.module], "fp32") for layer in layers)
        assert kept > 0
        always = DEVICE.reserved_bytes + state + working_bytes(made, graph)[stage]
        assert prediction.ranks[stage].peak_memory_bytes == always + in_flight * kept
        assert prediction.ranks[stage].memory_steps[-1][1] == always


def test_bytes_of_a_chain_are_those_of_its_cut_edges() -> None:
    made, prediction = chain(3, 6, "1f1b", 0.0)
    graph, load = build_graph(made.scenario), mean_loads(made.scenario, 1)
    hop = edge_bytes(graph.edge("llm.0", "llm.1"), load, "fp32")
    assert [rank.sent_bytes for rank in prediction.ranks] == [6 * hop, 12 * hop, 6 * hop]
    assert [rank.received_bytes for rank in prediction.ranks] == [6 * hop, 12 * hop, 6 * hop]


def encoders(frozen_vision: bool, manifest: tuple[Sample, ...] = (), dp: int = 1) -> Plan:
    """Vision on rank 0 and audio on rank 1 in parallel, then the language model on two ranks."""
    toy = scenario(
        llm_layers=2,
        vision_layers=2,
        audio_layers=1,
        frozen_vision=frozen_vision,
        manifest=manifest,
        global_batch=4 * dp,
    )
    stages = [
        ["vision.embed", "vision.0", "vision.1"],
        ["audio.embed", "audio.0", "audio_projector.0"],
        ["vision_projector.0", "llm.embed", "llm.0"],
        ["llm.1", "llm.head", "llm.loss"],
    ]
    return plan(toy, stages, dp=dp)


def test_parallel_encoders_start_together_and_a_frozen_one_gets_no_gradient() -> None:
    made = encoders(frozen_vision=True)
    prices = SetPrices(forward={"vision.0": 1.0, "audio.0": 1.0, "llm.0": 1.0, "llm.1": 1.0}, dgrad={"llm.0": 1.0})
    prediction = simulate(made, build_graph(made.scenario), prices)
    first = {rank: min(t.start_s for t in prediction.timeline if t.rank == rank) for rank in range(4)}
    assert first[0] == first[1] == 0.0
    vision, audio, llm, _ = prediction.ranks
    assert vision.received_bytes == 0
    assert audio.received_bytes == audio.sent_bytes > 0
    assert llm.received_bytes > vision.sent_bytes > 0
    assert not any(t.action.kind == "B" for t in prediction.timeline if t.rank == 0)


def test_a_frozen_encoder_that_runs_ahead_fills_the_buffers_of_its_reader() -> None:
    """Vision is done with all four microbatches at 4 ms; the language model starts its fourth later."""
    made = encoders(frozen_vision=True)
    graph = build_graph(made.scenario)
    prices = SetPrices(forward={"vision.0": 0.001, "audio.0": 0.001, "llm.0": 1.0, "llm.1": 1.0})
    prediction = simulate(made, graph, prices)
    image = edge_bytes(graph.edge("vision.1", "vision_projector.0"), mean_loads(made.scenario, 1), "fp32")
    assert 3 * image <= prediction.ranks[2].peak_buffer_bytes
    assert prediction.ranks[0].peak_buffer_bytes == 0


def test_replicas_with_unequal_images_wait_for_the_slowest_in_the_reduction() -> None:
    text, image = Sample(text_tokens=4), Sample(text_tokens=4, images=((8, 8),), audio_s=(0.1,))
    manifest = (text, text, text, text, image, image, image, image)
    made = encoders(frozen_vision=False, manifest=manifest, dp=2)
    graph = build_graph(made.scenario)
    samples = microbatch_samples(made.scenario, dp=2, microbatch_size=1, step=0)
    loads = [[sample_loads(made.scenario, group) for group in replica] for replica in samples]

    prediction = simulate(made, graph, TokenPrices(), loads)
    reduces = [t for t in prediction.timeline if t.action.kind == "REDUCE"]
    assert len(reduces) == 2 * 4
    for stage in range(4):
        starts = {t.start_s for t in reduces if t.action.stage == stage}
        assert len(starts) == 1
    by_replica = {replica: [r for r in prediction.ranks if r.replica == replica] for replica in range(2)}
    sent = {replica: sum(r.sent_bytes for r in ranks) for replica, ranks in by_replica.items()}
    assert sent[0] != sent[1]
    parameters = sum(trainable_parameters(layer) for layer in graph.layers())
    assert sum(r.reduce_bytes for r in by_replica[0]) == 4 * parameters


def test_replaying_measured_computes_changes_only_those() -> None:
    made = encoders(frozen_vision=False)
    graph = build_graph(made.scenario)
    loads = mean_step_loads(made)
    prices = SetPrices(forward={"vision.0": 1.0, "audio.0": 1.0, "llm.0": 1.0, "llm.1": 1.0}, transfer=0.1)
    program = lower(made, graph, loads)
    predicted = predicted_durations(made, graph, prices, program, loads)
    memory = footprint(made, graph, program, loads)
    assert replay(program, predicted, memory) == simulate(made, graph, prices)
    slower = with_measured(program, predicted, {(3, "3F3"): 6.0})
    before, after = replay(program, predicted, memory), replay(program, slower, memory)
    assert after.ranks[3].busy_s == pytest.approx(before.ranks[3].busy_s + 5.0)
    assert after.ranks[0].busy_s == before.ranks[0].busy_s


@settings(max_examples=25, deadline=None)
@given(seconds=st.lists(st.floats(0.01, 5.0), min_size=4, max_size=4), lag_s=st.floats(0.0, 2.0))
def test_more_lag_never_shortens_the_step(seconds: list[float], lag_s: float) -> None:
    made = encoders(frozen_vision=False)
    graph = build_graph(made.scenario)
    prices = SetPrices(
        forward=dict(zip(["vision.0", "audio.0", "llm.0", "llm.1"], seconds, strict=True)),
        dgrad=dict(zip(["vision.0", "audio.0", "llm.0", "llm.1"], seconds, strict=True)),
    )
    quick = simulate(made, graph, prices)
    slow = simulate(made, graph, replace(prices, transfer=lag_s))
    assert slow.step_time_s >= quick.step_time_s
    assert quick.pipeline_s >= max(rank.busy_s for rank in quick.ranks)
