"""What a plan may not have for a model of the user's own. Imports no torch: `optimize` asks."""

from mmplan.errors import InputError
from mmplan.planner.plan import Plan
from mmplan.planner.plan_technique import without


def refuse_plan(plan: Plan) -> None:
    """InputError where it has some of it."""
    if plan.ep > 1 and plan.etp > 1:
        raise InputError(
            f"the plan has etp={plan.etp}, and experts of your own model lie whole on each of their ranks: set "
            "`constraints.etp: [1]` in the scenario and optimize again"
        )
    degrees = [(name, getattr(mesh, name)) for mesh in plan.meshes for name in ("tp", "ep")]
    degrees = [("tp", plan.tp), ("ep", plan.ep), *degrees]
    shared = next((f"{name}={degree}" for name, degree in degrees if degree > 1), "")
    compression = plan.scenario.technique.compression
    if shared and compression != "none":
        raise InputError(
            f"the plan compresses gradients ({compression}) and has {shared}, and of your own model ranks would "
            f"choose unlike parts of what all have whole: set `constraints.{shared[:2]}: [1]` or "
            "`constraints.compression: none`"
        )
    if plan.scenario.technique.sequence_parallel and plan.tp > 1 and plan.cp > 1:
        raise InputError(
            f"the plan has sequence_parallel over tp={plan.tp} and cp={plan.cp}, and of your own model this release "
            f"cuts rows over one of both: {without(plan.scenario, 'sequence_parallel')}, or set `constraints.cp: [1]`, "
            "and optimize again"
        )
    if plan.scenario.technique.host_activations:
        raise InputError(
            "the plan keeps activations of blocks in host memory, which is not done to a model of your own: take "
            "activations out of `constraints.offload` and optimize again"
        )
    if plan.patches:
        raise InputError(
            f"the plan cuts images of {' and '.join(plan.patches)} along patches, and of your own model ranks take "
            f"whole images: set `constraints.spread: [{', '.join(plan.spread)}]` in the scenario and optimize again"
        )
    if plan.batch_factor > 1:
        raise InputError(
            f"the plan runs {' and '.join(plan.together)} on {plan.batch_factor} microbatches at once, and a model of "
            "your own is executed on each alone: take `constraints.encode_together` out and optimize again"
        )
    if plan.prefetch:
        raise InputError(
            f"the plan runs {' and '.join(plan.prefetch)} a step ahead, and a model of your own is executed step by "
            "step: take `constraints.prefetch` out and optimize again"
        )
    for mesh in plan.meshes:
        if mesh.cp > 1:
            raise InputError(
                f"the plan has {' and '.join(mesh.modules)} on cp={mesh.cp} ranks of their own, and of a model of your "
                f"own these have whole batches: set `constraints.modules: {{{mesh.modules[0]}: {{cp: 1}}}}` in the "
                "scenario and optimize again"
            )
