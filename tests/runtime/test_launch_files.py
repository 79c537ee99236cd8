"""Launch files start every rank of a plan where the plan has it."""

import re
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from export_readers import places, same_by_kubernetes, same_by_slurm
from launcher_plans import CASES, files, plan_on, scenario_on
from launcher_stubs import Started, rank_places, run_manifests, run_script, run_slurm
from random_plans import random_plan
from tiny_plans import FOUR_STAGES, hand_plan

from mmplan.commands.execute_options import execute_options, restarts_of
from mmplan.errors import CheckError, InputError
from mmplan.planner.plan import Plan, save_plan, scenario_hash
from mmplan.runtime.formats.job import launch_job, slug
from mmplan.runtime.formats.launch_files import export_kubernetes, export_slurm, launch_files


def starts(plan: Plan, launcher: str, name: str, folder: Path, arguments: tuple[str, ...] = ()) -> list[Started]:
    text, job = files(plan, launcher, arguments=arguments)[name], launch_job(plan, "plan.json")
    if launcher == "slurm":
        return run_slurm(text, folder, job.nodes)
    if launcher == "kubernetes":
        return run_manifests(text, folder)
    if job.nodes == 1:
        return run_script(text, folder, 1)
    calls = []
    for node in range(job.nodes):
        script = f"set -- {node} first\n{text}"
        calls += run_script(script, folder, 1)
    return calls


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("launcher", "name"), [("torchrun", "run.sh"), ("slurm", "job.sbatch"), ("kubernetes", "job.yaml")]
)
def test_every_rank_starts_on_the_node_that_the_plan_has_it_on(
    case: str, launcher: str, name: str, tmp_path: Path
) -> None:
    plan, arguments = CASES[case], ("--steps", "3", "-o", "runs of 'mine'/run.json")
    started = starts(plan, launcher, name, tmp_path, arguments)
    assert rank_places(started) == places(plan)
    for call in started:
        path = "/etc/mmplan/plan.json" if launcher == "kubernetes" else "my plans/best 1.json"
        assert call.module == ("-m", "mmplan", "execute", path, *arguments)
        assert call.restarts == 0
    assert len({call.master for call in started}) == 1


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "trainjob.yaml"])
@pytest.mark.parametrize("case", ["one node", "equal nodes", "a last node in part"])
def test_the_operators_of_kubeflow_start_the_same_ranks(case: str, name: str, tmp_path: Path) -> None:
    assert rank_places(starts(CASES[case], "kubernetes", name, tmp_path)) == places(CASES[case])


def test_operators_of_one_kind_of_pod_get_no_unlike_pools() -> None:
    assert set(files(CASES["unlike pools"], "kubernetes")) == {"job.yaml"}


def test_tensor_groups_stay_in_their_node(tmp_path: Path) -> None:
    plan = replace(plan_on((4, 4), dp=4, stages=2), tp=2)
    places = rank_places(starts(plan, "slurm", "job.sbatch", tmp_path))
    for first in range(0, plan.rank_count, 2):
        assert len({node for node, _ in places[first : first + 2]}) == 1


def test_a_rehearsal_starts_a_process_for_each_tensor_group_where_that_lies(tmp_path: Path) -> None:
    plan = replace(plan_on((2, 8), dp=2, stages=2), tp=4)
    job = launch_job(plan, "plan.json", arguments=("--rehearse",), rehearse=True)
    assert [(group.nodes, group.processes) for group in job.groups] == [(2, 2)]
    assert "--cpus-per-task=2" in launch_files(plan, job, "slurm").files["job.sbatch"]


def test_a_slurm_job_of_another_size_is_ended_at_once(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the job has 3 nodes, the plan needs 4"):
        run_slurm(files(CASES["equal nodes"], "slurm")["job.sbatch"], tmp_path, 3)


def test_unlike_pools_are_components_of_one_slurm_job() -> None:
    text = files(CASES["unlike pools"], "slurm")["job.sbatch"]
    first, second = text.split("#SBATCH hetjob")
    assert "--nodes=2" in first
    assert "--gpus-per-node=h100:3" in first
    assert "--nodes=1" in second
    assert "--gpus-per-node=a100:2" in second
    assert "srun --het-group=0-1" in second


def test_a_plan_for_cores_asks_for_cores() -> None:
    plan = plan_on((2, 4), dp=2, device="cpu-core")
    assert "--cpus-per-task=4" in files(plan, "slurm")["job.sbatch"]
    (job,) = [d for d in yaml.safe_load_all(files(plan, "kubernetes")["job.yaml"]) if d["kind"] == "Job"]
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {"cpu": "4"}


def test_the_manifest_carries_the_plan() -> None:
    plan = CASES["equal nodes"]
    config, *_ = yaml.safe_load_all(files(plan, "kubernetes")["job.yaml"])
    from pydantic import TypeAdapter

    assert TypeAdapter(Plan).validate_json(config["data"]["plan.json"]).dp == plan.dp


def test_hosts_find_their_own_place_by_name(tmp_path: Path) -> None:
    plan = CASES["equal nodes"]
    hosts = ("other-1", "other-2", socket.gethostname(), "other-3")
    script = launch_files(plan, launch_job(plan, "plan.json"), "torchrun", hosts=hosts).files["run.sh"]
    (call,) = run_script(script, tmp_path, 1)
    assert (call.node, call.master) == (2, "other-1")
    strange = script.replace(shlex.quote(socket.gethostname()), "other-4")
    with pytest.raises(RuntimeError, match="is none of the hosts of this run"):
        run_script(strange, tmp_path, 1)


def test_a_node_without_its_number_is_told_how_to_start(tmp_path: Path) -> None:
    text = files(CASES["equal nodes"], "torchrun")["run.sh"]
    for words in ("", "set -- 9 first\n", "set -- x first\n"):
        with pytest.raises(RuntimeError, match="NODE_RANK from 0 to 3"):
            run_script(words + text, tmp_path, 1)


@pytest.mark.parametrize("name", ["a b", "x; rm -rf /", "$(id)", "ümläut", "\n#SBATCH --nodes=9", "", "-" * 80])
def test_names_do_not_reach_into_the_files(name: str) -> None:
    scenario = scenario_on((1, 4))
    scenario = replace(scenario, name=name)
    (pool,) = scenario.cluster.pools
    cluster = replace(scenario.cluster, pools=(replace(pool, device=replace(pool.device, name=name or "x")),))
    plan = hand_plan(replace(scenario, cluster=cluster), FOUR_STAGES)
    assert re.fullmatch(r"mmplan(-[a-z0-9]+)*", slug(name))
    text = files(plan, "slurm")["job.sbatch"]
    assert len([line for line in text.splitlines() if line.startswith("#SBATCH --nodes")]) == 1
    assert "rm -rf" not in text
    assert "$(id)" not in text


def test_setup_lines_run_on_every_node_before_torchrun(tmp_path: Path) -> None:
    job = launch_job(CASES["equal nodes"], "plan.json", setup=("test -z $UNSET_VARIABLE", "touch 'it was here'"))
    run_slurm(launch_files(CASES["equal nodes"], job, "slurm").files["job.sbatch"], tmp_path, 4)
    assert (tmp_path / "it was here").exists()


def test_exports_of_random_plans_start_every_rank_in_its_place() -> None:
    written = 0
    for seed in range(12):
        plan = random_plan(seed)
        try:
            made = export_slurm(plan)
        except CheckError:
            continue
        written += 1
        assert same_by_slurm(plan, made)
        assert same_by_kubernetes(plan, export_kubernetes(plan))
    assert written > 1


def test_exports_of_launch_files_refuse_what_the_runtime_does() -> None:
    plan = CASES["one node"]
    technique = replace(plan.scenario.technique, attention="math")
    scenario = replace(plan.scenario, technique=technique)
    plan = replace(plan, scenario=scenario, scenario_hash=scenario_hash(scenario))
    for export in (export_slurm, export_kubernetes):
        with pytest.raises(CheckError, match=r"technique\.attention: math"):
            export(plan)
    with pytest.raises(InputError, match=r"technique\.attention: math"):
        launch_job(plan, "plan.json")


def test_a_plan_that_no_config_map_holds_needs_a_volume(tmp_path: Path) -> None:
    plan = CASES["equal nodes"]
    scenario = replace(plan.scenario, source="x" * 1_000_000)
    long = replace(plan, scenario=scenario, scenario_hash=scenario_hash(scenario))
    with pytest.raises(CheckError, match="a config map takes 1,000,000"):
        export_kubernetes(long)
    made = launch_files(long, launch_job(long, "plan.json"), "kubernetes", claim="work").files
    kinds = [document["kind"] for document in yaml.safe_load_all(made["job.yaml"])]
    assert kinds == ["Service", "Job"]
    assert "set -- /workspace/plan.json" in made["job.yaml"]


def test_a_claim_is_where_the_run_works() -> None:
    plan = CASES["equal nodes"]
    made = launch_files(plan, launch_job(plan, "plan.json"), "kubernetes", claim="my-work").files
    for text in made.values():
        assert "claimName: my-work" in text
        assert "cd /workspace" in text


@pytest.mark.parametrize(
    ("image", "claim"), [("a b", "x"), ("", "x"), ("a\nb", "x"), ("a", "B"), ("a", "-x"), ("a", "x y")]
)
def test_names_that_kubernetes_would_not_take_are_refused(image: str, claim: str) -> None:
    plan = CASES["one node"]
    with pytest.raises(InputError, match="expected the name of"):
        launch_files(plan, launch_job(plan, "plan.json"), "kubernetes", image=image, claim=claim)


@pytest.mark.distributed
def test_two_nodes_run_a_plan_together(tmp_path: Path) -> None:
    """Real torchruns, one process on the first node and three on the second."""
    plan = plan_on((1, 1), (1, 3), device="cpu-core")
    save_plan(plan, tmp_path / "plan.json")
    job = launch_job(plan, "plan.json", arguments=("--steps", "1"))
    (tmp_path / "run.sh").write_text(launch_files(plan, job, "torchrun").files["run.sh"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {"PATH": path, "MASTER_PORT": str(port), "PYTHONPATH": str(Path(__file__).parents[2])}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    nodes = [
        subprocess.Popen(
            ["bash", "run.sh", str(node), "127.0.0.1"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    said = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert (tmp_path / "run.json").exists()


def test_a_run_that_can_go_on_is_started_again_by_its_launcher(tmp_path: Path) -> None:
    plan = CASES["equal nodes"]
    job = launch_job(plan, "plan.json", arguments=("--checkpoint", "ck", "--every", "9", "--resume"), restarts=2)
    slurm = launch_files(plan, job, "slurm").files["job.sbatch"]
    assert "#SBATCH --requeue\n#SBATCH --open-mode=append\n" in slurm
    assert [call.restarts for call in run_slurm(slurm, tmp_path, job.nodes)] == [2] * job.nodes
    made = launch_files(plan, job, "kubernetes").files
    (batch,) = [d for d in yaml.safe_load_all(made["job.yaml"]) if d["kind"] == "Job"]
    assert batch["spec"]["backoffLimit"] == 2 * job.nodes
    (kubeflow,) = [d for d in yaml.safe_load_all(made["pytorchjob.yaml"]) if d["kind"] == "PyTorchJob"]
    roles = kubeflow["spec"]["pytorchReplicaSpecs"].values()
    assert {role["restartPolicy"] for role in roles} == {"OnFailure"}
    assert [call.restarts for call in run_manifests(made["job.yaml"], tmp_path)] == [0] * job.nodes  # pods are
    assert "--requeue" not in launch_files(plan, replace(job, restarts=0), "slurm").files["job.sbatch"]


def test_only_a_run_that_goes_on_is_started_again() -> None:
    going_on = execute_options(["--checkpoint", "ck", "--every", "9", "--resume", "--on-nan", "skip"])
    assert (restarts_of(going_on, None), restarts_of(going_on, 0), restarts_of(going_on, 7)) == (3, 0, 7)
    anew = execute_options(["--checkpoint", "ck"])
    assert restarts_of(anew, None) == 0
    with pytest.raises(InputError, match=r"^--restarts 2: a run that is started again would begin anew; .* --resume$"):
        restarts_of(anew, 2)
