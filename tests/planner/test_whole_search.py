"""The whole search, over all configurations, against trying everything."""

import pytest
from pipeline_toys import DEVICE
from random_jobs import MOST_GROUPS, best_by_trying, groups_of, random_job

from mmplan.errors import InfeasibleError
from mmplan.planner.check import check_plan
from mmplan.planner.search import optimize

# `benchmarks/brute_force.py` tries 500.
SEEDS = [seed for seed in range(40) if groups_of(random_job(seed)) <= MOST_GROUPS]
# What the search minimises is below the closed form by less than the launch of an operator, see `problem.py`.
CLOSE_S = DEVICE.launch_s


@pytest.mark.parametrize("seed", SEEDS)
def test_the_plan_is_the_best_of_everything(seed: int) -> None:
    job = random_job(seed)
    best_s, _ = best_by_trying(job)
    if best_s is None:
        with pytest.raises(InfeasibleError):
            optimize(job, gap=0.0)
        return
    plan = optimize(job, gap=0.0).plan
    assert plan.certificate.objective_s == pytest.approx(best_s, abs=CLOSE_S)
    assert plan.certificate.bound_s <= best_s
    assert check_plan(plan) == ()
