"""The numbers of `mmplan compare`."""

from dataclasses import replace
from pathlib import Path

import pytest

from mmplan.planner.naive import naive_plan
from mmplan.planner.plan import Plan
from mmplan.report.simulation import simulate_plan
from mmplan.report.summary import summarise
from mmplan.report.tables import summary_table
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Distribution

TINY = Path(__file__).parents[2] / "scenarios" / "tiny.yaml"


def _fixed(value: float) -> Distribution:
    return Distribution(values=(value,), weights=(1.0,))


@pytest.fixture
def two_replicas() -> Plan:
    """Two stages on two replicas, all samples alike."""
    tiny = load_scenario(TINY)
    data = replace(tiny.data, text_tokens=_fixed(64), images=_fixed(1), audio_clips=_fixed(1), audio_s=_fixed(0.5))
    return naive_plan(replace(tiny, data=data, constraints=replace(tiny.constraints, dp=(2,), pp=(2,))))


def test_bytes_of_a_mean_step_are_those_of_a_drawn_one(two_replicas: Plan) -> None:
    mean, drawn = (summarise("p", two_replicas, simulate_plan(two_replicas, step)) for step in (None, 0))
    assert two_replicas.dp == 2
    assert mean.stage_bytes == drawn.stage_bytes > 0
    assert mean.gradient_stage_bytes == drawn.gradient_stage_bytes > 0
    assert mean.reduce_bytes == drawn.reduce_bytes > 0


def test_a_million_tokens_cost_what_the_ranks_that_work_cost(two_replicas: Plan) -> None:
    """Four devices at 1.5: 6 per hour, 1 / 600 per second."""
    assert summarise("p", two_replicas, simulate_plan(two_replicas)).cost_per_step is None
    cluster = two_replicas.scenario.cluster
    pools = (replace(cluster.pools[0], price_per_hour=1.5),)
    priced = replace(two_replicas, scenario=replace(two_replicas.scenario, cluster=replace(cluster, pools=pools)))
    summary = summarise("p", priced, simulate_plan(two_replicas))
    assert summary.cost_per_step == pytest.approx(summary.step_time_s / 600)
    tokens_per_s = summary.tokens_per_s_per_device * 4
    assert summary.cost_per_million_tokens == pytest.approx(1e6 / 600 / tokens_per_s)
    cells = [str(cell) for column in summary_table([summary]).columns for cell in column.cells]
    assert f"{summary.cost_per_million_tokens:,.4g}" in cells


def test_all_gradients_are_reduced_on_every_replica(two_replicas: Plan) -> None:
    alone = simulate_plan(two_replicas).ranks
    summary = summarise("p", two_replicas, simulate_plan(two_replicas))
    assert summary.reduce_bytes == 2 * sum(rank.reduce_bytes for rank in alone)
