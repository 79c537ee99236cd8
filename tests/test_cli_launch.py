"""`mmplan launch` and the matrix of `mmplan export` as a user runs them."""

import json
from pathlib import Path

import pytest
from command_runs import mmplan

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launch")
    tiny = str(ROOT / "scenarios" / "tiny.yaml")
    assert mmplan("optimize", tiny, "-o", "a plan.json", "--naive", cwd=path).returncode == 0
    return path


def test_a_script_is_printed_or_written(folder: Path) -> None:
    printed = mmplan("launch", "a plan.json", "--", "--steps", "2", cwd=folder)
    assert "set -- 'a plan.json' --steps 2" in printed.stdout
    assert mmplan("launch", "a plan.json", "-o", "run.sh", "--", "--steps", "2", cwd=folder).returncode == 0
    script = (folder / "run.sh").read_text()
    assert all(line in printed.stdout for line in script.splitlines())


def test_manifests_go_to_a_folder(folder: Path) -> None:
    done = mmplan("launch", "a plan.json", "--for", "kubernetes", "--image", "my/image:1", "-o", "k8s", cwd=folder)
    assert done.returncode == 0
    assert {path.name for path in (folder / "k8s").iterdir()} == {"job.yaml", "pytorchjob.yaml", "trainjob.yaml"}
    assert "image: my/image:1" in (folder / "k8s" / "job.yaml").read_text()


def test_the_document_counts_nodes_and_processes(folder: Path) -> None:
    document = json.loads(mmplan("launch", "a plan.json", "--for", "slurm", "--json", "-", cwd=folder).stdout)
    assert (document["schema"], document["nodes"], document["processes"]) == ("mmplan.launch/1", 1, 4)
    assert document["groups"] == [{"nodes": 1, "processes": 4, "device": "cpu-core"}]
    assert "#SBATCH --nodes=1" in document["files"]["job.sbatch"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--for", "slum"), "did you mean 'slurm'?"),
        (("--nodes", "2"), "--nodes 2 has 2 nodes, cluster cpu-core-1x4 has 1 node x 4"),
        (("--", "--stepz", "3"), "No such option"),
        (("--", "--steps", "x"), "valid integer"),
        (("--", "--local", "4"), "--local starts processes on this machine"),
        (("--", "other.json"), "other.json"),
        (("--", "--help"), "run mmplan execute --help"),
        (("--hosts", "missing"), "missing"),
    ],
)
def test_what_cannot_be_launched_is_one_sentence(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    done = mmplan("launch", "a plan.json", *arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_job_of_slurm_that_does_not_fit_is_refused_from_within(folder: Path) -> None:
    job = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "3"}
    assert "Slurm job 5 has 3 nodes" in mmplan("launch", "a plan.json", cwd=folder, **job).stderr
    assert mmplan("launch", "a plan.json", "--for", "kubernetes", cwd=folder, **job).returncode == 0


def test_the_matrix_is_printed_with_what_decides(folder: Path) -> None:
    done = mmplan("export", "a plan.json", "--matrix", cwd=folder)
    assert done.returncode == 0
    assert "what decides" in done.stdout
    assert "Accelerate cannot" not in done.stdout  # refusals are lines of the table, no error
    document = json.loads(mmplan("export", "a plan.json", "--matrix", "--json", "-", cwd=folder).stdout)
    assert document["schema"] == "mmplan.matrix/1"
    by_name = {entry["target"]: entry for entry in document["targets"]}
    assert by_name["mmplan"]["readiness"] == 1
    assert by_name["Accelerate"]["decides"].startswith("pipeline stages (pp=")


@pytest.mark.parametrize("arguments", [(), ("--matrix", "--to", "jax"), ("--matrix", "-o", "x")])
def test_an_export_is_of_a_target_or_the_matrix(folder: Path, arguments: tuple[str, ...]) -> None:
    done = mmplan("export", "a plan.json", *arguments, cwd=folder)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "expected --to TARGET" in done.stderr
