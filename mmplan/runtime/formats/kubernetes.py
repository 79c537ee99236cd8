"""Manifests for Kubernetes: an Indexed Job whose pods are the nodes of a run, and the same for Kubeflow's operators.

A pod takes a node's number from its completion index; a headless service gives pod 0 the name that the others meet at
(kubernetes.io/docs/concepts/workloads/controllers/job, "Job with Pod-to-Pod Communication"). The plan travels in a
config map. Kubeflow names the same things by variables: RANK, MASTER_ADDR, MASTER_PORT of a PyTorchJob
(kubeflow/training-operator v1.9, pkg/controller.v1/pytorch/envvar.go), PET_NODE_RANK and the like of a TrainJob
(kubeflow/trainer v2, pkg/runtime/framework/plugins/torch).
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import yaml

from mmplan.errors import CheckError, InputError
from mmplan.planner.formats.exported import Exported
from mmplan.runtime.formats.job import LaunchJob, NodeGroup, execute_arguments, head, node_body
from mmplan.runtime.formats.torchrun_script import PORT

PLAN_FOLDER = "/etc/mmplan"
PLAN_FILE = "plan.json"
LABEL = "mmplan/job"
POOL_LABEL = "mmplan/pool"
IMAGE = "IMAGE_WITH_MMPLAN"
WORK_FOLDER = "/workspace"
_MOST_CONFIG_BYTES = 1_000_000  # a config map holds 1 MiB (kubernetes.io/docs/concepts/configuration/configmap)
_JOIN_TIMEOUT_S = 3600  # nodes wait for the last one to have pulled its image

Manifest = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """What its containers run: `image`, and a volume claim to work in, empty: none. `plan`: where the plan lies."""

    image: str
    claim: str
    plan: str


def kubernetes_manifests(job: LaunchJob, plan_text: str, image: str = IMAGE, claim: str = "") -> Exported:
    """`kubectl apply -f` of one of the files.

    Args:
        claim: a volume claim that all pods can write to; the run works there.

    Raises:
        InputError: an image or a claim that can be none.
        CheckError: the plan is too long for a config map, and there is no claim to put it on.
    """
    _require_names(image, claim)
    size, notes = len(plan_text.encode()), list[str]()
    pod = Pod(image=image, claim=claim, plan=f"{PLAN_FOLDER}/{PLAN_FILE}")
    if size > _MOST_CONFIG_BYTES:
        if not claim:
            raise CheckError(
                f"the plan has {size:,} bytes and a config map takes {_MOST_CONFIG_BYTES:,}: put it on a volume, and "
                "name its claim: mmplan launch PLAN --for kubernetes --claim NAME"
            )
        pod = replace(pod, plan=f"{WORK_FOLDER}/{PLAN_FILE}")
        notes.append(f"a config map cannot hold the plan: copy it to {PLAN_FILE} on the volume of claim {claim}")
    what, carried = head(job, "The pods"), [] if notes else [_plan_map(job, plan_text)]
    files = {"job.yaml": _text(what, [*carried, _service(job), *_jobs(job, pod)])}
    where = f"on the volume of claim {claim}" if claim else f"in pod {_pod_zero(job)}: --claim NAME keeps them"
    notes.append(f"kubectl apply -f job.yaml; results are {where}")
    if image == IMAGE:
        notes.append(f"write an image that holds mmplan and torch in place of {IMAGE}, or give --image")
    if job.alike:
        files["pytorchjob.yaml"] = _text(what, [*carried, _pytorch_job(job, pod)])
        files["trainjob.yaml"] = _text(what, [*carried, _train_job(job, pod)])
        notes.append("pytorchjob.yaml (Kubeflow training-operator v1) and trainjob.yaml (trainer v2) say the same")
    else:
        kinds = ", ".join(dict.fromkeys(group.device for group in job.groups))
        notes.append(f"label the nodes by pool: kubectl label node NODE {POOL_LABEL}=DEVICE, with DEVICE of {kinds}")
        notes.append("no pytorchjob.yaml and trainjob.yaml: the pods of a role are of one kind there")
    return Exported(target="kubernetes", version="Kubernetes 1.28 and later", files=files, notes=tuple(notes))


def _require_names(image: str, claim: str) -> None:
    if not re.fullmatch(r"[\w.:/@-]{1,512}", image):
        raise InputError(f"--image {image[:80]!r}: expected the name of an image, such as registry/team/mmplan:1")
    if claim and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", claim):
        raise InputError(f"--claim {claim[:80]!r}: expected the name of a volume claim: small letters, digits, - and .")


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


def _jobs(job: LaunchJob, pod: Pod) -> list[Manifest]:
    """A job for each kind of node. A failed rank ends all pods; where the run is started again, all are."""
    jobs, first = [], 0
    for part, groups in enumerate(_parts(job)):
        nodes = sum(group.nodes for group in groups)
        rank = "node_rank=$JOB_COMPLETION_INDEX" if first == 0 else f"node_rank=$(({first} + JOB_COMPLETION_INDEX))"
        meet = [rank, f"export MASTER_ADDR={_pod_zero(job)}.{job.name} MASTER_PORT={PORT}"]
        selector = {} if job.alike else {"nodeSelector": {POOL_LABEL: groups[0].device}}
        template = {
            "subdomain": job.name,
            "restartPolicy": "Never",
            **selector,
            "containers": [{"name": "mmplan", **_container(job, pod, groups, meet)}],
            "volumes": _volumes(job, pod),
        }
        spec = {
            "completions": nodes,
            "parallelism": nodes,
            "completionMode": "Indexed",
            "backoffLimit": job.restarts * job.nodes,
            "template": {"metadata": {"labels": {LABEL: job.name}}, "spec": template},
        }
        jobs.append(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": _part_name(job, part)}, "spec": spec}
        )
        first += nodes
    return jobs


def _container(job: LaunchJob, pod: Pod, groups: list[NodeGroup], meet: list[str]) -> Manifest:
    return {
        "image": pod.image,
        "command": _command(job, pod, meet),
        "resources": _resources(groups),
        "volumeMounts": _mounts(pod),
    }


def _command(job: LaunchJob, pod: Pod, meet: list[str]) -> list[str]:
    lines = ["set -euo pipefail", *([f"cd {WORK_FOLDER}"] if pod.claim else []), *(meet if job.nodes > 1 else [])]
    lines += [f"set -- {execute_arguments(job, pod.plan)}"]
    # Pods are started again by Kubernetes, all of them: a torchrun that restarts would count otherwise than a new one.
    body = node_body(replace(job, restarts=0), join_timeout_s=_JOIN_TIMEOUT_S)
    return ["bash", "-c", "\n".join([*lines, body])]


def _resources(groups: list[NodeGroup]) -> Manifest:
    count = max(group.processes for group in groups)
    if groups[0].on_cpu:
        return {"requests": {"cpu": str(count)}, "limits": {"cpu": str(count)}}
    vendor = "amd.com" if groups[0].device.startswith("mi") else "nvidia.com"
    return {"limits": {f"{vendor}/gpu": str(count)}}


def _mounts(pod: Pod) -> list[Manifest]:
    return [{"name": name, **mount} for name, mount, _ in _places("", pod)]


def _volumes(job: LaunchJob, pod: Pod) -> list[Manifest]:
    return [{"name": name, **volume} for name, _, volume in _places(f"{job.name}-plan", pod)]


def _places(plan_map: str, pod: Pod) -> list[tuple[str, Manifest, Manifest]]:
    """Name, mount and volume: memory that NCCL's processes of a pod share, of which containers get 64 MB otherwise; the
    plan; what the run writes."""
    places: list[tuple[str, Manifest, Manifest]] = []
    places.append(("shm", {"mountPath": "/dev/shm"}, {"emptyDir": {"medium": "Memory"}}))
    if pod.plan.startswith(PLAN_FOLDER):
        places.append(("plan", {"mountPath": PLAN_FOLDER, "readOnly": True}, {"configMap": {"name": plan_map}}))
    if pod.claim:
        volume = {"persistentVolumeClaim": {"claimName": pod.claim}}
        places.append(("work", {"mountPath": WORK_FOLDER}, volume))
    return places


def _pytorch_job(job: LaunchJob, pod: Pod) -> Manifest:
    """The operator's RANK is the node's number: 0 of the master, from 1 on of the workers."""
    meet = ["node_rank=$RANK"]
    container = {"name": "pytorch", **_container(job, pod, list(job.groups), meet)}  # the name is prescribed
    template = {"spec": {"containers": [container], "volumes": _volumes(job, pod)}}

    def role(replicas: int) -> Manifest:
        return {"replicas": replicas, "restartPolicy": "OnFailure" if job.restarts else "Never", "template": template}

    roles = {"Master": role(1)} | ({"Worker": role(job.nodes - 1)} if job.nodes > 1 else {})
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name},
        "spec": {
            "runPolicy": {"backoffLimit": job.restarts * job.nodes, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": roles,
        },
    }


def _train_job(job: LaunchJob, pod: Pod) -> Manifest:
    """On the runtime that the trainer brings along; its pods and their container are called `node`."""
    meet = ["node_rank=$PET_NODE_RANK", "export MASTER_ADDR=$PET_MASTER_ADDR MASTER_PORT=$PET_MASTER_PORT"]
    spec = {"containers": [{"name": "node", "volumeMounts": _mounts(pod)}], "volumes": _volumes(job, pod)}
    patch = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": spec}}}}]}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": pod.image,
                "command": _command(job, pod, meet),
                "numNodes": job.nodes,
                "resourcesPerNode": _resources(list(job.groups)),
            },
            "runtimePatches": [{"manager": "mmplan.io/export", "trainingRuntimeSpec": {"template": {"spec": patch}}}],
        },
    }
