"""What a launcher has to start for a plan: how many processes on which nodes, in the order of the plan's ranks.

Ranks are numbered node by node, so a launcher that fills the nodes in order keeps every tensor-parallel group in its
node. torchrun's own rendezvous (`c10d`) numbers nodes by the alphabet of their names, n10 before n2
(torch/distributed/elastic/rendezvous/dynamic_rendezvous.py, `sorted(state.participants)`); the scripts therefore use
the static one, which takes each node's number.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from shlex import quote

from mmplan.planner.plan import Plan
from mmplan.runtime.places import listed_ranks
from mmplan.runtime.requirements import process_count
from mmplan.scenario.cluster import Cluster
from mmplan.scenario.document import counted

_LONGEST_NAME = 40  # of a DNS label's 63 characters, so that a launcher can add its own suffixes


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """Neighbouring nodes that run equally many processes; `devices`: what such a node of the cluster has, `device`:
    its kind, as one word."""

    nodes: int
    processes: int
    devices: int
    device: str
    pool: int

    @property
    def on_cpu(self) -> bool:
        return self.device.startswith("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchJob:
    """A run of a plan: `plan_path` as the processes find it, `arguments` for `mmplan execute` behind it.

    `setup`: shell lines to run on every node first, such as `module load cuda`. `rehearsed`: it only sleeps, and needs
    cores alone. `restarts`: how often a failed run is started again; it then goes on from its last checkpoint.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    plan_path: str
    arguments: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    rehearsed: bool = False
    restarts: int = 0

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    @property
    def processes(self) -> int:
        return sum(group.nodes * group.processes for group in self.groups)

    @property
    def alike(self) -> bool:
        """Whether all nodes are of one kind; the last may run fewer processes."""
        return len({(group.device, group.devices) for group in self.groups}) == 1


def launch_job(
    plan: Plan,
    plan_path: str,
    *,
    arguments: tuple[str, ...] = (),
    setup: tuple[str, ...] = (),
    rehearse: bool = False,
    restarts: int = 0,
) -> LaunchJob:
    """The job of a plan on the cluster it was made for.

    Raises:
        InputError: this release cannot execute the plan (see `process_count`).
    """
    count = process_count(plan, rehearse=rehearse, own_model="--job" in arguments)
    # In a rehearsal one process stands for all that share a stage's layers.
    groups = _groups(plan.scenario.cluster, listed_ranks(plan) if rehearse else range(count))
    return LaunchJob(
        name=slug(plan.scenario.name),
        groups=tuple(replace(group, device="cpu") for group in groups) if rehearse else groups,
        plan_path=plan_path,
        arguments=arguments,
        setup=setup,
        rehearsed=rehearse,
        restarts=restarts,
    )


def _groups(cluster: Cluster, ranks: Iterable[int]) -> tuple[NodeGroup, ...]:
    """Nodes that hold these ranks, equal neighbours together."""
    pool_of_node = [index for index, pool in enumerate(cluster.pools) for _ in range(pool.nodes)]
    groups: list[NodeGroup] = []
    for node, processes in sorted(Counter(map(cluster.node_of, ranks)).items()):
        pool = pool_of_node[node]
        last = groups[-1] if groups else None
        if last is not None and (last.pool, last.processes) == (pool, processes):
            groups[-1] = replace(last, nodes=last.nodes + 1)
            continue
        kind = cluster.pools[pool]
        name = re.sub(r"[^\w.-]+", "-", kind.device.name).strip("-._")[:_LONGEST_NAME] or "device"
        groups.append(NodeGroup(nodes=1, processes=processes, devices=kind.devices_per_node, device=name, pool=pool))
    return tuple(groups)


def slug(name: str) -> str:
    """A name that Slurm, Kubernetes and file systems take: lower-case letters, digits and single hyphens."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower())[:_LONGEST_NAME].strip("-")
    return f"mmplan-{plain}" if plain else "mmplan"


def node_body(job: LaunchJob, *, join_timeout_s: int | None = None) -> str:
    """Bash that runs a node's part; its positional parameters are the plan and the options of `mmplan execute`.

    With several nodes it needs `node_rank`, MASTER_ADDR and MASTER_PORT. A failed rank ends the run everywhere, so that
    every node's torchrun starts its part again.
    """
    run = f'    --max-restarts {job.restarts} -m mmplan execute "$@"'
    # Activation scripts read variables that need not be set.
    lines = [*(["set +u", *job.setup, "set -u"] if job.setup else []), "export OMP_NUM_THREADS=1"]
    if job.nodes == 1:
        # The loopback address spares look-ups of the machine's name.
        start = f"exec torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node {job.processes} \\"
        return "\n".join([*lines, start, run])
    lines.append(f"nproc={job.groups[0].processes}")
    first = 0
    for before, group in zip(job.groups, job.groups[1:], strict=False):
        first += before.nodes
        if group.processes != before.processes:
            lines.append(f'if [ "$node_rank" -ge {first} ]; then nproc={group.processes}; fi')
    timeout = "" if join_timeout_s is None else f" --rdzv-conf timeout={join_timeout_s}"
    start = f'exec torchrun --nnodes {job.nodes} --nproc-per-node "$nproc" --node-rank "$node_rank" \\'
    meet = f'    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"{timeout} \\'
    return "\n".join([*lines, start, meet, run])


def execute_arguments(job: LaunchJob, plan: str) -> str:
    """Positional parameters of `node_body`; `plan` is a shell word."""
    return " ".join([plan, *map(quote, job.arguments)])


def head(job: LaunchJob, what: str) -> str:
    """The comment on top of a file."""
    kinds = ", then ".join(f"{group.nodes} x {group.processes} on {group.device}" for group in job.groups[:4])
    kinds += " ..." if len(job.groups) > 4 else ""
    many = f"{job.processes:,} processes on {counted(job.nodes, 'node')} ({kinds})"
    return f"# {what} of an mmplan plan: {many}, ranks node by node."
