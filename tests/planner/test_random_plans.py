"""The random plans that exporters are tested with are sound, and of every kind."""

import pytest
from random_plans import random_plan

from mmplan.planner.check import check_plan


def test_every_random_plan_is_sound_and_all_kinds_occur(request: pytest.FixtureRequest) -> None:
    plans = [random_plan(seed) for seed in range(request.config.getoption("--round-trips"))]
    assert {seed: found for seed, plan in enumerate(plans) if (found := check_plan(plan))} == {}
    assert {"1f1b", "gpipe", "interleaved"} <= {plan.schedule for plan in plans}
    for degree in ("tp", "cp", "dp", "pp", "ep"):
        assert any(getattr(plan, degree) > 1 for plan in plans), degree
    assert any(plan.spread for plan in plans)
    assert any(plan.patches for plan in plans)
    assert any(len({stage.recompute for stage in plan.stages}) > 1 for plan in plans)
