"""The frameworks that `mmplan export` writes for."""

from collections.abc import Callable
from functools import partial

from mmplan.errors import CheckError, InputError
from mmplan.planner.check import require_structure
from mmplan.planner.formats.accelerate import export_accelerate
from mmplan.planner.formats.cornstarch import export_cornstarch
from mmplan.planner.formats.deepspeed import export_deepspeed
from mmplan.planner.formats.exported import Exported
from mmplan.planner.formats.jax_module import export_jax
from mmplan.planner.formats.matrix import Matrix, migration_matrix
from mmplan.planner.formats.megatron import export_megatron
from mmplan.planner.formats.megatron_mimo import export_megatron_mimo
from mmplan.planner.formats.torch_pipelining import export_torch_pipelining
from mmplan.planner.formats.torchtitan import export_torchtitan
from mmplan.planner.formats.torchtitan_toml import export_torchtitan_toml
from mmplan.planner.plan import Plan
from mmplan.runtime.formats.launch_files import export_kubernetes, export_slurm
from mmplan.scenario.document import did_you_mean, listed
from mmplan.scenario.precisions import unlike_precisions

TARGETS: dict[str, Callable[[Plan], Exported]] = {
    "deepspeed": export_deepspeed,
    "megatron": export_megatron,
    "megatron-mimo": export_megatron_mimo,
    "torch-pipelining": export_torch_pipelining,
    "torchtitan": export_torchtitan,
    "torchtitan-toml": export_torchtitan_toml,
    "accelerate": export_accelerate,
    "jax": export_jax,
    "cornstarch": export_cornstarch,
    "slurm": export_slurm,
    "kubernetes": export_kubernetes,
}
OWN_RUNTIME = ("slurm", "kubernetes")
MESHED = ("megatron-mimo", "slurm", "kubernetes")  # targets where modules can have ranks of their own


def exported(plan: Plan, target: str) -> Exported:
    """The plan for a target.

    Raises:
        InputError: an unknown target.
        CheckError: the plan needs what the target cannot do.
    """
    if target not in TARGETS:
        raise InputError(f"unknown target '{target}'{did_you_mean(target, TARGETS)}; known: {listed(TARGETS, 40)}")
    if plan.meshes and target not in MESHED:
        apart = " and ".join(plan.meshes[0].modules)
        raise CheckError(f"{target} runs all modules on one mesh, the plan has {apart} on {plan.meshes[0]}")
    if (unlike := unlike_precisions(plan.scenario)) and target not in OWN_RUNTIME:
        raise CheckError(f"files for {target} say one precision, the plan has {unlike}")
    return TARGETS[target](plan)


def matrix_of(plan: Plan) -> Matrix:
    """What of the plan each framework can run, every exporter asked.

    Raises:
        CheckError: the plan is not sound.
    """
    require_structure(plan)
    return migration_matrix(plan, {name: partial(exported, target=name) for name in TARGETS})
