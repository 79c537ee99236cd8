"""Slurm's controller, the schemas of Kubernetes and Kubeflow's own types read the launch files of plans."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from launcher_plans import CASES, files
from slurm_controller import controller, missing, shown_to_slurm

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if missing():
        pytest.skip(missing())
    with controller(tmp_path_factory.mktemp("slurm")) as config:
        yield config


@pytest.mark.parametrize("case", CASES)
def test_slurm_would_start_the_job(case: str, slurm: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(files(CASES[case], "slurm")["job.sbatch"])
    done = shown_to_slurm(slurm, script)
    assert done.returncode == 0, done.stderr


def test_slurm_refuses_what_its_nodes_do_not_have(slurm: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    right = files(CASES["unlike pools"], "slurm")["job.sbatch"]
    for wrong in (
        right.replace("a100:2", "a100:9"),
        right.replace("--nodes=2", "--nodes=200"),
        right.replace("a1", "b1"),
    ):
        script.write_text(wrong)
        assert shown_to_slurm(slurm, script).returncode != 0


def documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def refused(document: dict[str, Any]) -> str:
    """What the schemas of Kubernetes say against a document, unknown fields included; empty: nothing."""
    import kubernetes_validate

    try:
        kubernetes_validate.validate(document, "1.30", strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return ""


@pytest.mark.parametrize("case", CASES)
def test_the_manifests_are_of_kubernetes_schema(case: str) -> None:
    made = documents(files(CASES[case], "kubernetes")["job.yaml"])
    assert [document["kind"] for document in made][:2] == ["ConfigMap", "Service"]
    assert [refused(document) for document in made] == [""] * len(made)


def test_an_unknown_field_would_be_seen() -> None:
    *_, job = documents(files(CASES["one node"], "kubernetes")["job.yaml"])
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = []
    assert refused(job)


def test_the_pods_of_kubeflows_jobs_are_of_kubernetes_schema() -> None:
    made = files(CASES["equal nodes"], "kubernetes")
    _, pytorch = documents(made["pytorchjob.yaml"])
    for role in pytorch["spec"]["pytorchReplicaSpecs"].values():
        template = {"spec": {**role["template"]["spec"], "restartPolicy": role["restartPolicy"]}}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": {"template": template}}
        assert refused(job) == ""
    _, train = documents(made["trainjob.yaml"])
    (patch,) = train["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    spec = patch["template"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    trainer = train["spec"]["trainer"]
    container |= {"image": trainer["image"], "command": trainer["command"], "resources": trainer["resourcesPerNode"]}
    template = {"spec": {**spec, "restartPolicy": "Never"}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": {"template": template}}
    assert refused(job) == ""


@pytest.mark.parametrize("case", ["one node", "equal nodes", "a last node in part"])
def test_the_trainers_own_type_reads_all_of_a_train_job(case: str) -> None:
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    _, made = documents(files(CASES[case], "kubernetes")["trainjob.yaml"])
    assert TrainerV1alpha1TrainJob.from_dict(made).to_dict() == made
