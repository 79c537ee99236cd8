"""Are the machines at hand those that a plan was made for? Sentences with the arithmetic where they are not."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.runtime.formats.job import LaunchJob
from mmplan.scenario.catalogue import device_names
from mmplan.scenario.document import counted
from mmplan.scenario.formats.hostfile import listed_hosts

_GRES = re.compile(r"(?:gres[/:])?(?:gpu[:=])?(?:(?P<kind>[A-Za-z][\w.-]*):)?(?P<count>\d{1,4})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Nodes in their order; `devices` of each, None where unknown. `source` says where that is from.

    `kind`: what the cluster calls its GPUs, empty: unknown. `hosts`: names of the nodes, empty: unknown.
    """

    source: str
    devices: tuple[int | None, ...]
    kind: str = ""
    hosts: tuple[str, ...] = ()


def require_machines(plan: Plan, job: LaunchJob, machines: Machines) -> None:
    """Refuse machines that the plan was not made for.

    Nodes of the plan's cluster that the plan leaves idle need not be there. A rehearsal needs as many nodes alone.

    Raises:
        InputError: another number of nodes, other devices, or nodes in another order, with what a run would lose.
    """
    if job.rehearsed:
        if len(machines.devices) < job.nodes:
            raise InputError(f"{machines.source} has {_nodes(machines.devices)}, the rehearsal starts on {job.nodes}")
        return
    told = next(_differences(plan, job, machines), None)
    if told is not None:
        raise InputError(
            f"the plan was made for other machines: {told}; write the machines into the scenario's `cluster` and "
            "optimize again"
        )


def _differences(plan: Plan, job: LaunchJob, machines: Machines) -> Iterator[str]:
    cluster = plan.scenario.cluster
    wanted = [pool.devices_per_node for pool in cluster.pools for _ in range(pool.nodes)]
    kinds = [pool.device.name for pool in cluster.pools for _ in range(pool.nodes)]
    found = len(machines.devices)
    if not job.nodes <= found <= len(wanted):
        least = "" if job.nodes == len(wanted) else f", of which the plan uses {job.nodes}"
        yield (f"{machines.source} has {_nodes(machines.devices)}, cluster {cluster.name} has {_nodes(wanted)}{least}")
    # Nodes that run fewer processes than they have devices may have that few.
    used = [group.processes for group in job.groups for _ in range(group.nodes)]
    for place, (have, want) in enumerate(zip(machines.devices, wanted, strict=False)):
        busy = used[place] if place < job.nodes else 0
        if have is None or have == want or (have == busy and job.nodes == 1):
            continue
        across = f", and tp={plan.tp} ranks would lie on two nodes" if have % plan.tp else ""
        yield (
            f"node {place} of {machines.source} has {counted(have, 'device')}, and of cluster {cluster.name} "
            f"{want} ({_nodes(machines.devices)} = {sum(filter(None, machines.devices))} against {_nodes(wanted)} = "
            f"{sum(wanted)}){across}"
        )
    for kind in dict.fromkeys(kinds[: job.nodes]):
        if _other_kind(machines.kind, kind):
            yield f"the GPUs of {machines.source} are called '{machines.kind}', those of the plan are {kind}"


def _nodes(devices: Sequence[int | None]) -> str:
    """`2 nodes x 8 + 1 node x 4`."""
    runs = [(value, len(list(run))) for value, run in groupby(devices)]
    parts = [counted(count, "node") + ("" if value is None else f" x {value}") for value, count in runs]
    shown = parts if len(parts) <= 4 else [*parts[:3], "..."]
    return " + ".join(shown) or "no nodes"


def _other_kind(found: str, wanted: str) -> bool:
    """Whether a name that a site gave its GPUs is surely that of another device: it holds the name of one."""
    words = set(re.findall(r"[a-z]+\d+[a-z]*", found.lower()))
    known = {name.split("-")[0] for name in device_names()}
    named = words & known
    return bool(named) and wanted.split("-")[0] not in named


def found_machines(
    plan: Plan, hosts: Path | None, nodes: int | None, gpus_per_node: int | None, environment: Mapping[str, str]
) -> Machines | None:
    """What is known of the machines: by a file of hosts, by numbers, or by the Slurm job that this process runs in.

    Raises:
        InputError: the file is no list of hosts, or numbers are given beside it.
    """
    if hosts is not None and nodes is not None:
        raise InputError("--hosts names the nodes, --nodes counts them: give one of both")
    if hosts is not None:
        return _listed(hosts, gpus_per_node)
    given = given_machines(nodes, gpus_per_node, plan)
    on_cpu = all(pool.device.name.startswith("cpu") for pool in plan.scenario.cluster.pools)
    return given if given is not None else slurm_machines(environment, on_cpu=on_cpu)


def _listed(path: Path, gpus_per_node: int | None) -> Machines:
    slots = listed_hosts(path)
    devices = tuple(count if gpus_per_node is None else gpus_per_node for count in slots.values())
    return Machines(source=str(path), devices=devices, hosts=tuple(slots))


def given_machines(nodes: int | None, gpus_per_node: int | None, plan: Plan) -> Machines | None:
    """What `--nodes` and `--gpus-per-node` say; what they leave out is as in the plan. None: they say nothing."""
    if nodes is None and gpus_per_node is None:
        return None
    pools = plan.scenario.cluster.pools
    count = nodes if nodes is not None else sum(pool.nodes for pool in pools)
    given = (("--nodes", nodes), ("--gpus-per-node", gpus_per_node))
    source = " ".join(f"{name} {value}" for name, value in given if value is not None)
    return Machines(source=source, devices=(gpus_per_node,) * count)


def slurm_machines(environment: Mapping[str, str], *, on_cpu: bool) -> Machines | None:
    """The job that this process runs in, component by component; None outside of one.

    Args:
        on_cpu: the plan's devices are cores, and what GPUs the job has is of no interest.

    Raises:
        InputError: a variable of Slurm holds what it cannot hold.
    """
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return None
    size = int(_number(environment, "SLURM_HET_SIZE", "1"))
    devices: list[int | None] = []
    kinds = []
    for part in range(min(size, 128)):
        suffix = f"_HET_GROUP_{part}" if size > 1 else ""
        nodes = int(_number(environment, f"SLURM_JOB_NUM_NODES{suffix}", environment.get("SLURM_NNODES", "")))
        count, kind = _gpus(environment, suffix)
        kinds.append(kind)
        devices += [None if on_cpu else count] * nodes
    kind = kinds[0] if len(set(kinds)) == 1 and not on_cpu else ""
    return Machines(source=f"Slurm job {job}", devices=tuple(devices), kind=kind)


def _number(environment: Mapping[str, str], name: str, default: str) -> str:
    value = environment.get(name, default)
    if not re.fullmatch(r"\d{1,6}", value):
        raise InputError(f"{name}={value[:40]!r}: expected a number, as Slurm sets it")
    return value


def _gpus(environment: Mapping[str, str], suffix: str) -> tuple[int | None, str]:
    """GPUs of a node and their type, of `8`, `h100:8` or `gres/gpu:h100:8`."""
    found: tuple[int | None, str] = (None, "")
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        match = _GRES.fullmatch(environment.get(f"{name}{suffix}", ""))
        if match is not None:
            found = found[0] or int(match["count"]), found[1] or match["kind"] or ""
    return found
