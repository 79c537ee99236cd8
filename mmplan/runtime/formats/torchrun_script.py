"""A script that starts a node's part of a run by torchrun, one call on each node."""

from shlex import quote

from mmplan.planner.formats.exported import Exported
from mmplan.runtime.formats.job import LaunchJob, execute_arguments, head, node_body

PORT = 29500  # torchrun's default


def torchrun_script(job: LaunchJob, hosts: tuple[str, ...] = ()) -> Exported:
    """`bash run.sh [NODE_RANK [MASTER_ADDR]]`; with hosts it finds both by this host's name.

    Args:
        hosts: in the order of the plan's nodes; empty: unknown.
    """
    lines = ["#!/bin/bash", head(job, "The launch script"), "set -euo pipefail"]
    lines += _meeting(job, hosts) if job.nodes > 1 else []
    lines += [f"set -- {execute_arguments(job, quote(job.plan_path))}", node_body(job)]
    notes = []
    if job.nodes > 1 and not hosts:
        notes.append(f"on each of the {job.nodes} nodes: bash run.sh NODE_RANK MASTER_ADDR, ranks 0 to {job.nodes - 1}")
    elif job.nodes > 1:
        notes.append(f"on each of the {job.nodes} hosts: bash run.sh")
    return Exported(
        target="torchrun",
        version="torchrun of torch 2.9 to 2.13",
        files={"run.sh": "\n".join(lines) + "\n"},
        notes=tuple(notes),
    )


def _meeting(job: LaunchJob, hosts: tuple[str, ...]) -> list[str]:
    port = f"MASTER_PORT=${{MASTER_PORT:-{PORT}}}"
    if not hosts:
        usage = f"usage: bash $0 NODE_RANK MASTER_ADDR, NODE_RANK from 0 to {job.nodes - 1}"
        return [
            f'node_rank=${{1:?"{usage}"}}',
            f'MASTER_ADDR=${{2:?"{usage}"}}',
            port,
            f'if ! [[ $node_rank =~ ^[0-9]+$ ]] || [ "$node_rank" -ge {job.nodes} ]; then',
            f'    echo "{usage}" >&2; exit 2',
            "fi",
        ]
    return [
        f"hosts=({' '.join(map(quote, hosts[: job.nodes]))})",
        "node_rank=${1:-}",
        'for index in "${!hosts[@]}"; do',
        '    for own in "$(hostname)" "$(hostname -f 2>/dev/null || true)" "$(hostname -s 2>/dev/null || true)"; do',
        '        if [ -z "$node_rank" ] && [ "${hosts[$index]}" = "$own" ]; then node_rank=$index; fi',
        "    done",
        "done",
        'if [ -z "$node_rank" ]; then',
        '    echo "$(hostname) is none of the hosts of this run: ${hosts[*]}; give its place: bash $0 NODE_RANK" >&2',
        "    exit 2",
        "fi",
        "MASTER_ADDR=${2:-${hosts[0]}}",
        port,
    ]
