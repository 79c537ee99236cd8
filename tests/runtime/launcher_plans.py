"""Plans on clusters of several shapes, and their launch files."""

from dataclasses import replace

from tiny_plans import FOUR_STAGES, TWO_STAGES, hand_plan, tiny_scenario

from mmplan.planner.plan import Plan
from mmplan.runtime.formats.job import launch_job
from mmplan.runtime.formats.launch_files import launch_files
from mmplan.scenario.cluster import Cluster
from mmplan.scenario.scenario import Scenario


def scenario_on(*pools: tuple[int, int], device: str = "h100-sxm") -> Scenario:
    """The tiny job on pools of (nodes, devices per node); each second pool is of another device."""
    scenario = tiny_scenario()
    (pool,) = scenario.cluster.pools
    names = [device, "a100-sxm-80"] * len(pools)
    made = tuple(
        replace(pool, nodes=nodes, devices_per_node=devices, device=replace(pool.device, name=name))
        for (nodes, devices), name in zip(pools, names, strict=False)
    )
    cluster = Cluster(name="test", pools=made, network_link=scenario.cluster.network_link)
    return replace(scenario, cluster=cluster)


def plan_on(*pools: tuple[int, int], dp: int = 1, stages: int = 4, device: str = "h100-sxm") -> Plan:
    return hand_plan(scenario_on(*pools, device=device), FOUR_STAGES if stages == 4 else TWO_STAGES, dp=dp)


CASES = {
    "one node": plan_on((1, 4)),
    "part of a node": plan_on((1, 8)),
    "equal nodes": plan_on((4, 2), dp=2),
    "a last node in part": plan_on((3, 3), dp=2),
    "unlike pools": plan_on((2, 3), (1, 2), dp=2),
    "pools of one kind of node": plan_on((1, 4), (1, 4), dp=2, device="a100-sxm-80"),
}


def files(plan: Plan, launcher: str, *, arguments: tuple[str, ...] = ()) -> dict[str, str]:
    job = launch_job(plan, "my plans/best 1.json", arguments=arguments)
    return dict(launch_files(plan, job, launcher).files)
