from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from mmplan.errors import InfeasibleError
from mmplan.planner.configuration import MOST_FORWARDS, Configuration, divisors, replicas_per_node
from mmplan.planner.configurations import list_configurations
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Scenario
from mmplan.scenario.technique import SHARDINGS


@pytest.fixture(scope="module")
def tiny() -> Scenario:
    return load_scenario(Path(__file__).parents[2] / "scenarios" / "tiny.yaml")


def test_every_configuration_uses_the_whole_batch_and_fits_the_cluster(tiny: Scenario) -> None:
    found = list_configurations(replace(tiny, constraints=replace(tiny.constraints, pp=())), groups=20)
    assert len(found) == len(set(found))
    for one in found:
        assert one.dp * one.microbatch_size * one.microbatches == tiny.global_batch
        assert one.ranks <= tiny.cluster.device_count
    assert {one.pp for one in found} == {1, 2, 3, 4}


def test_constraints_narrow_the_list(tiny: Scenario) -> None:
    rules = replace(tiny.constraints, pp=(2,), dp=(1, 2), microbatch=(2,), sharding=("none",), schedule=("gpipe",))
    found = list_configurations(replace(tiny, constraints=rules), groups=20)
    assert [(one.pp, one.dp, one.microbatch_size, one.schedule) for one in found] == [
        (2, 1, 2, "gpipe"),
        (2, 2, 2, "gpipe"),
    ]


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        (
            {"tp": (3,)},
            "constraints.tp allows 3, but only 1, 2 divide the heads, widths and nodes of this scenario: a node's 4 "
            "devices / tp 3 = 1.333 is no whole number",
        ),
        (
            {"tp": (4,)},
            "constraints.tp allows 4, but only 1, 2 divide the heads, widths and nodes of this scenario: llm: "
            "kv_heads 2 / tp 4 = 0.5 is no whole number; constraints.pad_heads fills heads up",
        ),
        (
            {"dp": (3, 5)},
            "constraints.dp allows 3, 5, and none divides the global batch of 16: 16 / 3 = 5.333, 16 / 5 = 3.2",
        ),
        (
            {"ep": (2,)},
            "constraints.ep allows 2, and this scenario can have 1: no module of tiny has experts",
        ),
        (
            {"dp": (4,), "microbatch": (3,)},
            "constraints.microbatch allows 3 samples, and with dp=4 none divides the batch of a replica: 16 / 4 = 4",
        ),
        ({"pp": (30,)}, "constraints.pp allows 30 stages, but the model can be cut into at most 20 pieces"),
        (
            {"pp": (4,), "dp": (2,)},
            "the smallest allowed layout needs tp=1 x dp=2 x pp=4 = 8 devices, cluster cpu-core has 4",
        ),
    ],
)
def test_constraints_that_leave_nothing_are_named(
    tiny: Scenario, rules: dict[str, tuple[int, ...]], sentence: str
) -> None:
    cluster = replace(tiny.cluster, name="cpu-core")
    scenario = replace(tiny, cluster=cluster, constraints=replace(tiny.constraints, **rules))
    with pytest.raises(InfeasibleError) as error:
        list_configurations(scenario, groups=20)
    assert str(error.value) == sentence


def test_states_are_sharded_wherever_some_weights_have_several_ranks(tiny: Scenario) -> None:
    """One replica on two ranks of tp: only what is spread lies on both."""
    rules = replace(tiny.constraints, tp=(2,), dp=(1,), pp=(1,), microbatch=(1,), schedule=("1f1b",))
    found = list_configurations(replace(tiny, constraints=rules), groups=20)
    assert Counter((bool(one.spread), one.sharding) for one in found) == {
        (False, "none"): 1,
        **{(True, sharding): 1 for sharding in SHARDINGS},
    }
    apart = replace(tiny, constraints=replace(rules, modules=None))  # their meshes may have replicas
    assert Counter(one.sharding for one in list_configurations(apart, groups=20)) == dict.fromkeys(SHARDINGS, 2)


def test_divisors_of_a_large_prime_take_no_time() -> None:
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert divisors(9_999_991) == (1, 9_999_991)


def test_a_huge_batch_is_cut_into_programs_that_can_be_made(tiny: Scenario) -> None:
    scenario = replace(tiny, global_batch=10_000_000, constraints=replace(tiny.constraints, pp=()))
    found = list_configurations(scenario, groups=20)
    assert found
    assert max(one.pp * one.microbatches for one in found) <= MOST_FORWARDS
    rules = replace(tiny.constraints, pp=(4,), microbatch=(1,))
    with pytest.raises(InfeasibleError, match="makes more than 524,288 forwards per replica"):
        list_configurations(replace(scenario, constraints=rules), groups=20)


NODES = [
    ((1, 4),),
    ((9, 1),),
    ((5, 6),),
    ((9, 8),),
    ((1, 1), (1, 3)),
    ((2, 2), (1, 4)),
    ((1, 8), (3, 4)),
    ((1, 6), (2, 2)),
]


@pytest.mark.parametrize("pools", NODES)
def test_replicas_per_node_is_what_counting_ranks_gives(tiny: Scenario, pools: tuple[tuple[int, int], ...]) -> None:
    (pool,) = tiny.cluster.pools
    unlike = tuple(replace(pool, nodes=nodes, devices_per_node=devices) for nodes, devices in pools)
    cluster = replace(tiny.cluster, pools=unlike)
    narrowest = min(devices for _, devices in pools)
    tried = 0
    for tp, dp, pp in product(range(1, narrowest + 1), range(1, 12), range(1, 10)):
        if tp * dp * pp > cluster.device_count or any(devices % tp for _, devices in pools):
            continue
        one = Configuration(tp=tp, dp=dp, pp=pp, microbatch_size=1, microbatches=1, schedule="1f1b")
        counted = min(
            max(Counter(cluster.node_of((stage * dp + replica) * tp) for replica in range(dp)).values())
            for stage in range(pp)
        )
        assert replicas_per_node(one, cluster) == counted
        tried += 1
    assert tried > 0
