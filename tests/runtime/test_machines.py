"""Machines that a plan was not made for are refused with the arithmetic."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher_plans import plan_on

from mmplan.errors import InputError
from mmplan.runtime.formats.job import launch_job
from mmplan.runtime.machines import found_machines, require_machines

PLAN = plan_on((2, 4), dp=2)  # 8 ranks on 2 nodes x 4
UNLIKE = plan_on((2, 3), (1, 2), dp=2)
PART = plan_on((1, 8))  # 4 ranks of 8 devices
SLURM = {"SLURM_JOB_ID": "41", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}


def told(plan, *, hosts=None, nodes=None, gpus=None, **environment: str) -> str:  # type: ignore[no-untyped-def]
    """What is said against the machines; empty: nothing."""
    try:
        machines = found_machines(plan, hosts, nodes, gpus, environment)
        if machines is not None:
            require_machines(plan, launch_job(plan, "plan.json"), machines)
    except InputError as error:
        return str(error)
    return ""


def test_nothing_known_is_nothing_wrong() -> None:
    assert told(PLAN) == ""


@pytest.mark.parametrize(("nodes", "gpus"), [(2, None), (None, 4), (2, 4)])
def test_the_machines_of_the_plan_are_taken(nodes: int | None, gpus: int | None) -> None:
    assert told(PLAN, nodes=nodes, gpus=gpus) == ""


def test_other_numbers_are_refused_with_both_sums() -> None:
    assert "--nodes 3 has 3 nodes, cluster test has 2 nodes x 4" in told(PLAN, nodes=3)
    assert "--nodes 1 has 1 node, cluster test has 2 nodes x 4" in told(PLAN, nodes=1)
    said = told(PLAN, nodes=2, gpus=8)
    assert "node 0 of --nodes 2 --gpus-per-node 8 has 8 devices, and of cluster test 4" in said
    assert "2 nodes x 8 = 16 against 2 nodes x 4 = 8" in said


def test_devices_that_would_part_a_tensor_group_are_named() -> None:
    plan = replace(plan_on((2, 4), dp=2, stages=2), tp=2)
    assert "tp=2 ranks would lie on two nodes" in told(plan, gpus=3)
    assert "two nodes" not in told(plan, gpus=2)


def test_nodes_that_the_plan_leaves_idle_need_not_be_there() -> None:
    plan = plan_on((4, 4), dp=1)  # 4 ranks, one of 4 nodes
    assert told(plan, nodes=1) == ""
    assert told(plan, nodes=4) == ""
    assert "of which the plan uses 1" in told(plan, nodes=5)
    assert told(PART, gpus=4) == ""
    assert told(PART, gpus=8) == ""
    assert "has 6 devices" in told(PART, gpus=6)


def test_a_slurm_job_is_held_against_the_plan() -> None:
    assert told(PLAN, **SLURM) == ""
    assert "Slurm job 41 has 3 nodes x 4" in told(PLAN, **{**SLURM, "SLURM_JOB_NUM_NODES": "3"})
    assert "has 8 devices" in told(PLAN, **{**SLURM, "SLURM_GPUS_ON_NODE": "8"})
    assert told(PLAN, nodes=2, gpus=4, **{**SLURM, "SLURM_JOB_NUM_NODES": "3"}) == ""


@pytest.mark.parametrize("gpus", ["4", "h100:4", "gres/gpu:h100:4", "gpu:4", "nvidia_h100_80gb_hbm3:4", "hopper:4"])
def test_gpus_of_a_slurm_job_are_read_as_sites_write_them(gpus: str) -> None:
    environment = {"SLURM_JOB_ID": "41", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_PER_NODE": gpus}
    assert told(PLAN, **environment) == ""
    more = environment | {"SLURM_GPUS_PER_NODE": gpus.replace("4", "5").replace("h500", "h100")}
    assert "has 5 devices" in told(PLAN, **more)


def test_gpus_of_another_kind_are_refused() -> None:
    assert "called 'a100', those of the plan are h100-sxm" in told(PLAN, **SLURM, SLURM_GPUS_PER_NODE="a100:4")


def test_components_of_a_slurm_job_are_pools_in_order() -> None:
    parts = {"SLURM_JOB_ID": "9", "SLURM_HET_SIZE": "2"}
    parts |= {"SLURM_JOB_NUM_NODES_HET_GROUP_0": "2", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "1"}
    right = {"SLURM_GPUS_PER_NODE_HET_GROUP_0": "h100:3", "SLURM_GPUS_PER_NODE_HET_GROUP_1": "a100:2"}
    assert told(UNLIKE, **parts, **right) == ""
    swapped = {"SLURM_GPUS_PER_NODE_HET_GROUP_0": "a100:2", "SLURM_GPUS_PER_NODE_HET_GROUP_1": "h100:3"}
    assert "node 0 of Slurm job 9 has 2 devices, and of cluster test 3" in told(UNLIKE, **parts, **swapped)


@pytest.mark.parametrize("value", ["", "two", "-1", "99999999999", "2\n"])
def test_nonsense_in_a_variable_of_slurm_is_one_sentence(value: str) -> None:
    assert "SLURM_JOB_NUM_NODES" in told(PLAN, **{**SLURM, "SLURM_JOB_NUM_NODES": value})


def test_a_file_of_hosts_is_held_against_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("n1 slots=4\nn2 slots=4\n")
    assert told(PLAN, hosts=file) == ""
    file.write_text("n[01-03]\n")
    assert "hosts has 3 nodes, cluster test has 2 nodes x 4" in told(PLAN, hosts=file)
    assert told(PLAN, hosts=file, nodes=3).startswith("--hosts names the nodes")
    file.write_text("n1 slots=4\nn2 slots=2\n")
    assert "node 1 of" in told(PLAN, hosts=file)
    file.write_text("n1 slots=2\nn2 slots=3\nn3 slots=3\n")  # the pools of the plan in another order
    assert "node 0 of" in told(UNLIKE, hosts=file)


def test_hosts_keep_their_order(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("n10\nn2\n")
    machines = found_machines(PLAN, file, None, None, {})
    assert machines is not None
    assert machines.hosts == ("n10", "n2")


def test_a_rehearsal_asks_for_nodes_alone() -> None:
    job = launch_job(PLAN, "plan.json", rehearse=True)
    enough, few = found_machines(PLAN, None, 3, 1, {}), found_machines(PLAN, None, 1, 8, {})
    assert enough is not None
    assert few is not None
    require_machines(PLAN, job, enough)
    with pytest.raises(InputError, match="the rehearsal starts on 2"):
        require_machines(PLAN, job, few)


_NAMES = ("SLURM_JOB_NUM_NODES", "SLURM_HET_SIZE", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_NNODES")


@given(st.dictionaries(st.sampled_from(_NAMES), st.text(max_size=12) | st.integers().map(str)))
@settings(max_examples=60, deadline=None)
def test_whatever_slurms_variables_hold_there_is_an_answer_or_a_sentence(variables: dict[str, str]) -> None:
    said = told(PLAN, SLURM_JOB_ID="1", **variables)
    assert "\n" not in said
