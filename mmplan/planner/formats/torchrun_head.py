"""Lines of a script that starts a plan by torchrun on each node, as many processes as the node has devices."""

from itertools import groupby

from mmplan.planner.plan import Plan

HEADER = "#!/usr/bin/env bash"


def title(plan: Plan, target: str) -> str:
    """One line that says what a file was made of."""
    degrees = f"tp {plan.tp}, cp {plan.cp}, pp {plan.pp}, dp {plan.dp}"
    experts = f", ep {plan.ep}" if plan.ep > 1 else ""
    name = " ".join(plan.scenario.name.split())  # of one line, as the comment it stands in
    return f"{name} for {target}: {degrees}{experts}; scenario {plan.scenario_hash}"


def processes_per_node(plan: Plan) -> tuple[tuple[int, int], ...]:
    """(neighbouring nodes, processes on each), in the order of ranks."""
    counts, left = [], plan.world
    for pool in plan.scenario.cluster.pools:
        for _ in range(pool.nodes):
            if left > 0:
                counts.append(min(left, pool.devices_per_node))
                left -= counts[-1]
    return tuple((len(list(run)), count) for count, run in groupby(counts))


def torchrun_lines(plan: Plan) -> list[str]:
    """Bash that sets the array TORCHRUN; launchers set NODE_RANK, MASTER_ADDR and MASTER_PORT."""
    groups = processes_per_node(plan)
    nodes = sum(count for count, _ in groups)
    lines = ["NODE_RANK=${NODE_RANK:-0}", f"NPROC={groups[0][1]}"]
    first = groups[0][0]
    for count, processes in groups[1:]:
        lines.append(f"if (( NODE_RANK >= {first} )); then NPROC={processes}; fi")
        first += count
    where = "--master-addr ${MASTER_ADDR:-localhost} --master-port ${MASTER_PORT:-29500}"
    return [*lines, f'TORCHRUN=(torchrun --nnodes {nodes} --nproc-per-node "$NPROC" --node-rank "$NODE_RANK" {where})']
