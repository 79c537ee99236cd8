"""The numbers of `mmplan compare`."""

from dataclasses import replace
from pathlib import Path

import pytest

from mmplan.planner.naive import naive_plan
from mmplan.planner.plan import Plan
from mmplan.report.simulation import simulate_plan
from mmplan.report.summary import summarise
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


def test_all_gradients_are_reduced_on_every_replica(two_replicas: Plan) -> None:
    alone = simulate_plan(two_replicas).ranks
    summary = summarise("p", two_replicas, simulate_plan(two_replicas))
    assert summary.reduce_bytes == 2 * sum(rank.reduce_bytes for rank in alone)
