"""A batch script for Slurm: one torchrun on each node, the nodes in the order of the plan's ranks.

Nodes of unlike pools are components of a heterogeneous job, which Slurm numbers through: SLURM_PROCID counts over all
components of a step (slurm.schedmd.com/heterogeneous_jobs.html), and with one task on each node it is the node's place.
"""

from shlex import quote

from mmplan.planner.formats.exported import Exported
from mmplan.runtime.formats.job import LaunchJob, NodeGroup, execute_arguments, head, node_body

# Sites allow a range of ports between nodes; jobs that share a first node must not meet on one.
_FIRST_PORT, _PORTS = 20_000, 10_000


def slurm_script(job: LaunchJob) -> Exported:
    """`sbatch job.sbatch`."""
    components = _components(job)
    lines = ["#!/bin/bash", head(job, "A batch job"), "", f"#SBATCH --job-name={job.name}"]
    lines.append("#SBATCH --output=%x-%j.out")
    if job.restarts:  # also after a node has failed or another job was preferred
        lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append"]
    for index, groups in enumerate(components):
        lines += ["", "#SBATCH hetjob"] if index else []
        lines += _resources(groups, typed=len(components) > 1)
    lines += ["", "set -euo pipefail", *_nodes(components), *_meeting(job), "", *_step(job, components)]
    notes = [
        f"the job runs in the folder it is submitted from, where its nodes have to find {job.plan_path} and mmplan"
    ]
    if len(components) > 1:
        kinds = ", ".join(f"{_type(groups[0])}" for groups in components if not groups[0].on_cpu)
        notes.append(f"the types in --gpus-per-node ({kinds}) have to be named as in this site's gres.conf")
    return Exported(
        target="slurm",
        version="Slurm 21.08 and later",
        files={"job.sbatch": "\n".join(lines) + "\n"},
        notes=tuple(notes),
    )


def _components(job: LaunchJob) -> list[list[NodeGroup]]:
    """Groups of nodes that one request can ask for: neighbours of one kind."""
    components: list[list[NodeGroup]] = []
    for group in job.groups:
        alike = components and (components[-1][-1].device, components[-1][-1].devices) == (group.device, group.devices)
        if alike:
            components[-1].append(group)
        else:
            components.append([group])
    return components


def _resources(groups: list[NodeGroup], *, typed: bool) -> list[str]:
    """Whole nodes, with one task on each."""
    nodes, devices = sum(group.nodes for group in groups), max(group.processes for group in groups)
    lines = [f"#SBATCH --nodes={nodes}", "#SBATCH --ntasks-per-node=1", "#SBATCH --exclusive"]
    if groups[0].on_cpu:
        return [*lines, f"#SBATCH --cpus-per-task={devices}"]
    kind = f"{_type(groups[0])}:" if typed else ""
    return [*lines, f"#SBATCH --gpus-per-node={kind}{devices}"]


def _type(group: NodeGroup) -> str:
    """What sites call a kind of GPU most often: `h100` of `h100-sxm`."""
    return group.device.split("-")[0]


def _nodes(components: list[list[NodeGroup]]) -> list[str]:
    """Refuses a job that was submitted with other numbers of nodes than the plan has: options of sbatch win over the
    script's."""
    lines = []
    for index, groups in enumerate(components):
        suffix = f"_HET_GROUP_{index}" if len(components) > 1 else ""
        wanted = sum(group.nodes for group in groups)
        found = f"${{SLURM_JOB_NUM_NODES{suffix}:-{wanted}}}"
        lines += [
            f'if [ "{found}" -ne {wanted} ]; then',
            f'    echo "the job has {found} nodes, the plan needs {wanted}" >&2; exit 2',
            "fi",
        ]
    return lines


def _meeting(job: LaunchJob) -> list[str]:
    if job.nodes == 1:
        return []
    first = "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}"
    return [
        f'nodes=($(scontrol show hostnames "{first}"))',
        "export MASTER_ADDR=${nodes[0]}",
        f"export MASTER_PORT=${{MASTER_PORT:-$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))}}",
    ]


def _step(job: LaunchJob, components: list[list[NodeGroup]]) -> list[str]:
    """One step over all nodes; the first task that fails ends it (--kill-on-bad-exit)."""
    het = f" --het-group=0-{len(components) - 1}" if len(components) > 1 else ""
    # Since 22.05 srun does not take --cpus-per-task from sbatch; unbound tasks may use all CPUs of their node.
    cores = f" --cpus-per-task={max(g.processes for g in job.groups)}" if job.groups[0].on_cpu and not het else ""
    number = ["node_rank=$SLURM_PROCID"] if job.nodes > 1 else []
    body = "\n".join(["set -euo pipefail", *number, node_body(job)])
    return [
        f"srun{het} --ntasks-per-node=1{cores} --cpu-bind=none --kill-on-bad-exit=1 bash -c {quote(body)} node \\",
        f"    {execute_arguments(job, quote(job.plan_path))}",
    ]
