"""What the integers of a cut count for the end of a step is never more than the end of any stage, and exact of a model
on one stage."""

from collections.abc import Iterator

import numpy as np
import pytest
from random_jobs import random_job

from mmplan.cost_models.layout import Trained
from mmplan.planner.configuration import Configuration
from mmplan.planner.configurations import list_configurations
from mmplan.planner.priced_groups import PricedGroups, priced_groups
from mmplan.planner.problem import finish_parts, stage_finish_s
from mmplan.planner.quantise import NS_PER_S

# experts (18, 298), spread modules (13), unlike pools (268, 298), tied tables (13, 268, 298)
SEEDS = (13, 18, 268, 298)


def configurations(seed: int) -> Iterator[tuple[PricedGroups, Configuration]]:
    """Of every layout, sharding and number of replicas one with one stage, and one with more."""
    priced = priced_groups(random_job(seed))
    found = {
        (one.layout, one.pp > 1): one for one in list_configurations(priced.prices.scenario, len(priced.groups.groups))
    }
    for one in found.values():
        yield priced, one


def end_ns(priced: PricedGroups, one: Configuration, pools: tuple[int, ...], groups: list[int]) -> float:
    """The end of a stage with these groups."""
    layers = [layer for group in groups for layer in priced.groups.groups[group]]
    known = priced.prices.layers(one.layout, one.microbatch_size)
    trained = sum((known[layer].trained for layer in layers), Trained())
    layout = one.layout_of(0, priced.prices.scenario.cluster)
    return stage_finish_s(priced.prices, one, layers, layout, trained) * NS_PER_S if layout.pools == pools else np.inf


@pytest.mark.parametrize("seed", SEEDS)
def test_no_stage_ends_its_step_sooner_than_its_parts_say(seed: int) -> None:
    random, compared = np.random.default_rng(seed), 0
    for priced, one in configurations(seed):
        pools, count = one.layout_of(0, priced.prices.scenario.cluster).pools, len(priced.groups.groups)
        ends = finish_parts(priced.prices, priced.groups, one, pools)
        stages = [list(range(count))] if one.pp == 1 else [[group] for group in range(count)]
        if one.pp > 1:
            stages += [np.flatnonzero(random.random(count) < 0.5).tolist() for _ in range(10)]
        for groups in stages:
            parts_ns = sum(ends.finish_ns[group] for group in groups)
            parts_ns += ends.fixed_ns * any(ends.trainable[group] for group in groups)
            assert parts_ns <= end_ns(priced, one, pools, groups) + 1e-3, (str(one), groups)
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("seed", SEEDS)
def test_the_end_of_one_stage_is_exact(seed: int) -> None:
    for priced, one in configurations(seed):
        if one.pp == 1:
            pools, count = one.layout_of(0, priced.prices.scenario.cluster).pools, len(priced.groups.groups)
            ends = finish_parts(priced.prices, priced.groups, one, pools)
            assert ends.finish_ns == (0,) * count
            assert ends.fixed_ns == int(end_ns(priced, one, pools, list(range(count))) * (1 + 1e-12))
