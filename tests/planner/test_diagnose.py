"""What an infeasible scenario is told: the shortage, and the least changes with which a plan exists."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from mmplan.errors import InfeasibleError
from mmplan.planner import diagnose
from mmplan.planner.changes import Family, families
from mmplan.planner.diagnose import can_fit, nearest
from mmplan.planner.search import optimize
from mmplan.planner.space import Space, build_space
from mmplan.planner.stopping import Deadline
from mmplan.scenario.catalogue import catalogue_device, device_names
from mmplan.scenario.load import load_scenario
from mmplan.scenario.scenario import Constraints, Scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"


def on_nodes(scenario: Scenario, nodes: int) -> Scenario:
    pools = tuple(replace(pool, nodes=nodes) for pool in scenario.cluster.pools)
    return replace(scenario, cluster=replace(scenario.cluster, pools=pools))


def with_memory(scenario: Scenario, memory_bytes: int, headroom: float = 0.0) -> Scenario:
    pools = tuple(
        replace(pool, device=replace(pool.device, memory_bytes=memory_bytes, reserved_bytes=0))
        for pool in scenario.cluster.pools
    )
    rules = replace(scenario.constraints, memory_headroom=headroom)
    return replace(scenario, cluster=replace(scenario.cluster, pools=pools), constraints=rules)


def message_of(scenario: Scenario, time_limit_s: float = 60.0) -> str:
    with pytest.raises(InfeasibleError) as error:
        optimize(scenario, time_limit_s=time_limit_s)
    return str(error.value)


@pytest.fixture(scope="module")
def tiny() -> Scenario:
    scenario = load_scenario(SCENARIOS / "tiny.yaml")
    rules = replace(scenario.constraints, pp=(2, 4), dp=(1,), vp=(1,), sharding=("none",), recompute=("none",))
    return replace(scenario, constraints=rules)


@pytest.fixture(scope="module")
def large() -> Scenario:
    """90 B parameters on 16 devices of 80 GB, nothing sharded or recomputed."""
    scenario = load_scenario(SCENARIOS / "llama-3.2-90b-vision.yaml")
    rules = replace(scenario.constraints, cp=(1,), sharding=("none",), recompute=("none",), spread=())
    return on_nodes(replace(scenario, constraints=rules), 2)


@pytest.fixture(scope="module")
def told(large: Scenario) -> str:
    return message_of(large)


def test_the_shortage_is_told_with_its_arithmetic(tiny: Scenario) -> None:
    message = message_of(with_memory(tiny, 2_000_000))
    assert message.startswith("no plan of tiny fits into memory: the leanest cut (pp=")
    assert "weights, gradients and optimizer + " in message
    assert "and a device offers 1.91 MiB (0% stays free)" in message


def test_the_fewest_extra_nodes_are_named(large: Scenario, told: str) -> None:
    extra = int(told.split("with ")[1].split(" more node")[0])
    assert f"with {extra} more nodes ({16 + 8 * extra} devices)" in told
    with pytest.raises(InfeasibleError):
        optimize(on_nodes(large, 2 + extra - 1))
    assert optimize(on_nodes(large, 2 + extra), gap=0.5).plan.pp > 1


def test_the_smallest_sufficient_memory_of_the_catalogue_is_named(large: Scenario, told: str) -> None:
    sizes = sorted({catalogue_device(name).device.memory_bytes for name in device_names()})
    named = told.split("on devices with ")[1].split("(")[1].split(")")[0].split(", ")
    size = catalogue_device(named[0]).device.memory_bytes
    reserved = large.cluster.pools[0].device.reserved_bytes

    def fits(memory_bytes: int) -> bool:
        pools = tuple(
            replace(pool, device=replace(pool.device, memory_bytes=memory_bytes, reserved_bytes=reserved))
            for pool in large.cluster.pools
        )
        changed = replace(large, cluster=replace(large.cluster, pools=pools))
        return can_fit(changed, build_space(large), Deadline(limit_s=60))

    assert fits(size)
    assert not fits(sizes[sizes.index(size) - 1])


def test_the_largest_headroom_that_fits_is_named(tiny: Scenario) -> None:
    peak = max(stage.memory_bytes for stage in optimize(with_memory(tiny, 10**9)).plan.stages)
    tight = with_memory(tiny, int(peak / 0.9) + 10, headroom=0.4)
    headroom = float(message_of(tight).split("constraints.memory_headroom ")[1].split(" ")[0])
    assert 0.1 <= headroom < 0.4
    assert optimize(replace(tight, constraints=replace(tight.constraints, memory_headroom=headroom))).plan
    message_of(replace(tight, constraints=replace(tight.constraints, memory_headroom=headroom + 0.01)))


def test_the_one_limit_that_makes_it_infeasible_is_named(tiny: Scenario) -> None:
    needed = max(stage.memory_bytes for stage in optimize(tiny).plan.stages)
    one_stage = replace(tiny, constraints=replace(tiny.constraints, pp=(1,)))
    message = message_of(with_memory(one_stage, needed))
    assert "; it fits without the limit on pp" in message
    assert "without the limits" not in message


def test_limits_are_lifted_one_by_one_and_then_together(tiny: Scenario) -> None:
    limited = replace(tiny, constraints=Constraints(pp=(2,), dp=(1,), microbatch=(4,)))
    clauses = [family.step(0)[0] for family in families(limited) if family.kind == "limits"]
    assert clauses == [
        "without the limit on pp",
        "without the limit on dp",
        "without the limit on microbatch",
        "without the limits on pp, dp and microbatch",
    ]


@pytest.mark.parametrize("least", [0, 1, 2, 3, 7, 20, 62])
def test_bisection_ends_at_the_least_change(least: int, tiny: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count()

    def fits(scenario: Scenario, like: Space, deadline: Deadline) -> bool:
        next(asked)
        return scenario.global_batch >= least

    monkeypatch.setattr(diagnose, "can_fit", fits)
    family = Family(kind="any", steps=63, step=lambda index: (str(index), replace(tiny, global_batch=index)))
    assert nearest(family, build_space(tiny), Deadline(limit_s=60)) == str(least)
    assert next(asked) <= 13
    unreachable = Family(kind="any", steps=least, step=family.step)
    if least:
        assert nearest(unreachable, build_space(tiny), Deadline(limit_s=60)) is None


def test_a_diagnosis_out_of_time_says_what_it_knows(large: Scenario) -> None:
    space = build_space(large)
    message = str(diagnose.explain_infeasible(space, Deadline(limit_s=0.0)))
    assert f"all {len(space.configurations):,} configurations were proved to need more than the 73.3 GiB" in message
    assert message.endswith("the search for a change that makes it fit ended before one was found")


def test_an_interrupted_diagnosis_says_what_it_knows(large: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count()

    def interrupted(scenario: Scenario, like: Space, deadline: Deadline) -> bool:
        if next(asked) == 12:
            raise KeyboardInterrupt
        return can_fit(scenario, like, deadline)

    monkeypatch.setattr(diagnose, "can_fit", interrupted)
    message = str(diagnose.explain_infeasible(build_space(large), Deadline(limit_s=60)))
    assert "the leanest cut (pp=2 x" in message
    assert " more nodes (" in message
    assert "on devices with" not in message
