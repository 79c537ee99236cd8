"""Manifests for Kubernetes: an Indexed Job whose pods are the nodes of a run, and the same for Kubeflow's operators.

A pod takes a node's number from its completion index; a headless service gives pod 0 the name that the others meet at
(kubernetes.io/docs/concepts/workloads/controllers/job, "Job with Pod-to-Pod Communication"). The plan travels in a
config map. Kubeflow names the same things by variables: RANK, MASTER_ADDR, MASTER_PORT of a PyTorchJob
(kubeflow/training-operator v1.9, pkg/controller.v1/pytorch/envvar.go), PET_NODE_RANK and the like of a TrainJob
(kubeflow/trainer v2, pkg/runtime/framework/plugins/torch).
"""

from typing import Any

import yaml

from mmplan.errors import CheckError
from mmplan.planner.formats.exported import Exported
from mmplan.runtime.formats.job import LaunchJob, NodeGroup, execute_arguments, head, node_body
from mmplan.runtime.formats.torchrun_script import PORT

PLAN_FOLDER = "/etc/mmplan"
PLAN_FILE = "plan.json"
LABEL = "mmplan/job"
POOL_LABEL = "mmplan/pool"
IMAGE = "IMAGE_WITH_MMPLAN"
_MOST_CONFIG_BYTES = 1_000_000  # a config map holds 1 MiB (kubernetes.io/docs/concepts/configuration/configmap)
_JOIN_TIMEOUT_S = 3600  # nodes wait for the last one to have pulled its image

Manifest = dict[str, Any]


def kubernetes_manifests(job: LaunchJob, plan_text: str, image: str = IMAGE) -> Exported:
    """`kubectl apply -f` of one of the files.

    Raises:
        CheckError: the plan is too long for a config map.
    """
    size = len(plan_text.encode())
    if size > _MOST_CONFIG_BYTES:
        raise CheckError(
            f"the plan has {size:,} bytes and a config map takes {_MOST_CONFIG_BYTES:,}: put it on a volume and run "
            "the torchrun script (mmplan launch PLAN --for torchrun) in your own manifest"
        )
    what = head(job, "The pods")
    plan = _plan_map(job, plan_text)
    files = {"job.yaml": _text(what, [plan, _service(job), *_jobs(job, image)])}
    notes = [f"kubectl apply -f job.yaml; results stay in pod {_pod_zero(job)} unless -o names a file on a volume"]
    if image == IMAGE:
        notes.append(f"write an image that holds mmplan and torch in place of {IMAGE}, or give --image")
    if job.alike:
        files["pytorchjob.yaml"] = _text(what, [plan, _pytorch_job(job, image)])
        files["trainjob.yaml"] = _text(what, [plan, _train_job(job, image)])
        notes.append("pytorchjob.yaml (Kubeflow training-operator v1) and trainjob.yaml (trainer v2) say the same")
    else:
        kinds = ", ".join(dict.fromkeys(group.device for group in job.groups))
        notes.append(f"label the nodes by pool: kubectl label node NODE {POOL_LABEL}=DEVICE, with DEVICE of {kinds}")
        notes.append("no pytorchjob.yaml and trainjob.yaml: the pods of a role are of one kind there")
    return Exported(target="kubernetes", version="Kubernetes 1.28 and later", files=files, notes=tuple(notes))


class _Dumper(yaml.SafeDumper):
    """Scripts as blocks of lines."""


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _string)


def _text(what: str, documents: list[Manifest]) -> str:
    texts = [yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120) for document in documents]
    return f"{what}\n" + "---\n".join(texts)


def _plan_map(job: LaunchJob, plan_text: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job.name}-plan"},
        "data": {PLAN_FILE: plan_text},
    }


def _service(job: LaunchJob) -> Manifest:
    """Names of pods resolve before they are ready, because each waits for the others."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {LABEL: job.name}},
    }


def _parts(job: LaunchJob) -> list[list[NodeGroup]]:
    """Neighbouring nodes of one pool; all nodes at once where they are of one kind."""
    if job.alike:
        return [list(job.groups)]
    pools = dict.fromkeys(group.pool for group in job.groups)
    return [[group for group in job.groups if group.pool == pool] for pool in pools]


def _part_name(job: LaunchJob, part: int) -> str:
    return job.name if job.alike else f"{job.name}-{part}"


def _pod_zero(job: LaunchJob) -> str:
    return f"{_part_name(job, 0)}-0"


def _jobs(job: LaunchJob, image: str) -> list[Manifest]:
    """A job for each kind of node; none is tried again, because a failed rank ends the run."""
    jobs, first = [], 0
    for part, groups in enumerate(_parts(job)):
        nodes = sum(group.nodes for group in groups)
        rank = "node_rank=$JOB_COMPLETION_INDEX" if first == 0 else f"node_rank=$(({first} + JOB_COMPLETION_INDEX))"
        meet = [rank, f"export MASTER_ADDR={_pod_zero(job)}.{job.name} MASTER_PORT={PORT}"]
        selector = {} if job.alike else {"nodeSelector": {POOL_LABEL: groups[0].device}}
        pod = {
            "subdomain": job.name,
            "restartPolicy": "Never",
            **selector,
            "containers": [{"name": "mmplan", "image": image, **_container(job, groups, meet)}],
            "volumes": _volumes(job),
        }
        spec = {
            "completions": nodes,
            "parallelism": nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"metadata": {"labels": {LABEL: job.name}}, "spec": pod},
        }
        jobs.append(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": _part_name(job, part)}, "spec": spec}
        )
        first += nodes
    return jobs


def _container(job: LaunchJob, groups: list[NodeGroup], meet: list[str]) -> Manifest:
    return {
        "command": _command(job, meet),
        "resources": _resources(groups),
        "volumeMounts": _mounts(),
    }


def _command(job: LaunchJob, meet: list[str]) -> list[str]:
    lines = ["set -euo pipefail", *(meet if job.nodes > 1 else [])]
    lines += [f"set -- {execute_arguments(job, f'{PLAN_FOLDER}/{PLAN_FILE}')}"]
    return ["bash", "-c", "\n".join([*lines, node_body(job, join_timeout_s=_JOIN_TIMEOUT_S)])]


def _resources(groups: list[NodeGroup]) -> Manifest:
    count = max(group.processes for group in groups)
    if groups[0].on_cpu:
        return {"requests": {"cpu": str(count)}, "limits": {"cpu": str(count)}}
    vendor = "amd.com" if groups[0].device.startswith("mi") else "nvidia.com"
    return {"limits": {f"{vendor}/gpu": str(count)}}


def _mounts() -> list[Manifest]:
    return [{"name": "plan", "mountPath": PLAN_FOLDER, "readOnly": True}, {"name": "shm", "mountPath": "/dev/shm"}]


def _volumes(job: LaunchJob) -> list[Manifest]:
    """The plan, and memory that NCCL's processes of a pod share, of which containers get 64 MB otherwise."""
    return [
        {"name": "plan", "configMap": {"name": f"{job.name}-plan"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def _pytorch_job(job: LaunchJob, image: str) -> Manifest:
    """The operator's RANK is the node's number: 0 of the master, from 1 on of the workers."""
    meet = ["node_rank=$RANK"]
    container = {"name": "pytorch", "image": image, **_container(job, list(job.groups), meet)}  # the name is prescribed
    template = {"spec": {"containers": [container], "volumes": _volumes(job)}}

    def role(replicas: int) -> Manifest:
        return {"replicas": replicas, "restartPolicy": "Never", "template": template}

    roles = {"Master": role(1)} | ({"Worker": role(job.nodes - 1)} if job.nodes > 1 else {})
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name},
        "spec": {"runPolicy": {"backoffLimit": 0, "cleanPodPolicy": "Running"}, "pytorchReplicaSpecs": roles},
    }


def _train_job(job: LaunchJob, image: str) -> Manifest:
    """On the runtime that the trainer brings along; its pods and their container are called `node`."""
    meet = ["node_rank=$PET_NODE_RANK", "export MASTER_ADDR=$PET_MASTER_ADDR MASTER_PORT=$PET_MASTER_PORT"]
    pod = {"containers": [{"name": "node", "volumeMounts": _mounts()}], "volumes": _volumes(job)}
    patch = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": image,
                "command": _command(job, meet),
                "numNodes": job.nodes,
                "resourcesPerNode": _resources(list(job.groups)),
            },
            "runtimePatches": [{"manager": "mmplan.io/export", "trainingRuntimeSpec": {"template": {"spec": patch}}}],
        },
    }
