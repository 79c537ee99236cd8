"""Runs launch files without a cluster: stand-ins for torchrun, srun and scontrol write down what they are asked for."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_TORCHRUN = """#!/bin/bash
printf '%s\\0' "$@" > "$STUB_OUT/$(date +%s%N)-$$"
"""
_SRUN = """#!/bin/bash
while [ "$1" != bash ]; do shift; done
for ((node = 0; node < STUB_NODES; node++)); do SLURM_PROCID=$node "$@" || exit; done
"""
_SCONTROL = """#!/bin/bash
for ((node = 0; node < STUB_NODES; node++)); do echo "n$node"; done
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """One call of torchrun; `node` is 0 where it says that there is one node alone."""

    node: int
    nodes: int
    processes: int
    master: str
    restarts: int
    module: tuple[str, ...]  # -m and all behind it


def run_script(script: str, folder: Path, nodes: int, environment: Mapping[str, str] | None = None) -> list[Started]:
    """What the script starts, in the order of nodes.

    Raises:
        RuntimeError: the script fails, with what it says.
    """
    return _run(["bash", "-c", script, "script"], folder, nodes, environment or {})


def _run(command: Sequence[str], folder: Path, nodes: int, environment: Mapping[str, str]) -> list[Started]:
    stubs, out = folder / "stubs", folder / "out"
    stubs.mkdir(exist_ok=True)
    out.mkdir(exist_ok=True)
    for name, text in (("torchrun", _TORCHRUN), ("srun", _SRUN), ("scontrol", _SCONTROL)):
        path = stubs / name
        path.write_text(text)
        path.chmod(0o755)
    for old in out.iterdir():
        old.unlink()
    given = {"PATH": f"{stubs}:{os.environ['PATH']}", "STUB_OUT": str(out), "STUB_NODES": str(nodes), **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=given, cwd=folder, check=False, timeout=60)
    if done.returncode:
        raise RuntimeError(f"ended with {done.returncode}: {done.stdout}{done.stderr}")
    calls = [_started(path.read_text().split("\0")[:-1]) for path in out.iterdir()]
    return sorted(calls, key=lambda call: call.node)


def _started(words: list[str]) -> Started:
    place = words.index("-m")
    flags = [word for word in words[:place] if word != "--standalone"]
    options = dict(zip(flags[::2], flags[1::2], strict=True))
    return Started(
        node=int(options.get("--node-rank", 0)),
        nodes=int(options.get("--nnodes", 1)),
        processes=int(options["--nproc-per-node"]),
        master=options.get("--master-addr", options.get("--local-addr", "")),
        restarts=int(options["--max-restarts"]),
        module=tuple(words[place:]),
    )


def run_slurm(script: str, folder: Path, nodes: int, **environment: str) -> list[Started]:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-9]", "SLURM_JOB_NUM_NODES": str(nodes)}
    return run_script(script, folder, nodes, {**job, **environment})


def run_manifests(text: str, folder: Path) -> list[Started]:
    """What the pods of a manifest file start, with the variables that Kubernetes and Kubeflow's operators set."""
    started = []
    for document in yaml.safe_load_all(text):
        for command, variables in _pods(document):
            started += _run(command, folder, 1, variables)
    return sorted(started, key=lambda call: call.node)


def _pods(document: dict[str, Any]) -> list[tuple[list[str], dict[str, str]]]:
    spec = document.get("spec", {})
    match document["kind"]:
        case "Job":
            (container,) = spec["template"]["spec"]["containers"]
            assert spec["completions"] == spec["parallelism"]
            return [(container["command"], {"JOB_COMPLETION_INDEX": str(i)}) for i in range(spec["completions"])]
        case "PyTorchJob":
            pods, names = [], {"MASTER_ADDR": "master-0", "MASTER_PORT": "23456"}
            for role in ("Master", "Worker"):
                part = spec["pytorchReplicaSpecs"].get(role, {"replicas": 0})
                for _ in range(part["replicas"]):
                    (container,) = part["template"]["spec"]["containers"]
                    pods.append((container["command"], {"RANK": str(len(pods)), **names}))
            return pods
        case "TrainJob":
            names = {"PET_MASTER_ADDR": "node-0-0", "PET_MASTER_PORT": "29400"}
            count, command = spec["trainer"]["numNodes"], spec["trainer"]["command"]
            return [(command, {"PET_NODE_RANK": str(i), **names}) for i in range(count)]
    return []


def rank_places(started: Sequence[Started]) -> list[tuple[int, int]]:
    """(node, place in it) of every rank as torchrun deals them out: node by node."""
    assert [call.node for call in started] == list(range(started[0].nodes))
    return [(call.node, place) for call in started for place in range(call.processes)]
