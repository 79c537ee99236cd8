"""Step estimates of a dense model on H100 against the closed forms they consist of."""

from dataclasses import replace

import pytest

from mmplan.cost_models.collectives import all_reduce_s, group_of
from mmplan.errors import CostModelError, InputError
from mmplan.planner.check_degrees import check_degrees
from mmplan.planner.degrees import Degrees
from mmplan.planner.estimate import STEP_PARTS, StepEstimate, StepEstimator, estimate_step
from mmplan.planner.measured import MeasuredRow
from mmplan.planner.row_job import RowJob, row_job
from mmplan.planner.stage_split import chunk_ends, chunk_sizes
from mmplan.scenario.scenario import Scenario

NUMBERS = {
    "layers": 16.0, "hidden": 4096.0, "heads": 32.0, "ffn": 16384.0, "sequence": 2048.0, "gpus": 64.0,
    "global_batch": 256.0, "step_s": 1.0,
}  # fmt: skip


def scenario(**technique: object) -> Scenario:
    texts = {"gpu": "h100-sxm", "stack": "megatron-2021", "vocabulary": "51200", "precision": "bf16"}
    job = row_job(MeasuredRow("test", 1, texts, dict(NUMBERS)))
    assert isinstance(job, RowJob)
    return replace(job.scenario, technique=replace(job.scenario.technique, **technique))  # type: ignore[arg-type]


ESTIMATOR = StepEstimator(scenario())


def step(**degrees: int | str) -> StepEstimate:
    return ESTIMATOR.estimate(Degrees(**degrees))  # type: ignore[arg-type]


def test_parts_sum_to_the_step() -> None:
    for pp, vp, schedule in ((1, 1, "1f1b"), (4, 1, "zb-1p"), (4, 2, "interleaved")):
        result = step(tp=2, pp=pp, vp=vp, dp=8 // pp, microbatches=16, schedule=schedule)
        assert tuple(result.named()) == STEP_PARTS
        assert sum(result.parts) == pytest.approx(result.step_s)
        assert min(result.parts) >= 0


def test_bubble_is_the_other_stages_once_and_interleaving_divides_it() -> None:
    plain = step(pp=4, microbatches=16)
    others = sum(plain.stage_s) - max(plain.stage_s)
    assert plain.named()["bubble"] == pytest.approx(others)
    chunked = step(pp=4, vp=4, microbatches=16, schedule="interleaved")
    assert chunked.named()["bubble"] == pytest.approx(others / 4, rel=1e-6)


def test_zero_bubble_schedules_come_in_the_order_of_their_memory() -> None:
    times = [step(pp=8, microbatches=16, schedule=name).step_s for name in ("1f1b", "zb-1p", "zb-2p")]
    assert times == sorted(times, reverse=True)


def test_full_recompute_adds_a_forward_of_the_blocks() -> None:
    none, full = (estimate_step(scenario(recompute=kind), Degrees(microbatches=4)) for kind in ("none", "full"))
    half = estimate_step(scenario(recompute="full", recompute_layers=8), Degrees(microbatches=4))
    assert half.step_s - none.step_s == pytest.approx((full.step_s - none.step_s) / 2, rel=1e-6)
    assert 1.25 < full.step_s / none.step_s < 1.4


def test_sharded_parameters_are_gathered_every_microbatch() -> None:
    sharded = StepEstimator(scenario(sharding="parameters", overlap_dp=True))
    dp_s = [sharded.estimate(Degrees(dp=64, microbatches=m)).named()["dp"] for m in (1, 4)]
    assert dp_s[1] == pytest.approx(4 * dp_s[0])
    once = StepEstimator(scenario()).estimate(Degrees(dp=64, microbatches=4)).named()["dp"]
    assert once == pytest.approx(StepEstimator(scenario()).estimate(Degrees(dp=64)).named()["dp"])


def test_sequence_parallel_saves_pointwise_work_and_costs_a_gather() -> None:
    off, on = (
        estimate_step(scenario(sequence_parallel=flag), Degrees(tp=8, microbatches=4)).named() for flag in (False, True)
    )
    assert on["pointwise"] < off["pointwise"]
    assert on["tp"] > off["tp"]


def test_blocks_are_cut_equally_and_ends_count_as_blocks_where_that_divides() -> None:
    assert chunk_sizes(16, 4) == (4, 4, 4, 4)
    assert chunk_sizes(22, 8) == (2, 3, 3, 3, 3, 3, 3, 2)  # Zero Bubble's 1.5B model
    assert chunk_sizes(126, 64) == (1, *([2] * 62), 1)  # Llama 3.1 405B, 8 stages of 8 chunks
    assert chunk_sizes(22, 24)[0] == chunk_sizes(22, 24)[-1] == 0  # embedding and head alone
    assert chunk_sizes(10, 4) == (2, 3, 3, 2)
    assert chunk_ends(4, 2) == (0, 3, 6)


def test_more_chunks_than_blocks_are_refused() -> None:
    with pytest.raises(CostModelError, match="32 pipeline chunks need as many blocks, the model has 16"):
        step(pp=32)


def test_context_parallelism_by_all_to_all_sends_four_tensors_each_way_and_merges_nothing() -> None:
    """16 layers, tp 2 x cp 4 in one node: q, k, v and the output, 2048 / 4 rows of 4096 / 2, three quarters leave."""
    ring, exchange = (
        StepEstimator(scenario(attention="flash2", context_parallel=kind)).estimate(Degrees(tp=2, cp=4, dp=8)).named()
        for kind in ("ring", "all-to-all")
    )
    link = scenario().cluster.pools[0].node_link
    once = link.latency_s + 3 / 4 * (2048 / 4 * 4096 / 2 * 2) / link.reached_bytes_per_s
    assert exchange["cp"] == pytest.approx(16 * 2 * 4 * once)
    assert exchange["attention"] == pytest.approx(ring["attention"])
    assert ring["cp"] != pytest.approx(exchange["cp"])


def test_gathered_keys_and_values_are_waited_for_and_their_gradients_summed() -> None:
    """16 layers, tp 2 x cp 4 in one node: keys and values of 2048 rows of 4096 / 2, of which a quarter is here,
    gathered in three steps, twice; their gradients are summed once."""
    ring, gathered = (
        StepEstimator(scenario(attention="flash2", context_parallel=kind)).estimate(Degrees(tp=2, cp=4, dp=8)).named()
        for kind in ("ring", "gather")
    )
    link, size = scenario().cluster.pools[0].node_link, 2048 * 4096 / 2 * 2
    gather = 3 * link.latency_s + 3 / 4 * size / link.reached_bytes_per_s
    total = all_reduce_s(size, group_of(4, 2, 8), link, link)
    assert gathered["cp"] == pytest.approx(16 * 2 * (2 * gather + total))
    assert gathered["attention"] == pytest.approx(ring["attention"])


def test_all_to_all_needs_whole_heads_on_every_rank() -> None:
    with pytest.raises(InputError, match=r"heads = 32 / \(tp 8 x cp 8\) = 0.5 is no whole number"):
        check_degrees(scenario(context_parallel="all-to-all"), Degrees(tp=8, cp=8))
    check_degrees(scenario(context_parallel="ring"), Degrees(tp=8, cp=8))
    check_degrees(scenario(context_parallel="all-to-all"), Degrees(tp=8, cp=4))


def test_stragglers_are_a_part_of_large_jobs_only() -> None:
    small, large = (step(dp=dp).named() for dp in (512, 2048))  # 64 and 256 nodes
    assert small["stragglers"] == 0.0
    rest = sum(value for name, value in large.items() if name != "stragglers")
    assert large["stragglers"] == pytest.approx(0.01 * rest)


def test_only_plain_tensor_parallelism_gains_from_adding_switches() -> None:
    """Sequence parallelism gathers and scatters, where a switch saves nothing."""
    cluster = scenario().cluster
    pool = cluster.pools[0]
    assert pool.node_link.nvls
    without = replace(cluster, pools=(replace(pool, node_link=replace(pool.node_link, nvls=False)),))
    for flag, gains in ((False, True), (True, False)):
        one = scenario(sequence_parallel=flag)
        with_s, without_s = (
            estimate_step(each, Degrees(tp=8, microbatches=4)).named()["tp"]
            for each in (one, replace(one, cluster=without))
        )
        assert (with_s < without_s) == gains
