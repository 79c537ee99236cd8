"""A plan as a Python module for JAX: meshes of the stages, PartitionSpecs of every parameter and of activations.

JAX compiles one program over one mesh and knows no pipelines: with several stages each has its own part of the devices,
and what drives them is a plug-in that the export names as a loss.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

from mmplan.cost_models.build import build_graph
from mmplan.cost_models.graph import ComputationGraph
from mmplan.cost_models.layer import Layer
from mmplan.errors import CheckError
from mmplan.planner.formats.exported import Exported
from mmplan.planner.formats.jax_mesh import Axes, MeshAxes, mesh_axes
from mmplan.planner.formats.jax_specs import Parameter, Spec, layer_parameters
from mmplan.planner.formats.torchrun_head import title
from mmplan.planner.formats.workarounds import Workaround, filled_up, images_whole, worked_around
from mmplan.planner.plan import Plan
from mmplan.scenario.layer_ids import shorten_ids

TARGET = "jax"
WORKAROUNDS: Mapping[str, Workaround] = {
    **dict.fromkeys(("samples of unlike length", "samples of unlike length between stages"), filled_up),
    "patch groups": images_whole,
}
_MESH = '''

def mesh(devices, stage=0):
    """The mesh of a stage: devices in the order of the plan's ranks, reshaped to AXES."""
    import numpy as np
    from jax.sharding import Mesh

    first, behind = STAGES[stage]["ranks"]
    return Mesh(np.asarray(devices[first:behind]).reshape(tuple(AXES.values())), tuple(AXES))
'''


def export_jax(plan: Plan) -> Exported:
    """`jax_plan.py`: AXES, STAGES, LAYERS, ACTIVATIONS, BATCH and `mesh(devices, stage)`.

    Raises:
        CheckError: no one mesh has the plan's degrees, a dim is no multiple of its axes, or devices are of two kinds;
            the model was recorded.
    """
    if plan.scenario.model.recorded is not None:
        raise CheckError(
            f"JAX shards arrays by their dims, and the recording of {plan.scenario.model.name} knows numbers of "
            "parameters alone: describe the model by hf_config"
        )
    draft = worked_around(plan, TARGET, WORKAROUNDS)
    made, graph = draft.plan, build_graph(draft.plan.scenario)
    axes = mesh_axes(made)
    groups = _alike(made, graph, axes)
    whole = _undivided(made, groups, axes)
    lines = [repr(f"{title(made, 'JAX')}."), "", "from jax.sharding import PartitionSpec as P", ""]
    lines += ["# Axes of a stage's mesh, the slowest first.", f"AXES = {dict(axes.sizes)!r}", ""]
    lines += ["STAGES = [", *(f"    {stage!r}," for stage in _stages(made)), "]", ""]
    lines += ["# Equal layers together; weights are [inputs, outputs].", "LAYERS = [", *_layers(groups), "]", ""]
    lines += ["ACTIVATIONS = {", *_activations(made, axes), "}", ""]
    lines.append(f"BATCH = {_batch(made)!r}")
    notes = ["jax_plan.mesh(jax.devices(), stage) and NamedSharding(mesh, spec) place arrays as the plan has them"]
    if whole:
        notes.append(f"{whole} small arrays stay whole on all replicas: no dim is a multiple of {axes.size(axes.dp)}")
    text = "\n".join(lines) + "\n" + _MESH
    files = {"jax_plan.py": text}
    return Exported(target=TARGET, version="JAX 0.10", files=files, losses=draft.losses, notes=tuple(notes))


def _stages(plan: Plan) -> list[dict[str, object]]:
    stages: list[dict[str, object]] = []
    for index, stage in enumerate(plan.stages):
        ranks = plan.stage_ranks(index)
        stages.append(
            {
                "ranks": (ranks[0], ranks[-1] + 1),
                "layers": list(shorten_ids(stage.layers)),
                "recompute": stage.recompute,
            }
        )
    return stages


Group = tuple[tuple[Layer, ...], tuple[Parameter, ...]]


def _alike(plan: Plan, graph: ComputationGraph, axes: MeshAxes) -> list[Group]:
    """Layers of a module and kind with the same parameters, in the order of the model."""
    layout, found = plan.layout(0), dict[tuple[object, ...], list[Layer]]()
    for layer in graph.layers():
        parameters = layer_parameters(layer, layout, axes)
        found.setdefault((layer.module, layer.kind, parameters), []).append(layer)
    return [(tuple(layers), key[2]) for key, layers in found.items()]  # type: ignore[misc]


def _undivided(plan: Plan, groups: Sequence[Group], axes: MeshAxes) -> int:
    """How many arrays that could be sharded over the replicas stay whole.

    Raises:
        CheckError: an axis does not divide the dim that the plan splits over it.
    """
    for layers, parameters in groups:
        for parameter in parameters:
            for size, names in zip(parameter.shape, parameter.weights, strict=True):
                if size % axes.size(names):
                    raise CheckError(
                        f"JAX splits evenly: {parameter.name} of {layers[0].id} has {size} over {axes.size(names)} "
                        f"ranks = {size / axes.size(names):g}"
                    )
    if plan.sharding == "none" or plan.dp * plan.cp == 1:
        return 0
    shared = set(axes.dp)
    each = ((len(layers), p) for layers, parameters in groups for p in parameters)
    return sum(count for count, p in each if shared and not shared & {name for names in p.state for name in names})


def _layers(groups: Sequence[Group]) -> list[str]:
    lines = []
    for layers, parameters in groups:
        ids = list(shorten_ids([layer.id for layer in layers]))
        lines.append(f"    {{'module': {layers[0].module!r}, 'kind': {layers[0].kind!r}, 'layers': {ids!r},")
        lines.append("     'parameters': {")
        for (name, _), same in groupby(parameters, key=lambda one: (one.name, one.shape)):
            lines.append(f"         {name!r}: {_parameter(next(same))},")
        lines.append("     }},")
    return lines


def _parameter(parameter: Parameter) -> str:
    specs = {"weights": parameter.weights, "gradients": parameter.gradients, "state": parameter.state}
    shown = ", ".join(f"{name!r}: {_spec(spec)}" for name, spec in specs.items())
    return f"{{'shape': {parameter.shape!r}, 'trained': {parameter.trained!r}, {shown}}}"


def _spec(spec: Spec) -> str:
    return f"P({', '.join(map(_entry, spec))})"


def _entry(names: Axes) -> str:
    return "None" if not names else repr(names[0]) if len(names) == 1 else repr(names)


def _activations(plan: Plan, axes: MeshAxes) -> list[str]:
    """[samples, rows, width] between layers, and [samples, rows, heads, head width] at attention."""
    lines = []
    technique = plan.scenario.technique
    by_heads = plan.cp > 1 and technique.context_parallel == "all-to-all"
    for module in plan.scenario.model.modules:
        language = module.kind == "language_model"
        rows = axes.cp if language else ()
        if module.name in plan.spread:
            between: Spec = ((*axes.dp, *axes.cp, *axes.tp), (), ())
            heads: Spec = (between[0], (), (), ())
        else:
            between = (axes.dp, (*rows, *axes.tp) if technique.sequence_parallel else rows, ())
            heads = (axes.dp, (), (*axes.cp, *axes.tp), ()) if language and by_heads else (axes.dp, rows, axes.tp, ())
        if language and by_heads and module.transformer is not None:
            _require_heads(plan, module.name, module.transformer.heads)
        lines.append(f"    {module.name!r}: {{'between': {_spec(between)}, 'attention': {_spec(heads)}}},")
    return lines


def _require_heads(plan: Plan, name: str, heads: int) -> None:
    if heads % plan.width:
        product = f"tp={plan.tp} x cp={plan.cp} = {plan.width}"
        raise CheckError(f"JAX splits evenly: an all-to-all gives {heads} heads of {name} to {product} ranks")


def _batch(plan: Plan) -> dict[str, object]:
    modules = plan.scenario.model.modules
    return {
        "microbatch_size": plan.microbatch_size,
        "microbatches": plan.microbatches,
        "dtype": plan.scenario.precision,
        "frozen": [module.name for module in modules if module.training.mode == "frozen"],
        "adapters": {m.name: list(m.training.targets) for m in modules if m.training.mode == "lora"},
    }
