"""Launch files of a plan by the launcher they are for; `mmplan launch` and `mmplan export` write the same ones."""

from mmplan.errors import CheckError, InputError
from mmplan.planner.check import require_structure
from mmplan.planner.formats.exported import Exported
from mmplan.planner.plan import Plan, plan_text
from mmplan.runtime.formats.job import LaunchJob, launch_job
from mmplan.runtime.formats.kubernetes import IMAGE, PLAN_FILE, kubernetes_manifests
from mmplan.runtime.formats.slurm import slurm_script
from mmplan.runtime.formats.torchrun_script import torchrun_script
from mmplan.scenario.document import did_you_mean, listed

LAUNCHERS = ("torchrun", "slurm", "kubernetes")


def launch_files(
    plan: Plan,
    job: LaunchJob,
    launcher: str,
    *,
    hosts: tuple[str, ...] = (),
    image: str | None = None,
    claim: str | None = None,
) -> Exported:
    """The files of one launcher.

    Raises:
        InputError: an unknown launcher.
        CheckError: it cannot start this job.
    """
    match launcher:
        case "torchrun":
            return torchrun_script(job, hosts)
        case "slurm":
            return slurm_script(job)
        case "kubernetes":
            return kubernetes_manifests(job, plan_text(plan), IMAGE if image is None else image, claim or "")
    hint = did_you_mean(launcher, LAUNCHERS)
    raise InputError(f"unknown launcher '{launcher}'{hint}; known: {listed(LAUNCHERS, 40)}")


def export_slurm(plan: Plan) -> Exported:
    """A batch script; the plan is expected beside it.

    Raises:
        CheckError: mmplan's runtime cannot execute the plan.
    """
    return slurm_script(_exported_job(plan))


def export_kubernetes(plan: Plan) -> Exported:
    """Manifests.

    Raises:
        CheckError: mmplan's runtime cannot execute the plan, or it is too long for a config map.
    """
    return kubernetes_manifests(_exported_job(plan), plan_text(plan))


def _exported_job(plan: Plan) -> LaunchJob:
    require_structure(plan)
    try:
        return launch_job(plan, PLAN_FILE)
    except InputError as error:
        raise CheckError(str(error)) from error
