"""The whole search, over all configurations, against trying everything."""

import pytest
from random_jobs import MOST_GROUPS, groups_of, random_job, require_the_best_of_everything

# `benchmarks/brute_force.py` tries 500.
SEEDS = [seed for seed in range(40) if groups_of(random_job(seed)) <= MOST_GROUPS]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_plan_is_the_best_of_everything(seed: int) -> None:
    require_the_best_of_everything(random_job(seed))
